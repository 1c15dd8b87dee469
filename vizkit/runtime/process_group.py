"""Process groups that record: they stand in the place of torch's backends and pass every call on to the real one."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d
from torch.distributed.distributed_c10d import GroupName

from vizkit.runtime.board import Operation
from vizkit.runtime.payloads import COLLECTIVES, MESSAGES, Method, first_tensor, num_bytes, num_elements
from vizkit.runtime.work import RecordedWork
from vizkit.trace import NONE, SpanKind

if TYPE_CHECKING:
    from vizkit.runtime.recorder import Recorder

_TELLS_NOBODY = (SpanKind.REDUCE_SCATTER, SpanKind.SEND, SpanKind.RECEIVE)
"""Gloo's work for these has no future, so that only its wait tells when it was over."""


class GroupInfo(NamedTuple):
    """What a record says about a process group; `members` are global ranks."""

    name: str
    members: tuple[int, ...]


class RecordingProcessGroup(ProcessGroup):
    """A process group of one backend; subclasses made by `recording_class` say whose calls go where.

    Calls go through a plain `ProcessGroup` inside, so that torch's own observers (`CommDebugMode`) still see them.
    """

    recorder: Recorder
    real_class: type
    backend_type: ProcessGroup.BackendType
    device_types: tuple[str, ...]

    def __init__(self, store: Any, rank: int, size: int, options: Any = None, timeout: timedelta | None = None) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stubs lack this form
        limit = self.recorder.timeout
        if options is not None:
            options._timeout = options._timeout if limit is None else min(options._timeout, limit)
            self._real = self.real_class(store, rank, size, options)
        else:
            given = [t for t in (timeout, limit) if t is not None]
            self._real = self.real_class(store, rank, size, **({"timeout": min(given)} if given else {}))
        self._inner = ProcessGroup(store, rank, size)
        for group in (self, self._inner):
            for device_type in self.device_types:
                group._register_backend(torch.device(device_type), self.backend_type, self._real)
            group._set_default_backend(self.backend_type)
        self._name = ""
        self._size = size
        self._info: GroupInfo | None = None
        self._sequence = itertools.count()
        self._messages: Counter[str] = Counter()
        self._coalesced: list[tuple[int, int]] | None = None

    @property
    def options(self) -> Any:
        return self._real.options

    def _set_sequence_number_for_group(self) -> None:
        self._real._set_sequence_number_for_group()

    def getBackendName(self) -> str:  # noqa: N802 - the names that torch's C++ code calls
        return self._real.name()

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name
        self._inner._set_group_name(GroupName(name))

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def group_name(self) -> GroupName:
        return GroupName(self._name)

    @property
    def info(self) -> GroupInfo:
        """Known once torch has told the backend its ranks, which it does after constructing it."""
        if self._info is None:
            members = tuple(self._real.options.global_ranks_in_group) or tuple(range(self._size))
            self._info = GroupInfo(self._name, members)
        return self._info

    def _collective(self, name: str, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self.recorder
        wall, mark = monotonic_ns(), recorder.read_clock()
        info = self._info or self.info
        kind = method.kind
        payload_bytes, tensors, split_bytes = method.measure(self._size, *args, **kwargs)
        options = args[method.options_at] if len(args) > method.options_at else kwargs.get("opts")
        is_async = getattr(options, "asyncOp", True)
        peer = NONE
        if method.is_rooted:
            peer = info.members[getattr(options, "rootRank", kwargs.get("root", options) or 0)]
        slot = NONE
        if recorder.board is not None:
            detail = _reduction_name(options, kwargs) if method.reduces else ""
            operation = _operation(kind, info.name, next(self._sequence), info.members, tensors, peer, detail)
            slot = recorder.board.post(operation)
        inner_work = getattr(self._inner, name)(*args, **kwargs)
        call = (next(recorder.numbers), kind, info, payload_bytes, peer, 0, split_bytes)
        return self._posted(call, slot, inner_work, is_async, wall, mark)

    def _message(self, name: str, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self.recorder
        wall, mark = monotonic_ns(), recorder.read_clock()
        info = self._info or self.info
        from_anybody = name == "recv_anysource"
        tensors, first, *rest = (*args, *kwargs.values())
        tag = first if from_anybody else rest[0] if rest else 0
        peer = NONE if from_anybody else info.members[first]
        slot = NONE
        if recorder.board is not None:
            me = recorder.rank
            source, destination = (me, peer) if method.kind is SpanKind.SEND else (peer, me)
            channel = _channel_name(info, source, destination, tag)
            members = (me,) if from_anybody else (me, peer)
            operation = _operation(method.kind, channel, self._messages[channel], members, tensors, peer)
            self._messages[channel] += 1
            slot = recorder.board.post(operation)
        with self._connecting(slot):
            inner_work = getattr(self._inner, name)(*args, **kwargs)
        number = next(recorder.numbers)
        recorded = self._posted(
            (number, method.kind, info, num_bytes(tensors), peer, tag, ()), slot, inner_work, True, wall, mark
        )
        if from_anybody and recorded is not None:
            recorded.on_arrival = functools.partial(self._learn_source, number, tag)
        return recorded

    @contextlib.contextmanager
    def _connecting(self, slot: int) -> Iterator[None]:
        """Gloo posts the first message between two ranks only once they are connected, which can take for ever."""
        recorder, board = self.recorder, self.recorder.board
        if board is None or get_ident() != recorder.thread:
            yield
            return
        board.waiting(slot, recorder.is_crowded())
        try:
            yield
        finally:
            board.resumed()

    def _posted(self, call: tuple[Any, ...], slot: int, inner_work: Any, is_async: bool, wall: int, mark: Any) -> Any:
        """Notes a call just posted; gives its work, wrapped, or None where it is over, as torch's backends do."""
        recorder = self.recorder
        if self._coalesced is not None:
            self._coalesced.append((call[0], slot))
            is_async = True
        recorder.note_call(call, inner_work, wall, mark, is_async)
        if inner_work is None:
            return None
        if not is_async:
            return self._wait_at_once(call[0], slot, inner_work)
        recorded = RecordedWork(inner_work, recorder, (call[0],), (slot,))
        if recorder.futures_tell_time and call[1] not in _TELLS_NOBODY:
            recorded.watch()
        return recorded

    def _wait_at_once(self, number: int, slot: int, inner_work: Any) -> None:
        """The wait of a call that is not async, without a work object in between: the usual call, so the quickest."""
        recorder, wall = self.recorder, monotonic_ns()
        board = recorder.board if get_ident() == recorder.thread else None  # the notebook watches the main thread
        if board is not None:
            board.waiting(slot, recorder.is_crowded())
        try:
            inner_work.wait()
            recorder.note_done(number, slot)
        finally:
            if board is not None:
                board.resumed()
            recorder.note_wait((number,), wall, None)

    def _learn_source(self, number: int, tag: int, source: int) -> None:
        """A receive from anybody has found its sender: one more message has passed on that edge."""
        sender = self.info.members[source]
        self.recorder.sources[number] = sender
        self._messages[_channel_name(self.info, sender, self.recorder.rank, tag)] += 1

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []
        super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        """The one work that stands for all calls since `_start_coalescing`."""
        posted, self._coalesced = self._coalesced or [], None
        whole = super()._end_coalescing(device)
        if whole is None or not posted:
            return whole
        calls, slots = zip(*posted, strict=True)
        return RecordedWork(whole, self.recorder, calls, slots)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Blocks without a work object, so the wait is noted here."""
        recorder = self.recorder
        wall, mark = monotonic_ns(), recorder.read_clock()
        info, board = self.info, recorder.board
        slot = NONE
        if board is not None:
            slot = board.post(_operation(SpanKind.BARRIER, info.name, next(self._sequence), info.members, None, NONE))
            if get_ident() == recorder.thread:
                board.waiting(slot, recorder.is_crowded())
        number = next(recorder.numbers)
        recorder.note_call((number, SpanKind.BARRIER, info, 0, NONE, 0, ()), None, wall, mark, False)
        try:
            self._inner.monitored_barrier(*args, **kwargs)  # type: ignore[attr-defined]
            recorder.note_done(number, slot)
        finally:
            if board is not None and get_ident() == recorder.thread:
                board.resumed()
            recorder.note_wait((number,), monotonic_ns(), None)


def _operation(
    kind: SpanKind, key: str, sequence: int, members: tuple[int, ...], tensors: Any, peer: int, detail: str = ""
) -> Operation:
    """What the board compares between ranks."""
    alone = tensors[0] if isinstance(tensors, list) and len(tensors) == 1 else tensors
    tensor = alone if isinstance(alone, torch.Tensor) else first_tensor(alone)
    if tensor is None:
        return Operation(kind, key, sequence, members, peer=peer, detail=detail)
    numel = tensor.numel() if tensor is alone else num_elements(alone)
    return Operation(kind, key, sequence, members, _dtype_name(tensor.dtype), tensor.shape, numel, peer, detail)


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    """
    >>> _dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def _channel_name(info: GroupInfo, source: int, destination: int, tag: int) -> str:
    return f"{info.name}:{source}>{destination}:{tag}"


_REDUCTIONS = {value.value: name for name, value in ReduceOp.RedOpType.__members__.items()}


def _reduction_name(options: Any, kwargs: dict[str, Any]) -> str:
    """The reduction in an options object, or in the forms of a method that take it as an argument of its own.

    >>> _reduction_name(ReduceOp.MAX, {}), _reduction_name(None, {"op": ReduceOp.SUM}), _reduction_name(None, {})
    ('MAX', 'SUM', 'SUM')
    """
    reduction = getattr(options, "reduceOp", kwargs.get("op", options))
    if reduction == ReduceOp.SUM:  # the usual one, and quicker to compare than to name
        return "SUM"
    reduction = getattr(reduction, "op", reduction)
    return "SUM" if reduction is None else _REDUCTIONS.get(reduction.value, "")


def _recording(name: str, method: Method) -> Callable[..., Any]:
    is_message = name in MESSAGES

    def record(self: RecordingProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return (self._message if is_message else self._collective)(name, method, args, kwargs)

    record.__name__ = name
    return record


for _name, _method in (COLLECTIVES | MESSAGES).items():
    setattr(RecordingProcessGroup, _name, _recording(_name, _method))


def batching(batch_isend_irecv: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's function, posting as one what a backend can only run as one.

    Torch does so for NCCL where the type of the group is `ProcessGroup` itself; posted one by one, two ranks that send
    to each other first would wait for each other.
    """

    @functools.wraps(batch_isend_irecv)
    def batched(p2p_op_list: list[Any]) -> Any:
        group, device = p2p_op_list[0].group or distributed_c10d._get_default_group(), p2p_op_list[0].tensor.device
        if not isinstance(group, RecordingProcessGroup) or not group._get_backend(device).supports_coalescing:
            return batch_isend_irecv(p2p_op_list)
        with distributed_c10d._coalescing_manager(group, device, async_ops=True) as manager:
            batch_isend_irecv(p2p_op_list)
        return manager.works

    return batched


def recording_class(recorder: Recorder, backend: str, real_class: type) -> type[RecordingProcessGroup]:
    """The class to put in the place of `real_class`, the process group of `backend` ("gloo" or "nccl")."""
    cuda = ("cuda",) if torch.cuda.is_available() else ()
    members = {
        "recorder": recorder,
        "real_class": real_class,
        "backend_type": getattr(ProcessGroup.BackendType, backend.upper()),
        "device_types": cuda if backend == "nccl" else ("cpu", *cuda),
    }
    return type(f"Recording{real_class.__name__}", (RecordingProcessGroup,), members)
