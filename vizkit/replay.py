"""Runs a record again on virtual devices: one for each rank, joined by links that cost what a `Link` says."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from vizkit.collectives import algorithm_for, time_s
from vizkit.durations import Durations, Seconds
from vizkit.errors import InvalidInputError
from vizkit.fingerprints import Noted, counters_of
from vizkit.hardware import FREE_LINK, Link
from vizkit.lanes import Lane
from vizkit.links import Links
from vizkit.record import (
    Call,
    Fingerprinted,
    OperationKey,
    RankRecord,
    Record,
    SpanClosed,
    SpanOpened,
    Wait,
    communication_span,
    operation_keys,
    wait_name,
)
from vizkit.trace import NS_PER_S, Clock, Counter, Span, SpanKind, Trace
from vizkit.workload import work_before_events

_DEFAULT_LINK = Link()


def replay(
    record: Record,
    link: Link | Links | None = _DEFAULT_LINK,
    durations: Durations | Mapping[str, Seconds] | None = None,
) -> Trace:
    """What the recorded program would do with a device for each rank; a `Trace` on the clock "virtual".

    - A rank's clock advances by the CPU time that its thread spent between events; what the recorder and the
      communication library spent is left out. With `durations` (seconds for one span of each kind) it advances by those
      instead, as `vizkit.workload.work_before_events` places them: exact, and the same in every run.
    - A collective starts when its last member has arrived and the group's previous one is over, and lasts what
      `vizkit.collectives.time_s` says for its algorithm. Where members gave different payloads, the largest counts.
    - A message leaves its sender for bytes/β seconds once its directed edge is free, and arrives α later. Sends are
      eager: nobody waits for the receive. A wait on a send ends when its bytes have left, one on a receive when they
      have arrived. A receive's span begins when the bytes set off, or when it is posted if that is later.
    - `link=None` is a link that costs nothing. With `vizkit.links.Links` a collective takes the slowest link among its
      members, and a message that between its two ends.

    Raises `InvalidInputError` where the record cannot finish, naming what is missing.

    >>> import vizkit.record as vr
    >>> stamp = lambda ns: dict(before_ns=ns, after_ns=ns, start_wall_ns=ns, end_wall_ns=ns)
    >>> sum_of_two = dict(call=0, kind=SpanKind.ALL_REDUCE, group="0", members=(0, 1), payload_bytes=8)
    >>> def rank(number, cpu_ns):
    ...     events = (vr.Call(**sum_of_two, **stamp(cpu_ns)), vr.Wait(calls=(0,), **stamp(cpu_ns)))
    ...     extent = dict(start_ns=0, end_ns=cpu_ns, start_wall_ns=0, end_wall_ns=cpu_ns)
    ...     return vr.RankRecord(rank=number, events=events, **extent)
    >>> trace = replay(vr.Record((rank(0, 100), rank(1, 250))), link=None)
    >>> [(span.rank, span.kind.value, span.start_ns, span.end_ns) for span in trace if span.duration_ns]
    [(0, 'compute', 0, 100), (0, 'wait', 100, 250), (1, 'compute', 0, 250)]
    """
    given = None if durations is None else Durations.of(durations)
    return _Replay(record, FREE_LINK if link is None else link, given).run()


@dataclass(slots=True)
class _Operation:
    """A collective or a message, as far as it has come: `end_ns` is set once it is known."""

    key: OperationKey
    number: int
    calls: dict[int, Call] = field(default_factory=dict)
    arrived_ns: dict[int, int] = field(default_factory=dict)
    start_ns: int = 0
    left_ns: int = 0
    end_ns: int | None = None
    blocked: list[int] = field(default_factory=list)


class _Rank:
    """Where one rank has come to."""

    def __init__(self, record: RankRecord, durations: Durations | None, operations: dict[OperationKey, _Operation]):
        self.record = record
        self.work = work_before_events(record, durations)
        self.operations: dict[int, _Operation] = {}
        self.posted: dict[int, Call] = {}
        for call, key in zip(record.calls, operation_keys(record), strict=True):
            if key not in operations:
                operations[key] = _Operation(key, len(operations))
            self.operations[call.call] = operations[key]
        self.spans: list[Span] = []
        self.lane = Lane(record.rank, self.spans.append)
        self.position = 0
        self.clock_ns = 0
        self.times_ns = np.zeros(len(record.events) + 2, np.int64)

    def compute(self) -> None:
        """Does the work that precedes the event at `position`."""
        before = self.clock_ns
        self.clock_ns += self.work[self.position]
        self.lane.compute(before, self.clock_ns)


class _Replay:
    def __init__(self, record: Record, link: Link | Links, durations: Durations | None) -> None:
        self._record = record
        self._link = link
        self._durations = durations
        self._operations: dict[OperationKey, _Operation] = {}
        self._ranks = {rank.rank: _Rank(rank, durations, self._operations) for rank in record.ranks}
        self._group_free_ns: dict[OperationKey, int] = {}
        self._edge_free_ns: dict[tuple[int, int], int] = {}
        self._ready = deque(self._ranks)
        self._time_s = lru_cache(maxsize=4096)(time_s)

    def run(self) -> Trace:
        while self._ready:
            self._advance(self._ranks[self._ready.popleft()])
        self._check_finished()
        spans = [span for rank in self._ranks.values() for span in (*self._communications(rank), *rank.spans)]
        link = self._link
        notes = {
            **self._record.notes,
            "link": str(link),
            "compute": "measured CPU time" if self._durations is None else "given durations",
        }
        return Trace.from_spans(
            spans,
            clock=Clock.VIRTUAL,
            world_size=self._record.world_size,
            counters=[
                c for rank in self._ranks.values() for c in _counters(rank, by_order=self._durations is not None)
            ],
            notes=notes,
        )

    def _advance(self, rank: _Rank) -> None:
        """Runs one rank until its record ends or it has to wait for an operation whose end is not known yet."""
        events = rank.record.events
        while rank.position < len(events):
            event = events[rank.position]
            if isinstance(event, Wait):
                awaited = [rank.operations[call] for call in event.calls if call in rank.posted]
                for operation in awaited:
                    if self._done_ns(rank, operation) is None:
                        operation.blocked.append(rank.record.rank)
                        return
                rank.compute()
                self._wait(rank, event, awaited)
            else:
                rank.compute()
                if isinstance(event, Call):
                    self._post(rank, event)
                elif isinstance(event, SpanOpened):
                    rank.lane.open(event.label)
                elif isinstance(event, SpanClosed):
                    rank.lane.close(rank.clock_ns)
            rank.position += 1
            rank.times_ns[rank.position] = rank.clock_ns
        rank.compute()
        rank.times_ns[-1] = rank.clock_ns
        rank.lane.finish()

    def _wait(self, rank: _Rank, event: Wait, awaited: Sequence[_Operation]) -> None:
        until = max((self._done_ns(rank, operation) or 0 for operation in awaited), default=0)
        if until > rank.clock_ns:
            name = wait_name([rank.posted[c] for c in event.calls if c in rank.posted])
            last = next(operation for operation in awaited if self._done_ns(rank, operation) == until)
            rank.lane.wait(rank.clock_ns, until, name, last.number)
            rank.clock_ns = until

    def _done_ns(self, rank: _Rank, operation: _Operation) -> int | None:
        """When this rank's part of an operation is over; None while that is not known."""
        call = operation.calls[rank.record.rank]
        return operation.left_ns if call.kind is SpanKind.SEND else operation.end_ns

    def _post(self, rank: _Rank, call: Call) -> None:
        rank.posted[call.call] = call
        operation = rank.operations[call.call]
        operation.calls[rank.record.rank] = call
        operation.arrived_ns[rank.record.rank] = rank.clock_ns
        if call.kind is SpanKind.SEND:
            edge = (rank.record.rank, call.peer)
            link = FREE_LINK if edge[0] == edge[1] else self._link_among(edge)
            operation.start_ns = max(rank.clock_ns, self._edge_free_ns.get(edge, 0))
            on_wire_s = call.payload_bytes / link.bandwidth_bytes_per_s
            operation.left_ns = operation.start_ns + round(on_wire_s * NS_PER_S)
            self._edge_free_ns[edge] = operation.left_ns
            self._finish(operation, operation.left_ns + round(link.latency_s * NS_PER_S))
        elif call.kind is SpanKind.RECEIVE:
            if call.peer < 0 and operation.end_ns is None:  # from anybody, and nobody learned from whom
                operation.start_ns = rank.clock_ns
                self._finish(operation, rank.clock_ns)
        elif len(operation.calls) == len(call.members):
            self._run_collective(operation)

    def _run_collective(self, operation: _Operation) -> None:
        calls = list(operation.calls.values())
        first = calls[0]
        if other := next((call for call in calls if call.kind is not first.kind), None):
            raise InvalidInputError.because(
                "record",
                sorted({first.kind.value, other.kind.value}),
                f"the members of group {first.members} posted different collectives as number {operation.key[-1] + 1}",  # type: ignore[operator]
                "post the same collectives in the same order on each rank",
            )
        group = operation.key[:-1]
        operation.start_ns = max(*operation.arrived_ns.values(), self._group_free_ns.get(group, 0))
        payload = max(call.payload_bytes for call in calls)
        algorithm = first.algorithm or algorithm_for(first.kind)
        seconds = self._time_s(first.kind, algorithm, len(first.members), payload, self._link_among(first.members))
        end = operation.start_ns + round(seconds * NS_PER_S)
        self._group_free_ns[group] = end
        self._finish(operation, end)

    def _link_among(self, ranks: Sequence[int]) -> Link:
        return self._link.joining(ranks) if isinstance(self._link, Links) else self._link

    def _finish(self, operation: _Operation, end_ns: int) -> None:
        operation.end_ns = end_ns
        self._ready.extend(operation.blocked)
        operation.blocked.clear()

    def _communications(self, rank: _Rank) -> list[Span]:
        number = rank.record.rank
        spans = []
        for index, call in rank.posted.items():
            operation = rank.operations[index]
            start, end = operation.start_ns, operation.end_ns
            assert end is not None  # _check_finished has seen to it
            if call.kind is SpanKind.SEND:
                end = operation.left_ns
            elif call.kind is SpanKind.RECEIVE:
                start, end = (max(time, operation.arrived_ns[number]) for time in (start, end))
            spans.append(communication_span(number, call, operation.number, start, end))
        return spans

    def _check_finished(self) -> None:
        for operation in self._operations.values():
            if operation.end_ns is None:
                raise InvalidInputError.because("record", *_what_is_missing(operation, self._ranks))
        for rank in self._ranks.values():
            if rank.position < len(rank.record.events):  # ranks wait for each other in a circle
                raise InvalidInputError.because(
                    "record", f"rank {rank.record.rank}", "waits for ranks that wait for it", "replay a run that ended"
                )


