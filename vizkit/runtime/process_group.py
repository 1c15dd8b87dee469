"""Process groups that record: they stand in the place of torch's backends and pass every call on to the real one."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from vizkit.runtime.board import Operation
from vizkit.runtime.payloads import OPERATIONS, Describe, Payload
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
        super().__init__(rank, size)
        limit = self.recorder.timeout
        if options is not None:
            options._timeout = limit if limit is not None else options._timeout
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
        self._collectives = itertools.count()
        self._messages: Counter[str] = Counter()
        self._coalesced: list[RecordedWork] | None = None

    @property
    def options(self) -> Any:
        return self._real.options

    def _set_sequence_number_for_group(self) -> None:
        self._real._set_sequence_number_for_group()

    def getBackendName(self) -> str:  # noqa: N802 - the names that torch's C++ code calls
        return self._real.name()

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name
        self._inner._set_group_name(name)

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def info(self) -> GroupInfo:
        """Known once torch has told the backend its ranks, which it does after constructing it."""
        if self._info is None:
            members = tuple(self._real.options.global_ranks_in_group) or tuple(range(self._size))
            self._info = GroupInfo(self._name, members)
        return self._info

    def _record(self, name: str, kind: SpanKind, payload: Payload, args: Any, kwargs: Any, wall: int, work: Any) -> Any:
        recorder = self.recorder
        info = self._info or self.info
        peer = info.members[payload.root] if payload.root >= 0 else NONE
        slot = NONE if recorder.board is None else recorder.board.post(self._operation(kind, info, payload, peer))
        number = next(recorder.numbers)
        inner_work = getattr(self._inner, name)(*args, **kwargs)
        recorded = None
        if inner_work is not None:
            recorded = RecordedWork(inner_work, recorder, (number,), (slot,))
            if recorder.futures_tell_time and kind not in _TELLS_NOBODY:
                recorded.watch()
            if kind is SpanKind.RECEIVE and peer == NONE:
                recorded.on_arrival = functools.partial(self._learn_source, number, payload.tag)
            if self._coalesced is not None:
                self._coalesced.append(recorded)
        recorder.note_call(
            number, kind, info, payload.payload_bytes, peer, payload.tag, payload.split_bytes, inner_work, wall, work
        )
        return recorded

    def _operation(self, kind: SpanKind, info: GroupInfo, payload: Payload, peer: int) -> Operation:
        tensor = payload.tensor
        dtype, shape = ("", ()) if tensor is None else (str(tensor.dtype)[6:], tuple(tensor.shape))
        if kind is SpanKind.SEND or kind is SpanKind.RECEIVE:
            me = self.recorder.rank
            edge = f"{me}>{peer}" if kind is SpanKind.SEND else f"{peer}>{me}"
            key = f"{info.name}:{edge}:{payload.tag}"
            sequence = self._messages[key]
            self._messages[key] += 1
            members = (me, peer) if peer >= 0 else (me,)
            return Operation(kind, key, sequence, members, dtype, shape, payload.numel, peer)
        reduction = payload.reduction
        detail = "" if reduction is None else _reduction_name(reduction)
        sequence = next(self._collectives)
        return Operation(kind, info.name, sequence, info.members, dtype, shape, payload.numel, peer, detail)

    def _learn_source(self, number: int, tag: int, source: int) -> None:
        """A receive from anybody has found its sender, whose messages it takes part in counting."""
        sender = self.info.members[source]
        self.recorder.sources[number] = sender
        self._messages[f"{self.info.name}:{sender}>{self.recorder.rank}:{tag}"] += 1

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []
        super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        """The one work that stands for all calls since `_start_coalescing`."""
        inside, self._coalesced = self._coalesced or [], None
        whole = super()._end_coalescing(device)
        return None if whole is None else RecordedWork.all_of(whole, inside)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Blocks without a work object, so the wait is noted here."""
        recorder = self.recorder
        wall, work = monotonic_ns(), recorder.read_clock()
        slot = NONE
        if recorder.board is not None:
            slot = recorder.board.post(self._operation(SpanKind.BARRIER, self.info, Payload(0), NONE))
            recorder.board.waiting(slot)
        number = next(recorder.numbers)
        recorder.note_call(number, SpanKind.BARRIER, self.info, 0, NONE, 0, (), None, wall, work)
        wall, work = monotonic_ns(), recorder.read_clock()
        try:
            self._inner.monitored_barrier(*args, **kwargs)
            recorder.note_done(number, slot)
        finally:
            if recorder.board is not None:
                recorder.board.resumed()
            recorder.note_wait((number,), wall, work)


def _reduction_name(reduction: object) -> str:
    """
    >>> _reduction_name("SUM")
    'SUM'
    """
    return str(getattr(reduction, "op", reduction)).rsplit(".", 1)[-1]


def _recording(name: str, kind: SpanKind, describe: Describe) -> Callable[..., Any]:
    def method(self: RecordingProcessGroup, *args: Any, **kwargs: Any) -> Any:
        wall, work = monotonic_ns(), self.recorder.read_clock()
        return self._record(name, kind, describe(self._size, *args, **kwargs), args, kwargs, wall, work)

    method.__name__ = name
    return method


for _name, (_kind, _describe) in OPERATIONS.items():
    setattr(RecordingProcessGroup, _name, _recording(_name, _kind, _describe))


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
