"""What the arguments of each method of torch's `ProcessGroup` say: bytes, tensors to compare, splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vizkit.trace import SpanKind

Measured = tuple[int, Any, tuple[int, ...]]
"""Payload bytes; the tensors that have the same dtype and size on all ranks, or None; split bytes."""


class Method(NamedTuple):
    """One method of `ProcessGroup`; `measure` takes the group's size and then the method's own arguments."""

    kind: SpanKind
    measure: Callable[..., Measured]
    options_at: int
    """Position of the options, after the tensors; for a message, of the peer."""
    is_rooted: bool = False
    reduces: bool = False


def num_bytes(tensors: Any) -> int:
    """Bytes of a tensor, or of all tensors in a nested list.

    >>> num_bytes([torch.zeros(3), [torch.zeros(2, dtype=torch.int64)]])
    28
    """
    if isinstance(tensors, (list, tuple)):
        return num_bytes(tensors[0]) if len(tensors) == 1 else sum(map(num_bytes, tensors))
    return tensors.nbytes


def num_elements(tensors: Any) -> int:
    """
    >>> num_elements([torch.zeros(3), [torch.zeros(2, 2)]])
    7
    """
    return tensors.numel() if isinstance(tensors, torch.Tensor) else sum(map(num_elements, tensors))


def first_tensor(tensors: Any) -> torch.Tensor | None:
    """
    >>> first_tensor([[torch.zeros(3)], torch.zeros(2)]).shape, first_tensor([])
    (torch.Size([3]), None)
    """
    while isinstance(tensors, (list, tuple)):
        if not tensors:
            return None
        tensors = tensors[0]
    return tensors


def _in_place(size: int, tensors: Any, *_: Any, **__: Any) -> Measured:
    return num_bytes(tensors), tensors, ()


def _all_outputs(size: int, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Measured:
    return num_bytes(outputs), inputs, ()


def _all_inputs(size: int, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Measured:
    return num_bytes(inputs), inputs, ()


def _gathered(size: int, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Measured:
    """Only the root has outputs; they are as large as one input for each rank."""
    return size * num_bytes(inputs), inputs, ()


def _scattered(size: int, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Measured:
    """Only the root has inputs; they are as large as one output for each rank."""
    return size * num_bytes(outputs), outputs, ()


def _exchanged_rows(
    size: int, output: Any, input: Any, output_splits: Any = (), input_splits: Any = (), *_: Any, **__: Any
) -> Measured:
    if len(set(input_splits)) <= 1 and len(set(output_splits)) <= 1:
        return input.nbytes, input, ()
    row_bytes = input.nbytes // input.shape[0] if input.shape[0] else 0
    rows = input_splits or [input.shape[0] // size] * size
    return input.nbytes, None, tuple(count * row_bytes for count in rows)


def _exchanged(size: int, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Measured:
    sizes = tuple(map(num_bytes, inputs))
    return sum(sizes), None, () if len(set(sizes)) <= 1 else sizes


def _nothing(size: int, *_: Any, **__: Any) -> Measured:
    return 0, None, ()


_K = SpanKind
_ALL_REDUCE = Method(_K.ALL_REDUCE, _in_place, 1, reduces=True)
_ALL_GATHER = Method(_K.ALL_GATHER, _all_outputs, 2)
_REDUCE_SCATTER = Method(_K.REDUCE_SCATTER, _all_inputs, 2, reduces=True)

COLLECTIVES: dict[str, Method] = {
    "allreduce": _ALL_REDUCE,
    "allreduce_coalesced": _ALL_REDUCE,
    "broadcast": Method(_K.BROADCAST, _in_place, 1, is_rooted=True),
    "reduce": Method(_K.REDUCE, _in_place, 1, is_rooted=True, reduces=True),
    "allgather": _ALL_GATHER,
    "allgather_coalesced": _ALL_GATHER,
    "all_gather_single": _ALL_GATHER,
    "_allgather_base": _ALL_GATHER,
    "all_gather_single_coalesced": _ALL_GATHER,
    "allgather_into_tensor_coalesced": _ALL_GATHER,
    "gather": Method(_K.GATHER, _gathered, 2, is_rooted=True),
    "scatter": Method(_K.SCATTER, _scattered, 2, is_rooted=True),
    "reduce_scatter": _REDUCE_SCATTER,
    "reduce_scatter_single": _REDUCE_SCATTER,
    "_reduce_scatter_base": _REDUCE_SCATTER,
    "reduce_scatter_single_coalesced": _REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": _REDUCE_SCATTER,
    "all_to_all_single": Method(_K.ALL_TO_ALL, _exchanged_rows, 4),
    "alltoall_base": Method(_K.ALL_TO_ALL, _exchanged_rows, 4),
    "alltoall": Method(_K.ALL_TO_ALL, _exchanged, 2),
    "barrier": Method(_K.BARRIER, _nothing, 0),
}
"""Method of torch's `ProcessGroup` → what it does and how to read its arguments."""

MESSAGES: dict[str, Method] = {
    "send": Method(_K.SEND, _in_place, 1),
    "recv": Method(_K.RECEIVE, _in_place, 1),
    "recv_anysource": Method(_K.RECEIVE, _in_place, 1),
}
