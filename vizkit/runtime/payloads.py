"""What the arguments of each method of torch's `ProcessGroup` say: bytes, tensors, root, splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from vizkit.runtime.board import ANY_NUMEL
from vizkit.trace import NONE, SpanKind


class Payload(NamedTuple):
    """What the arguments of a call say; `root` is the group rank of the root or of the other end of a message."""

    payload_bytes: int
    tensor: torch.Tensor | None = None
    numel: int = ANY_NUMEL
    root: int = NONE
    tag: int = 0
    split_bytes: tuple[int, ...] = ()
    reduction: object = None


def _bytes(tensors: Any) -> int:
    """Bytes of a tensor, or of all tensors in a nested list."""
    return tensors.nbytes if hasattr(tensors, "nbytes") else sum(map(_bytes, tensors))


def _numel(tensors: Any) -> int:
    return tensors.numel() if hasattr(tensors, "numel") else sum(map(_numel, tensors))


def _first(tensors: Any) -> torch.Tensor | None:
    while isinstance(tensors, (list, tuple)):
        if not tensors:
            return None
        tensors = tensors[0]
    return tensors


def _argument(position: int, name: str, args: Sequence[Any], kwargs: dict[str, Any], default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _option(position: int, name: str, args: Sequence[Any], kwargs: dict[str, Any], default: Any = None) -> Any:
    """A field of the options object at `position`, or that argument itself in the forms that take no options."""
    options = _argument(position, "opts", args, kwargs)
    return getattr(options, name, default if options is None else options)


def _root(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    return _option(0, "rootRank", args, kwargs, kwargs.get("root", 0))


def _reduced(size: int, tensors: Any, *args: Any, **kwargs: Any) -> Payload:
    reduction = _option(0, "reduceOp", args, kwargs, kwargs.get("op", "SUM"))
    return Payload(_bytes(tensors), _first(tensors), _numel(tensors), reduction=reduction)


def _broadcast(size: int, tensors: Any, *args: Any, **kwargs: Any) -> Payload:
    return Payload(_bytes(tensors), _first(tensors), _numel(tensors), _root(args, kwargs))


def _reduced_to_root(size: int, tensors: Any, *args: Any, **kwargs: Any) -> Payload:
    reduction = getattr(_argument(0, "opts", args, kwargs), "reduceOp", kwargs.get("op", "SUM"))
    return Payload(_bytes(tensors), _first(tensors), _numel(tensors), _root(args, kwargs), reduction=reduction)


def _gathered_everywhere(size: int, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Payload:
    return Payload(_bytes(outputs), _first(inputs), _numel(inputs))


def _gathered(size: int, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Payload:
    return Payload(size * _bytes(inputs), _first(inputs), _numel(inputs), _root(args, kwargs))


def _scattered(size: int, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Payload:
    return Payload(size * _bytes(outputs), _first(outputs), _numel(outputs), _root(args, kwargs))


def _reduce_scattered(size: int, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Payload:
    reduction = _option(0, "reduceOp", args, kwargs, kwargs.get("op", "SUM"))
    return Payload(_bytes(inputs), _first(inputs), _numel(inputs), reduction=reduction)


def _exchanged_single(
    size: int, output: Any, input: Any, output_splits: Any = (), input_splits: Any = (), *args: Any, **kwargs: Any
) -> Payload:
    if len(set(input_splits)) <= 1 and len(set(output_splits)) <= 1:
        return Payload(input.nbytes, input, input.numel())
    row_bytes = input.nbytes // input.shape[0] if input.shape[0] else 0
    rows = input_splits or [input.shape[0] // size] * size
    return Payload(input.nbytes, input, split_bytes=tuple(count * row_bytes for count in rows))


def _exchanged(size: int, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Payload:
    sizes = tuple(map(_bytes, inputs))
    return Payload(sum(sizes), _first(inputs), split_bytes=() if len(set(sizes)) <= 1 else sizes)


def _message(size: int, tensors: Any, peer: int, tag: int = 0) -> Payload:
    return Payload(_bytes(tensors), _first(tensors), _numel(tensors), peer, tag)


def _message_from_anybody(size: int, tensors: Any, tag: int = 0) -> Payload:
    return Payload(_bytes(tensors), _first(tensors), _numel(tensors), NONE, tag)


def _nothing(size: int, *args: Any, **kwargs: Any) -> Payload:
    return Payload(0)


Describe = Callable[..., Payload]

_K = SpanKind
OPERATIONS: dict[str, tuple[SpanKind, Describe]] = {
    "allreduce": (_K.ALL_REDUCE, _reduced),
    "allreduce_coalesced": (_K.ALL_REDUCE, _reduced),
    "broadcast": (_K.BROADCAST, _broadcast),
    "reduce": (_K.REDUCE, _reduced_to_root),
    "allgather": (_K.ALL_GATHER, _gathered_everywhere),
    "allgather_coalesced": (_K.ALL_GATHER, _gathered_everywhere),
    "all_gather_single": (_K.ALL_GATHER, _gathered_everywhere),
    "_allgather_base": (_K.ALL_GATHER, _gathered_everywhere),
    "all_gather_single_coalesced": (_K.ALL_GATHER, _gathered_everywhere),
    "allgather_into_tensor_coalesced": (_K.ALL_GATHER, _gathered_everywhere),
    "gather": (_K.GATHER, _gathered),
    "scatter": (_K.SCATTER, _scattered),
    "reduce_scatter": (_K.REDUCE_SCATTER, _reduce_scattered),
    "reduce_scatter_single": (_K.REDUCE_SCATTER, _reduce_scattered),
    "_reduce_scatter_base": (_K.REDUCE_SCATTER, _reduce_scattered),
    "reduce_scatter_single_coalesced": (_K.REDUCE_SCATTER, _reduce_scattered),
    "reduce_scatter_tensor_coalesced": (_K.REDUCE_SCATTER, _reduce_scattered),
    "all_to_all_single": (_K.ALL_TO_ALL, _exchanged_single),
    "alltoall_base": (_K.ALL_TO_ALL, _exchanged_single),
    "alltoall": (_K.ALL_TO_ALL, _exchanged),
    "send": (_K.SEND, _message),
    "recv": (_K.RECEIVE, _message),
    "recv_anysource": (_K.RECEIVE, _message_from_anybody),
    "barrier": (_K.BARRIER, _nothing),
}
"""Method of torch's `ProcessGroup` → what it is, and how to read its arguments (the group's size comes first)."""
