"""A trace as text: one line a rank, one column a unit of time."""

from __future__ import annotations

import math

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.trace import NONE, NS_PER_S, Role, Trace

IDLE = "."
MAX_EXACT_CELLS = 100_000
SAMPLED_CELLS = 80


def as_grid(trace: Trace, cell_s: float | None = None) -> list[str]:
    """The compute of each rank as text, one string a rank, one cell for each `cell_s` seconds.

    A cell reads `F3` (forward of microbatch 3), `1F3` where a rank holds several stages, and `.` where the rank
    computes nothing. `cell_s` defaults to the greatest common divisor of all times, so that each cell holds exactly one
    span; where that would take too many cells, 80 samples are drawn. Raises `InvalidInputError` for a cell that is not
    positive.

    >>> from vizkit.trace import Span, SpanKind
    >>> spans = [Span(0, SpanKind.FORWARD, 0, 1, microbatch=0), Span(1, SpanKind.FORWARD, 1, 2, microbatch=0)]
    >>> as_grid(Trace.from_spans(spans, clock="ideal"))
    ['F0 .', '.  F0']
    """
    if cell_s is not None and not 0 < cell_s < math.inf:
        raise InvalidInputError.because(
            "cell_s", cell_s, "must be positive and finite", "leave it out for the largest exact cell"
        )
    compute = trace.filter(trace.is_role(Role.COMPUTE))
    start, end = trace.extent_ns
    if end == start:
        return [""] * trace.world_size
    cell_ns = max(round(cell_s * NS_PER_S), 1) if cell_s else _exact_cell_ns(compute, start, end)
    cells = -(-(end - start) // cell_ns)
    rows = [[IDLE] * cells for _ in range(trace.world_size)]
    show_stage = _stages_per_rank(compute) > 1
    for span in compute:
        label = f"{span.stage}" if show_stage and span.stage != NONE else ""
        label += span.kind.value + (f"{span.microbatch}" if span.microbatch != NONE else "")
        # a span owns the cells whose middle it covers
        first = -(-(2 * (span.start_ns - start) - cell_ns) // (2 * cell_ns))
        last = -(-(2 * (span.end_ns - start) - cell_ns) // (2 * cell_ns))
        for cell in range(max(first, 0), last):
            rows[span.rank][cell] = label
    width = max((len(cell) for row in rows for cell in row), default=1)
    return [" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows]


def _exact_cell_ns(compute: Trace, start: int, end: int) -> int:
    times = np.concatenate([compute.start_ns, compute.end_ns, [end]]) - start
    divisor = int(np.gcd.reduce(times))
    if divisor and (end - start) // divisor <= MAX_EXACT_CELLS // max(compute.world_size, 1):
        return divisor
    return max((end - start) // SAMPLED_CELLS, 1)


def _stages_per_rank(trace: Trace) -> int:
    named = trace.stage != NONE
    return max(
        (len(np.unique(trace.stage[named & (trace.rank == rank)])) for rank in range(trace.world_size)), default=0
    )
