"""Which memory a tensor lies in: its storages, each counted once and whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested dicts, lists and tuples."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for value in tree:
            yield from tensors_in(value)


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that a tensor's data lies in on this rank: one, or those inside a wrapper such as a `DTensor`.

    A view has the storage of its base, whole. A tensor on the meta device has none.

    >>> [storage.nbytes() for storage in storages_of(torch.zeros(4, 5).t()[:2])]
    [80]
    """
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a DTensor names its mesh too
                yield from storages_of(part)
    elif tensor.device.type != "meta" and tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def key_of(storage: torch.UntypedStorage) -> int:
    """A number for the storage that no other has while it lives, whichever of its tensors it was read from."""
    return storage._cdata


def bytes_by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each distinct storage that is not empty.

    >>> weight = torch.zeros(4, 5)
    >>> sum(bytes_by_storage([weight, weight.t(), torch.zeros(3)]).values())
    92
    """
    found = {}
    for tensor in tensors:
        for storage in storages_of(tensor):
            if num_bytes := storage.nbytes():
                found[key_of(storage)] = num_bytes
    return found
