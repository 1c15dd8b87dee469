"""What records say about clocks, and records moved to the common one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vizkit.alignment.bounds import Bounds, ClockAlignment
from vizkit.record import Call, Event, OperationKey, RankRecord, Wait, operation_keys
from vizkit.trace import NONE, SpanKind

MAX_ROWS = 1_000_000
"""Of more, only every so many communications count: fewer bounds are looser, and as true."""
_EVERYBODY = (
    SpanKind.ALL_REDUCE,
    SpanKind.ALL_GATHER,
    SpanKind.REDUCE_SCATTER,
    SpanKind.ALL_TO_ALL,
    SpanKind.BARRIER,
)
_FROM_ROOT = (SpanKind.BROADCAST, SpanKind.SCATTER)
_TO_ROOT = (SpanKind.REDUCE, SpanKind.GATHER)


def observed(runs: Iterable[Sequence[RankRecord]], host_of: Iterable[Sequence[int]]) -> Bounds:
    """The bounds in the records of one or more runs; `host_of` numbers the hosts of each run's ranks, in their order.

    Ranks of one host share its clock. A collective without payload, other than a barrier, synchronises nobody.
    """
    seen: list[_Seen] = []
    for ranks, hosts in zip(runs, host_of, strict=True):
        operations: dict[OperationKey, list[tuple[int, int, Call]]] = defaultdict(list)
        for rank, host in zip(ranks, hosts, strict=True):
            for call, key in zip(rank.calls, operation_keys(rank), strict=True):
                operations[key].append((rank.rank, host, call))
        seen += map(_seen, operations.values())
    step = -(-sum(len(one.ended) * len(one.entered) for one in seen) // MAX_ROWS) or 1
    return Bounds.of(row for one in seen[::step] for row in one.rows())


class _Seen(NamedTuple):
    """Of one communication, by host: when it first was over for a rank, and when the last rank entered."""

    ended: dict[int, int]
    entered: dict[int, int]

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        for there, late in self.entered.items():
            for here, over in self.ended.items():
                if here != there:
                    yield here, over, there, late


def _seen(calls: Sequence[tuple[int, int, Call]]) -> _Seen:
    ended: dict[int, int] = {}
    entered: dict[int, int] = {}
    for rank, host, call in calls:
        if (not call.payload_bytes and call.kind is not SpanKind.BARRIER) or 0 in call.split_bytes:
            continue
        is_root = rank == call.peer
        depends = call.kind in _EVERYBODY or call.kind in (*_FROM_ROOT, SpanKind.RECEIVE)
        matters = call.kind in _EVERYBODY or call.kind in (*_TO_ROOT, SpanKind.SEND)
        if call.done_wall_ns != NONE and (depends or (call.kind in _TO_ROOT and is_root)):
            ended[host] = min(ended.get(host, call.done_wall_ns), call.done_wall_ns)
        if matters or (call.kind in _FROM_ROOT and is_root):
            entered[host] = max(entered.get(host, call.start_wall_ns), call.start_wall_ns)
    return _Seen(ended, entered)


def without_failed(rank: RankRecord) -> RankRecord:
    """The record of a rank that failed, without the ends of calls that may be those of the failure."""
    waits = [event for event in rank.events if isinstance(event, Wait)]
    if not waits:
        return rank
    trusted_ns = waits[-1].start_wall_ns
    events = tuple(
        replace(event, done_wall_ns=NONE) if isinstance(event, Call) and event.done_wall_ns >= trusted_ns else event
        for event in rank.events
    )
    return replace(rank, events=events)


def on_common_clock(rank: RankRecord, alignment: ClockAlignment, host: int) -> RankRecord:
    """The record with its wall times on the common clock."""

    def moved(times: Sequence[int] | np.ndarray) -> list[int]:
        return alignment.moved(host, times).tolist()

    starts = moved([event.start_wall_ns for event in rank.events])
    ends = moved([event.end_wall_ns for event in rank.events])
    done = iter(moved([call.done_wall_ns for call in rank.calls]))
    events: list[Event] = []
    for event, start, end in zip(rank.events, starts, ends, strict=True):
        changes = {"start_wall_ns": start, "end_wall_ns": end}
        if isinstance(event, Call):
            over = next(done)
            changes["done_wall_ns"] = over if event.done_wall_ns != NONE else NONE
        events.append(replace(event, **changes))
    start, end = moved([rank.start_wall_ns, rank.end_wall_ns])
    tensors = rank.tensors
    return replace(
        rank,
        events=tuple(events),
        start_wall_ns=start,
        end_wall_ns=end,
        memory_wall_ns=tuple(moved(rank.memory_wall_ns)),
        tensors=tensors and replace(tensors, wall_ns=alignment.moved(host, tensors.wall_ns)),
    )
