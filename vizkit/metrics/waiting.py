"""Who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vizkit.trace import COMMUNICATION_KINDS, NONE, NS_PER_S, Clock, Role, Trace

NOTICEABLE_SHARE = 0.01


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for, with the evidence; seconds are on `clock`.

    `lost_s` is what all other ranks together lost waiting for this one, `lost_by_rank_s` the same for each, and `waits_s`
    what this rank lost waiting for others. It was the last to arrive at `last_in` of `operations` operations at which
    somebody waited. `share` = (`lost_s` − `waits_s`) / ((ranks − 1) × makespan).
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
            f"rank {self.rank}: the others lost {self.lost_s:.3g} s waiting for it ({self.clock.value} clock), "
            f"which was last at {self.last_in} of {self.operations} operations that ranks waited for"
        )


def straggler(trace: Trace, noticeable_share: float = NOTICEABLE_SHARE) -> Straggler | None:
    """The rank for which the others wait most, net of what it waits for them; None where that is not noticeable.

    The spans of one `operation` belong together. It can start once its last rank has arrived: at the latest `start_ns`
    among its communication spans. What a rank loses is the part of its wait spans with that `operation` that lies before;
    in a trace without such wait spans, the time from its own start on. The loss is put down to the last to arrive: of the
    ranks that lost nothing, the one that started last, and among equals the one that then waited first. Noticeable is a
    net loss of `noticeable_share` of the makespan for each other rank.

    >>> from vizkit.trace import Span
    >>> late = [Span(0, "all_reduce", 10, 90, operation=0), Span(1, "all_reduce", 80, 90, operation=0)]
    >>> found = straggler(Trace.from_spans(late, clock="wall"))
    >>> found.rank, found.lost_by_rank_s, found.last_in
    (1, (7e-08, 0.0), 1)
    """
    members = np.flatnonzero(trace.is_kind(*COMMUNICATION_KINDS) & (trace.operation != NONE))
    size, makespan_ns = trace.world_size, trace.duration_ns
    if not len(members) or size < 2 or not makespan_ns:
        return None
    numbers, operation = np.unique(trace.operation[members], return_inverse=True)
    rank, start = trace.rank[members].astype(np.int64), trace.start_ns[members]
    complete = np.full(len(numbers), np.iinfo(np.int64).min)
    np.maximum.at(complete, operation, start)
    lost, first_wait = _lost(trace, numbers, complete, operation * size + rank, start)

    arrived_last = np.flatnonzero(lost[operation, rank] == 0)
    order = np.lexsort(
        (
            rank[arrived_last],
            first_wait[operation[arrived_last], rank[arrived_last]],
            -start[arrived_last],
            operation[arrived_last],
        )
    )
    candidates = arrived_last[order]
    _, firsts = np.unique(operation[candidates], return_index=True)
    blamed = candidates[firsts]
    caused = np.zeros((size, size), np.int64)
    np.add.at(caused, rank[blamed], lost[operation[blamed]])

    net = caused.sum(axis=1) - caused.sum(axis=0)
    worst = int(net.argmax())
    share = net[worst] / ((size - 1) * makespan_ns)
    if share < noticeable_share or net[worst] <= 0:
        return None
    waited_for = lost.sum(axis=1) > 0
    return Straggler(
        rank=worst,
        lost_s=float(caused[worst].sum() / NS_PER_S),
        waits_s=float(caused[:, worst].sum() / NS_PER_S),
        share=float(share),
        last_in=int((waited_for[operation[blamed]] & (rank[blamed] == worst)).sum()),
        operations=int(waited_for.sum()),
        lost_by_rank_s=tuple((caused[worst] / NS_PER_S).tolist()),
        clock=trace.clock,
    )


def _lost(
    trace: Trace, numbers: np.ndarray, complete: np.ndarray, member: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(operation, rank) → nanoseconds lost before the operation was complete, and when the rank first waited for it."""
    size = trace.world_size
    shape = (len(numbers), size)
    lost, first_wait = np.zeros(shape, np.int64), np.full(shape, np.iinfo(np.int64).max)
    waits = np.flatnonzero(trace.is_role(Role.WAIT) & np.isin(trace.operation, numbers))
    if not len(waits):
        np.maximum.at(lost.reshape(-1), member, complete[member // size] - start)
        return lost, first_wait
    operation = np.searchsorted(numbers, trace.operation[waits])
    rank, begin = trace.rank[waits], trace.start_ns[waits]
    before = np.minimum(trace.end_ns[waits], complete[operation]) - begin
    np.add.at(lost, (operation, rank), np.maximum(before, 0))
    np.minimum.at(first_wait, (operation, rank), begin)
    return lost, first_wait
