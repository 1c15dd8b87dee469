"""What real ranks did, event by event: the plain data that a run brings back, and its trace on the wall clock."""

from __future__ import annotations

from collections import Counter as Multiset
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from vizkit.fingerprints import Fingerprint, Noted, counters_of
from vizkit.lanes import Label, Lane
from vizkit.memory_samples import MemorySamples
from vizkit.trace import NONE, Clock, Counter, Span, SpanKind, Trace

if TYPE_CHECKING:
    import pandas as pd

OperationKey = tuple[object, ...]
STOPPED = "stopped"
"""The note of a record whose run somebody stopped: how far it had come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a rank's thread did; what it did between two events is compute.

    `before_ns` and `after_ns` read the work clock (the thread's CPU time; on CUDA the device's time) on entering and on
    leaving: what lies between is the communication library's and the recorder's own time, never the program's.
    `start_wall_ns` and `end_wall_ns` are the same moments on `CLOCK_MONOTONIC`, which all processes of a machine share.
    """

    before_ns: int
    after_ns: int
    start_wall_ns: int
    end_wall_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Event):
    """A communication was posted.

    `call` is a number of its own for each communication of a rank. `peer` is a global rank: the other rank of a message
    or the root of a collective. `members` are the group's global ranks. Bytes are logical, as `Span` defines them.
    `done_wall_ns` is when it had completed, or −1 where nobody found out.
    """

    call: int
    kind: SpanKind
    group: str
    members: tuple[int, ...]
    payload_bytes: int
    peer: int = NONE
    tag: int = 0
    algorithm: str = ""
    split_bytes: tuple[int, ...] = ()
    done_wall_ns: int = NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Event):
    """The thread went on only after these calls had completed; `implicit` marks the end of a backward."""

    calls: tuple[int, ...]
    implicit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOpened(Event):
    """A `vk.span`, a backward or an optimizer step began."""

    label: Label


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanClosed(Event):
    """The innermost open span ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprinted(Event):
    """A hash was taken of what the rank holds; the time that this took is vizkit's own."""

    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """The events of one rank between the start (`before_ns`, `start_wall_ns`) and the end of the user's function."""

    rank: int
    events: tuple[Event, ...]
    start_ns: int
    end_ns: int
    start_wall_ns: int
    end_wall_ns: int
    memory_wall_ns: tuple[int, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    tensors: MemorySamples | None = None

    @property
    def calls(self) -> Iterator[Call]:
        return (event for event in self.events if isinstance(event, Call))


@dataclass(frozen=True)
class Record:
    """What all ranks of a run did; `notes` are facts to show beside a figure, such as the backend."""

    ranks: tuple[RankRecord, ...]
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return max((rank.rank + 1 for rank in self.ranks), default=0)

    @property
    def payload_bytes(self) -> int:
        """Logical bytes of all calls of all ranks: a collective counts once for each member, a message twice."""
        return sum(call.payload_bytes for rank in self.ranks for call in rank.calls)


def operation_keys(rank: RankRecord) -> list[OperationKey]:
    """What each call of a rank belongs to, in order; calls of different ranks with the same key are one operation.

    A collective is the n-th of its group, a message the n-th on its directed edge with its tag.
    """
    seen: Multiset[OperationKey] = Multiset()
    keys = []
    for call in rank.calls:
        if call.kind is SpanKind.SEND:
            channel: OperationKey = (call.group, rank.rank, call.peer, call.tag)
        elif call.kind is SpanKind.RECEIVE:
            channel = (call.group, call.peer, rank.rank, call.tag)
        else:
            channel = (call.group, call.members)
        keys.append((*channel, seen[channel]))
        seen[channel] += 1
    return keys


def finished_part(record: Record) -> Record:
    """What could go on to its end: each rank without its first communication that a member lacks, and what follows it.

    A run that was stopped in the middle leaves such communications; a replay would wait for them.
    """
    ranks = {rank.rank: rank for rank in record.ranks}
    while True:
        entered: dict[OperationKey, set[int]] = defaultdict(set)
        for rank in ranks.values():
            for key in operation_keys(rank):
                entered[key].add(rank.rank)
        lacking = [
            (rank, call) for rank in ranks.values() for call in [_first_lacking(rank, entered)] if call is not None
        ]
        if not lacking:
            return replace(record, ranks=tuple(ranks.values()))
        ranks |= {rank.rank: _ended_before(rank, call) for rank, call in lacking}


def _first_lacking(rank: RankRecord, entered: Mapping[OperationKey, set[int]]) -> Call | None:
    for call, key in zip(rank.calls, operation_keys(rank), strict=True):
        is_message = call.kind in (SpanKind.SEND, SpanKind.RECEIVE)
        if not {rank.rank, call.peer}.union(() if is_message else call.members).issubset({*entered[key], NONE}):
            return call
    return None


def _ended_before(rank: RankRecord, call: Call) -> RankRecord:
    events = rank.events[: rank.events.index(call)]
    opened = sum(isinstance(event, SpanOpened) - isinstance(event, SpanClosed) for event in events)
    at = {
        "before_ns": call.before_ns,
        "after_ns": call.before_ns,
        "start_wall_ns": call.start_wall_ns,
        "end_wall_ns": call.start_wall_ns,
    }
    closed = (SpanClosed(**at),) * opened
    return replace(rank, events=(*events, *closed), end_ns=call.before_ns, end_wall_ns=call.start_wall_ns)


def communication_span(rank: int, call: Call, operation: int, start_ns: int, end_ns: int) -> Span:
    """The span of one call, with everything that the record knows about it."""
    return Span(
        rank,
        call.kind,
        start_ns,
        end_ns,
        name=call.kind.value,
        payload_bytes=call.payload_bytes,
        peer=call.peer,
        group=call.members,
        operation=operation,
        algorithm=call.algorithm,
        split_bytes=call.split_bytes,
    )


def wait_name(calls: Sequence[Call]) -> str:
    """
    >>> wait_name([])
    'wait'
    """
    kinds = dict.fromkeys(call.kind.value for call in calls)
    return f"wait for {', '.join(kinds)}" if kinds else "wait"


def wall_trace(record: Record) -> Trace:
    """What happened on this machine; time zero is the moment at which the first rank began the user's function.

    A communication lasts from its posting on this rank to its completion, so it holds the time in which other ranks had
    not yet arrived.
    """
    zero = min((rank.start_wall_ns for rank in record.ranks), default=0)
    numbers: dict[OperationKey, int] = {}
    spans: list[Span] = []
    counters = []
    for rank in record.ranks:
        operations: dict[int, int] = {}
        for call, key in zip(rank.calls, operation_keys(rank), strict=True):
            number = operations[call.call] = numbers.setdefault(key, len(numbers))
            end = max(call.done_wall_ns, call.end_wall_ns)
            spans.append(communication_span(rank.rank, call, number, call.start_wall_ns - zero, end - zero))
        _walk_wall(rank, zero, operations, spans)
        if rank.memory_wall_ns:
            times = np.array(rank.memory_wall_ns, np.int64) - zero
            counters.append(Counter("memory", rank.rank, times, np.array(rank.memory_bytes, np.int64)))
        if rank.tensors is not None:
            counters += rank.tensors.counters(rank.rank, rank.tensors.wall_ns - zero)
        counters += counters_of(
            Noted(rank.rank, event.end_wall_ns - zero, event.fingerprint)
            for event in rank.events
            if isinstance(event, Fingerprinted)
        )
    return Trace.from_spans(
        spans, clock=Clock.WALL, world_size=record.world_size, counters=counters, notes=dict(record.notes)
    )


def _walk_wall(rank: RankRecord, zero: int, operations: Mapping[int, int], spans: list[Span]) -> None:
    lane = Lane(rank.rank, spans.append)
    calls = {call.call: call for call in rank.calls}
    now, work = rank.start_wall_ns, rank.start_ns
    for event in sorted(rank.events, key=lambda event: event.start_wall_ns):
        start = max(event.start_wall_ns, now)
        if isinstance(event, Wait):
            awaited = [calls[number] for number in event.calls if number in calls]
            if event.implicit:
                start = _blocked_since(event, awaited, now, work)
            lane.compute(now - zero, start - zero)
            last = max(awaited, key=lambda call: call.done_wall_ns, default=None)
            operation = NONE if last is None else operations[last.call]
            lane.wait(start - zero, max(event.end_wall_ns, start) - zero, wait_name(awaited), operation)
            now = max(event.end_wall_ns, start)
        elif isinstance(event, Fingerprinted):
            lane.compute(now - zero, start - zero)
            now = max(event.end_wall_ns, start)
            lane.wait(start - zero, now - zero, "fingerprint")
        else:
            end = max(event.end_wall_ns, start) if isinstance(event, Call) else start
            lane.compute(now - zero, end - zero)
            now = end
            if isinstance(event, SpanOpened):
                lane.open(event.label)
            elif isinstance(event, SpanClosed):
                lane.close(now - zero)
        work = event.after_ns
    lane.compute(now - zero, max(rank.end_wall_ns, now) - zero)
    lane.finish()


def _blocked_since(event: Wait, awaited: Sequence[Call], now: int, work: int) -> int:
    """When a backward began to wait inside torch: nobody saw it, but it computed `event.before_ns − work` before."""
    if max((call.done_wall_ns for call in awaited), default=NONE) <= now:
        return event.end_wall_ns
    return min(now + max(event.before_ns - work, 0), event.end_wall_ns)


def collectives_table(record: Record) -> pd.DataFrame:
    """One row for each distinct communication: op, group ranks, payload bytes, times seen; order of first appearance.

    A collective counts once, however many ranks took part; a message counts once, as a send.
    """
    import pandas as pd

    seen: dict[OperationKey, tuple[str, tuple[int, ...], int]] = {}
    for rank in record.ranks:
        for call, key in zip(rank.calls, operation_keys(rank), strict=True):
            if call.kind is SpanKind.SEND:
                seen[key] = (call.kind.value, (rank.rank, call.peer), call.payload_bytes)
            elif call.kind is not SpanKind.RECEIVE:
                op, members, payload = seen.get(key, (call.kind.value, call.members, 0))
                seen[key] = (op, members, max(payload, call.payload_bytes))
    counts = Multiset(seen.values())
    rows = [(op, list(ranks), payload, times) for (op, ranks, payload), times in counts.items()]
    return pd.DataFrame(rows, columns=["op", "group ranks", "payload bytes", "times seen"])
