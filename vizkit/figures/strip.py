"""The strip under a timeline: bytes moved so far and utilisation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from vizkit import metrics
from vizkit.figures.theme import BLUE, GREEN, TimeAxis
from vizkit.trace import COMMUNICATION_KINDS, SpanKind, Trace
from vizkit.units import bytes_text

MAX_POINTS = 400


def with_known_ways(trace: Trace) -> Trace:
    """The trace without sends that name no receiver, which a profiler's file may hold: nobody knows their way."""
    nameless = trace.is_kind(SpanKind.SEND) & (trace.peer < 0)
    return trace.filter(~nameless) if nameless.any() else trace


@dataclass(frozen=True)
class Progress:
    """Bytes on the wire by each of `times_ns` (in order, on the trace's clock), all ranks together."""

    times_ns: np.ndarray
    total_bytes: np.ndarray

    @classmethod
    def of(cls, trace: Trace, wanted_ns: np.ndarray) -> Progress:
        """Samples at `wanted_ns`, at both ends, and wherever bytes arrive, or at 400 moments where those are more."""
        start, end = trace.extent_ns
        arrivals = np.unique(trace.end_ns[trace.is_kind(*COMMUNICATION_KINDS)])
        if len(arrivals) > MAX_POINTS:
            arrivals = np.linspace(start, end, MAX_POINTS).astype(np.int64)
        times = np.unique(np.concatenate([[start, end], arrivals, np.rint(wanted_ns).astype(np.int64)]))
        return cls(times, metrics.traffic_over_time(with_known_ways(trace), times).sum(axis=(1, 2)))

    def at(self, times_ns: np.ndarray) -> np.ndarray:
        """Bytes by each time; exact for times that were wanted."""
        return self.total_bytes[np.searchsorted(self.times_ns, np.rint(times_ns).astype(np.int64), side="right") - 1]

    @property
    def final(self) -> int:
        return int(self.total_bytes[-1])


def strip_traces(
    trace: Trace, progress: Progress, axis: TimeAxis, axes: tuple[str, str], *, label: str = "", dash: str = "solid"
) -> list[go.Scatter]:
    """Utilisation on the second of `axes` and bytes so far on the first."""
    edges = np.unique(np.linspace(*trace.extent_ns, MAX_POINTS + 1).astype(np.int64))
    suffix = f", {label}" if label else ""
    share = metrics.utilisation(trace, edges) * 100 if len(edges) > 1 else np.zeros(1)
    return [
        go.Scatter(
            x=axis.of(edges), y=np.append(share, share[-1:])[: len(edges)].astype(np.float32), yaxis=axes[1],
            name=f"utilisation{suffix}", line={"color": GREEN, "width": 1.2, "shape": "hv", "dash": dash}, mode="lines",
            fill=None if label else "tozeroy", fillcolor="rgba(0,158,115,0.18)", legendrank=401,
            hovertemplate="%{y:.0f} % of ranks compute<extra></extra>",
        ),
        go.Scatter(
            x=axis.of(progress.times_ns), y=progress.total_bytes, yaxis=axes[0], name=f"bytes so far{suffix}",
            line={"color": BLUE, "width": 2, "shape": "hv", "dash": dash}, legendrank=400, mode="lines",
            hovertemplate="%{y:.4s}B on the wire so far<extra></extra>",
        ),
    ]  # fmt: skip


def byte_ticks(final: int) -> dict[str, object]:
    """Ticks of an axis from 0 to `final` bytes: a few round numbers, with units.

    >>> byte_ticks(101_000_000)["ticktext"]
    ['0 B', '50 MB', '100 MB']
    """
    if not final:
        return {"tickvals": [0], "ticktext": ["0 B"]}
    rough = max(final, 2) / 2
    power = 10 ** math.floor(math.log10(rough))
    step = max(digit * power for digit in (1, 2, 2.5, 5) if digit * power <= rough)
    values = np.arange(0, max(final, 2) * 1.001, step)
    return {"tickvals": values, "ticktext": [bytes_text(value) for value in values]}