def _what_is_missing(operation: _Operation, ranks: Mapping[int, _Rank]) -> tuple[str, str, str]:
    remedy = "replay the record of a run that ended on all ranks"
    posted = operation.calls or {
        rank.record.rank: call
        for rank in ranks.values()
        for call in rank.record.calls
        if rank.operations[call.call] is operation
    }
    number, call = next(iter(posted.items()))
    if call.kind is SpanKind.RECEIVE:
        return f"receive on rank {number}", f"rank {call.peer} never sent what rank {number} receives", remedy
    missing = [member for member in call.members if member not in operation.calls]
    return (
        f"{call.kind.value} of group {call.members}",
        f"cannot finish: rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} never entered it",
        remedy,
    )


def _counters(rank: _Rank, by_order: bool) -> Iterator[Counter]:
    yield from _memory(rank, by_order)
    yield from counters_of(
        Noted(rank.record.rank, int(rank.times_ns[position]), event.fingerprint)
        for position, event in enumerate(rank.record.events, 1)
        if isinstance(event, Fingerprinted)
    )


def _memory(rank: _Rank, by_order: bool) -> Iterator[Counter]:
    """Memory samples, moved from the wall clock to where the same events lie on the virtual one.

    `by_order`: those of tensors, which the program itself takes, are spread evenly over the work before the next event,
    so that they lie at the same times in every run.
    """
    record = rank.record
    wall = np.maximum.accumulate(
        [record.start_wall_ns, *(event.end_wall_ns for event in record.events), record.end_wall_ns]
    )

    def moved(wall_ns: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.asarray(np.interp(wall_ns, wall, rank.times_ns), np.int64)

    if record.memory_wall_ns:
        yield Counter("memory", record.rank, moved(record.memory_wall_ns), np.array(record.memory_bytes, np.int64))
    if (tensors := record.tensors) is not None:
        times_ns = _spread(rank, wall, tensors.wall_ns) if by_order else moved(tensors.wall_ns)
        yield from tensors.counters(record.rank, times_ns)


def _spread(rank: _Rank, wall: np.ndarray, wall_ns: np.ndarray) -> np.ndarray:
    """Virtual times of samples: of n between two events, sample i lies at (i + 1)/(n + 1) of the work between them."""
    stretch = np.searchsorted(wall[1:-1], wall_ns, side="right")
    number = np.bincount(stretch, minlength=len(rank.work))[stretch]
    place = np.arange(len(stretch)) - np.searchsorted(stretch, stretch) + 1
    return rank.times_ns[stretch] + np.asarray(rank.work, np.int64)[stretch] * place // (number + 1)
