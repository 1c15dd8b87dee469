"""How each rank's time divides: computing, communicating, both, neither."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vizkit.activations import ACTIVATIONS, held_activations
from vizkit.errors import InvalidInputError
from vizkit.metrics.intervals import Intervals
from vizkit.trace import Clock, Role, Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Breakdown:
    """Nanoseconds on each rank, as int64 arrays with one entry a rank, on the clock of the trace.

    `span` is the extent of the whole trace and the same for each rank; `compute` + `exposed_communication` + `idle` =
    `span`, exactly. `communication` = `overlapped` + `exposed_communication`.
    """

    clock: Clock
    compute: np.ndarray
    communication: np.ndarray
    overlapped: np.ndarray
    exposed_communication: np.ndarray
    idle: np.ndarray
    span: np.ndarray

    def to_frame(self) -> pd.DataFrame:
        """A pandas table with one row a rank, in nanoseconds."""
        import pandas as pd

        columns = {f"{name}_ns": getattr(self, name) for name in _PARTS}
        return pd.DataFrame(columns, index=pd.RangeIndex(len(self.span), name="rank"))

    def __str__(self) -> str:
        table = [["rank", *_TITLES], *self._rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in table]
        return "\n".join([f"milliseconds, {self.clock.value} clock", *lines])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{title}</th>" for title in ("rank", *_TITLES))
        body = "".join(
            f"<tr><th>{rank}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for rank, *cells in self._rows()
        )
        caption = f"<caption>milliseconds, {self.clock.value} clock</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _rows(self) -> list[list[str]]:
        parts = [getattr(self, name) for name in _PARTS]
        return [[str(rank), *(f"{part[rank] / 1e6:,.3f}" for part in parts)] for rank in range(len(self.span))]


_FAR_NS = 2**62
"""Beyond what a trace can hold."""
_PARTS = ("compute", "communication", "overlapped", "exposed_communication", "idle", "span")
_TITLES = tuple(name.replace("_", " ") for name in _PARTS)


def breakdown(trace: Trace) -> Breakdown:
    """Where each rank's time went, by exact unions of intervals, in nanoseconds.

    Compute is the time in which at least one compute span is open, communication likewise; overlapped is the time in
    which both are; exposed communication is communication without compute; idle is the rest of the trace's extent, in
    which a rank waits, has not begun or has ended.

    >>> from vizkit.trace import Span
    >>> spans = [Span(0, "B", 0, 60), Span(0, "all_reduce", 40, 90), Span(1, "B", 0, 100)]
    >>> b = breakdown(Trace.from_spans(spans, clock="ideal"))
    >>> [int(part[0]) for part in (b.compute, b.communication, b.overlapped, b.exposed_communication, b.idle, b.span)]
    [60, 50, 20, 30, 10, 100]
    """
    compute = Intervals.of(trace, trace.is_role(Role.COMPUTE))
    communication = Intervals.of(trace, trace.is_role(Role.COMMUNICATION))
    computing, communicating = compute.lengths_ns(), communication.lengths_ns()
    busy = compute.union(communication).lengths_ns()
    span = np.full(trace.world_size, trace.duration_ns, np.int64)
    return Breakdown(
        clock=trace.clock,
        compute=computing,
        communication=communicating,
        overlapped=computing + communicating - busy,
        exposed_communication=busy - computing,
        idle=span - busy,
        span=span,
    )


@dataclass(frozen=True)
class Bubble:
    """The time in which ranks do not compute, in the three ways that papers divide it.

    `over_total` = time without compute / (ranks × makespan), in GPipe (p−1)/(m+p−1) for p stages and m microbatches.
    `over_ideal` = (makespan − ideal) / ideal, where ideal is the mean compute time of a rank, in GPipe (p−1)/m
    (Narayanan et al., SC'21). `over_longest_rank` = (longest − ideal) / longest, where longest is the longest time of a
    rank from its own first compute to its own last (Qi et al., 2023, arXiv:2401.10241): where ranks begin one after the
    other and end one after the other, as their optimizer step for each rank allows, the skew is no bubble. All are nan
    for a trace without compute.
    """

    over_total: float
    over_ideal: float
    over_longest_rank: float

    def __str__(self) -> str:
        if math.isnan(self.over_total):
            return "bubble: undefined, as no rank computes"
        return f"bubble: {self.over_total:.1%} of the total time, {self.over_ideal:.1%} of the ideal time"


def bubble(trace: Trace) -> Bubble:
    """The share of time in which ranks do not compute: over the total, the ideal, and the time of the longest rank.

    Every rank of the trace counts, and exposed communication counts as not computing. `Bubble` has the formulas; its
    text says the first two. The zero-bubble paper means the third, of which ZB-H2 can have none.

    >>> from vizkit.trace import Span
    >>> two_stages = [Span(0, "F", 0, 10), Span(1, "F", 10, 20), Span(1, "B", 20, 40), Span(0, "B", 40, 60)]
    >>> bubble(Trace.from_spans(two_stages, clock="ideal"))             # p = 2, m = 1
    Bubble(over_total=0.5, over_ideal=1.0, over_longest_rank=0.5)
    """
    total_ns = trace.duration_ns * trace.world_size
    compute = Intervals.of(trace, trace.is_role(Role.COMPUTE))
    compute_ns = int(compute.lengths_ns().sum())
    if not compute_ns:
        return Bubble(math.nan, math.nan, math.nan)
    longest_ns = int(compute.extents_ns().max()) * trace.world_size
    return Bubble(
        (total_ns - compute_ns) / total_ns,
        (total_ns - compute_ns) / compute_ns,
        (longest_ns - compute_ns) / longest_ns,
    )


def peak_activations(trace: Trace) -> np.ndarray:
    """The most activation memory that each rank holds at a time, in the unit of the trace's counters of it.

    That is what `vizkit.simulate` counts: microbatches of one rank's layers, or bytes; 0 for a rank without a counter.
    Without counters the trace's passes say it (`vizkit.activations`), so that a replay of a run works too. Raises
    `InvalidInputError` for a trace that has neither.

    >>> from vizkit.schedules import schedule
    >>> from vizkit.simulator import simulate
    >>> peak_activations(simulate(schedule("1F1B", num_ranks=4, num_microbatches=8), {"F": 1, "B": 2})).tolist()
    [4.0, 3.0, 2.0, 1.0]
    """
    counted = [counter for counter in trace.counters if counter.name == ACTIVATIONS and len(counter.values)]
    counters = counted or held_activations(trace)
    if not counters:
        raise InvalidInputError.because(
            "trace",
            trace,
            f"has no counter named {ACTIVATIONS}, and no passes with stage and microbatch",
            "get the trace from vizkit.simulate, or label spans with stage and microbatch",
        )
    peaks = np.zeros(trace.world_size)
    for counter in counters:
        peaks[counter.rank] = max(peaks[counter.rank], counter.values.max())
    return peaks


def utilisation(trace: Trace, times_ns: np.ndarray) -> np.ndarray:
    """The share of ranks that compute, averaged over each bin between `times_ns` (bin edges on the trace's clock).

    Returns one number in [0, 1] for each of the `len(times_ns) - 1` bins. Raises `InvalidInputError` for edges that do
    not increase.

    >>> from vizkit.trace import Span
    >>> t = Trace.from_spans([Span(0, "F", 0, 10), Span(1, "F", 5, 10)], clock="ideal")
    >>> utilisation(t, [0, 5, 10, 20]).tolist()
    [0.5, 1.0, 0.0]
    """
    edges = np.asarray(times_ns)
    numbers = edges.ndim == 1 and len(edges) > 1 and edges.dtype.kind in "iuf"
    if not (numbers and (np.diff(edges) > 0).all() and (np.abs(edges[[0, -1]]) < _FAR_NS).all()):
        raise InvalidInputError.because(
            "times_ns", edges.tolist(), "bin edges are two or more and increase", "use numpy.linspace over the extent"
        )
    compute = Intervals.of(trace, trace.is_role(Role.COMPUTE))
    edges = np.rint(edges).astype(np.int64) - trace.extent_ns[0]
    busy = np.diff(compute.covered_before_ns(edges))
    return busy / (np.maximum(np.diff(edges), 1) * max(trace.world_size, 1))
