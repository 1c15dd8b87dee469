"""Cuts a batch into microbatches and puts their outputs together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from vizkit.errors import InvalidInputError

Signature = tuple[Any, ...]
"""What a microbatch looks like: its structure, and shape and dtype of each tensor."""


def split(name: str, tree: Any, count: int) -> tuple[list[Any], int]:
    """`count` microbatches of equal size along the first dimension of each tensor of `tree`, and the batch's size.

    What is no tensor goes to each. Raises `InvalidInputError` where there is no tensor or a scalar one, where tensors
    differ in batch size, and for a batch that does not divide, with the nearest sizes that do.

    >>> split("x", {"tokens": torch.arange(4)}, 2)
    ([{'tokens': tensor([0, 1])}, {'tokens': tensor([2, 3])}], 4)
    """
    leaves, structure = tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        kinds = ", ".join(type(leaf).__name__ for leaf in leaves[:3]) or "nothing"
        raise InvalidInputError.because(
            name, kinds, "has no tensor", "give each rank the whole batch as tensors, such as torch.as_tensor(array)"
        )
    if scalars := [tensor for tensor in tensors if not tensor.ndim]:
        raise InvalidInputError.because(
            name,
            scalars[0].item(),
            "is a tensor without a batch dimension, and cannot be cut into microbatches",
            "give a plain number, which every microbatch gets, or a tensor with one value for each sample",
        )
    sizes = sorted({tensor.shape[0] for tensor in tensors})
    if len(sizes) > 1:
        raise InvalidInputError.because(
            name, sizes, "its tensors differ in batch size, the first dimension", "give tensors of one batch"
        )
    batch = sizes[0]
    if batch % count or not batch:
        nearest = [size for size in (batch // count * count, (batch // count + 1) * count) if size]
        raise InvalidInputError.because(
            f"batch size of {name}",
            batch,
            f"does not divide into {count} microbatches of equal size" if batch else "has no sample",
            f"use a batch of {' or '.join(map(str, nearest))}, or another num_microbatches",
        )
    parts = [leaf.tensor_split(count) if isinstance(leaf, torch.Tensor) else [leaf] * count for leaf in leaves]
    return [tree_unflatten([part[index] for part in parts], structure) for index in range(count)], batch


def signature_of(microbatch: Any) -> Signature:
    """
    >>> signature_of(torch.zeros(2, 3)) == signature_of(torch.ones(2, 3)) != signature_of(torch.zeros(2, 4))
    True
    """
    leaves, structure = tree_flatten(microbatch)
    return (str(structure), *((tuple(x.shape), x.dtype) for x in leaves if isinstance(x, torch.Tensor)))


def shapes_text(signature: Signature) -> str:
    """
    >>> shapes_text(signature_of((torch.zeros(2, 3), torch.arange(2))))
    'float32[2, 3], int64[2]'
    """
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in signature[1:])


def join(outputs: Sequence[Any]) -> Any:
    """The outputs of all microbatches as one: tensors one after the other, anything else as a list.

    >>> join([torch.tensor([1]), torch.tensor([2])]), join(["a", "b"])
    (tensor([1, 2]), ['a', 'b'])
    """
    structure = tree_flatten(outputs[0])[1]
    columns = zip(*(tree_flatten(output)[0] for output in outputs), strict=True)
    joined = [
        torch.cat(column) if all(isinstance(x, torch.Tensor) and x.ndim for x in column) else list(column)
        for column in columns
    ]
    return tree_unflatten(joined, structure)
