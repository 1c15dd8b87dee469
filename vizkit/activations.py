"""How many microbatches' activations each rank holds over time, read from the passes of a pipeline."""

from __future__ import annotations

import numpy as np

from vizkit.schedules.actions import ACTION_KINDS
from vizkit.trace import NONE, Counter, SpanKind, Trace

ACTIVATIONS = "activations"
"""Name of the counters of activation memory."""
PER_RANK = "microbatches of one rank's layers"


def held_activations(trace: Trace) -> list[Counter]:
    """A counter for each rank of the microbatches whose activations it holds, in units of one rank's layers.

    A microbatch on a stage is held from the start of its forward to the end of the last pass before its next forward:
    the backward, or of a split one the pass for the weights. A rank's stages count equal shares. Spans without stage
    or microbatch do not count; a trace without such spans gives no counter.

    >>> from vizkit.trace import Span
    >>> passes = [Span(0, "F", 0, 1, stage=0, microbatch=0), Span(0, "B", 3, 5, stage=0, microbatch=0)]
    >>> (counter,) = held_activations(Trace.from_spans(passes, clock="virtual"))
    >>> counter.times_ns.tolist(), counter.values.tolist()
    ([0, 5], [1.0, 0.0])
    """
    passes = trace.filter(trace.is_kind(*ACTION_KINDS) & (trace.stage != NONE) & (trace.microbatch != NONE))
    if not len(passes):
        return []
    order = np.lexsort((passes.end_ns, passes.start_ns, passes.microbatch, passes.stage, passes.rank))
    rank, stage, microbatch = (column[order] for column in (passes.rank, passes.stage, passes.microbatch))
    forward = passes.kind[order] == SpanKind.FORWARD.code
    begins = np.ones(len(order), bool)
    same = (rank[1:] == rank[:-1]) & (stage[1:] == stage[:-1]) & (microbatch[1:] == microbatch[:-1])
    begins[1:] = ~same | (forward[1:] & ~forward[:-1])
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(order)) - 1
    start, end = passes.start_ns[order][first], passes.end_ns[order][last]
    counters = []
    for number in np.unique(rank).tolist():
        mine = rank[first] == number
        share = 1 / len(np.unique(stage[first][mine]))
        times = np.concatenate([end[mine], start[mine]])
        change = np.repeat([-share, share], mine.sum())
        in_time = np.argsort(times, kind="stable")  # at one moment, what ends lets go before what begins takes
        held = np.cumsum(change[in_time]).round(9)
        counters.append(Counter(ACTIVATIONS, number, times[in_time], held, PER_RANK))
    return counters
