"""Who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vizkit.trace import COMMUNICATION_KINDS, NONE, NS_PER_S, Clock, Role, SpanKind, Trace
from vizkit.units import seconds_text

NOTICEABLE_SHARE = 0.01


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for, with the evidence; seconds are on `clock`.

    `lost_s` is what all other ranks together lost waiting for this one, `lost_by_rank_s` the same for each, and
    `waits_s` what this rank lost waiting for others. It was the last to arrive at `last_in` of `operations` operations
    at which somebody waited. `share` = (`lost_s` − `waits_s`) / ((ranks − 1) × makespan).
    """

    rank: int
    lost_s: float
    waits_s: float
    share: float
    last_in: int
    operations: int
    lost_by_rank_s: tuple[float, ...]
    clock: Clock

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: the others lost {seconds_text(self.lost_s)} waiting for it ({self.clock.value} clock), "
            f"which was last at {self.last_in} of {self.operations} operations that ranks waited for"
        )


def straggler(trace: Trace, noticeable_share: float = NOTICEABLE_SHARE) -> Straggler | None:
    """The rank for which the others wait most, net of what it waits for them; None where that is not noticeable.

    The spans of one `operation` belong together. It can start once its last rank has arrived: at the latest `start_ns`
    among its communication spans. Each rank's wait spans with that `operation` (in a trace without such, the time from
    its own start on) count as far as they lie before. What the rank that waited least waited too is not due to a
    late rank (the link was busy); the rest is lost, and put down to the last to arrive: of the ranks that waited least,
    the one that started last, and among equals the one that waited first. Noticeable is a net loss of
    `noticeable_share` of the makespan for each other rank.

    >>> from vizkit.trace import Span
    >>> late = [Span(0, "all_reduce", 10, 90, operation=0), Span(1, "all_reduce", 80, 90, operation=0)]
    >>> found = straggler(Trace.from_spans(late, clock="wall"))
    >>> found.rank, found.lost_by_rank_s, found.last_in
    (1, (7e-08, 0.0), 1)
    """
    size, makespan_ns = trace.world_size, trace.duration_ns
    found = arrivals(trace)
    if not len(found.rank) or size < 2 or not makespan_ns:
        return None
    operation, rank, start, first_wait = found.operation, found.rank, found.start_ns, found.first_wait_ns
    lost = found.waited_ns - found.least_ns[operation]

    order = np.lexsort((rank, first_wait, -start, lost > 0, operation))
    _, firsts = np.unique(operation[order], return_index=True)
    last_to_arrive = rank[order[firsts]]
    caused = np.zeros((size, size), np.int64)
    np.add.at(caused, (last_to_arrive[operation], rank), lost)
    np.fill_diagonal(caused, 0)

    net = caused.sum(axis=1) - caused.sum(axis=0)
    worst = int(net.argmax())
    share = float(net[worst] / ((size - 1) * makespan_ns))
    if net[worst] <= 0 or share < noticeable_share:
        return None
    waited_for = np.unique(operation[lost > 0])
    return Straggler(
        rank=worst,
        lost_s=float(caused[worst].sum() / NS_PER_S),
        waits_s=float(caused[:, worst].sum() / NS_PER_S),
        share=share,
        last_in=int((last_to_arrive[waited_for] == worst).sum()),
        operations=len(waited_for),
        lost_by_rank_s=tuple((caused[worst] / NS_PER_S).tolist()),
        clock=trace.clock,
    )


@dataclass(frozen=True, eq=False)
class Arrivals:
    """One entry for each rank in each operation, as arrays: when it came, and how long it then waited for the others.

    `operation` counts operations from 0, `start_ns` is the communication span's, `first_wait_ns` when the rank began to
    wait for it. `waited_ns` is its waiting before the last rank had arrived, `least_ns[operation]` the least of those.
    """

    operation: np.ndarray
    rank: np.ndarray
    start_ns: np.ndarray
    waited_ns: np.ndarray
    first_wait_ns: np.ndarray
    least_ns: np.ndarray


def arrivals(trace: Trace, kinds: Sequence[SpanKind] = COMMUNICATION_KINDS) -> Arrivals:
    """How long each rank waited in each operation of these kinds until its last rank had arrived; see `straggler`."""
    members = np.flatnonzero(trace.is_kind(*kinds) & (trace.operation != NONE))
    numbers, operation = np.unique(trace.operation[members], return_inverse=True)
    start = trace.start_ns[members]
    complete = np.full(len(numbers), np.iinfo(np.int64).min)
    np.maximum.at(complete, operation, start)
    waited, first_wait = _waited(trace, members, complete[operation])
    least = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(least, operation, waited)
    return Arrivals(operation, trace.rank[members], start, waited, first_wait, least)


def _waited(trace: Trace, members: np.ndarray, complete: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each member: nanoseconds of waiting before its operation was complete, and when it first waited for it."""
    never = np.iinfo(np.int64).max
    waits = np.flatnonzero(trace.is_role(Role.WAIT) & np.isin(trace.operation, trace.operation[members]))
    if not len(waits):
        return complete - trace.start_ns[members], np.full(len(members), never)
    _, key = np.unique(_operation_and_rank(trace, np.concatenate([members, waits])), return_inverse=True)
    of_member, of_wait = key[: len(members)], key[len(members) :]
    complete_at = np.full(key.max() + 1, np.iinfo(np.int64).min)
    np.maximum.at(complete_at, of_member, complete)
    begin = trace.start_ns[waits]
    before = np.minimum(trace.end_ns[waits], complete_at[of_wait]) - begin
    waited, first_wait = np.zeros(len(complete_at), np.int64), np.full(len(complete_at), never)
    np.add.at(waited, of_wait, np.maximum(before, 0))
    np.minimum.at(first_wait, of_wait, begin)
    return waited[of_member], first_wait[of_member]


def _operation_and_rank(trace: Trace, spans: np.ndarray) -> np.ndarray:
    return trace.operation[spans] * trace.world_size + trace.rank[spans]
