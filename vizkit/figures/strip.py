"""The strip under a timeline: bytes moved so far and utilisation."""

from __future__ import annotations

import math

import numpy as np
import plotly.graph_objects as go

from vizkit import metrics
from vizkit.figures.theme import BLUE, GREEN, TimeAxis, human_bytes
from vizkit.trace import COMMUNICATION_KINDS, Trace

MAX_POINTS = 400


def bytes_so_far(trace: Trace, times_ns: np.ndarray) -> np.ndarray:
    """Bytes on the wire by each time, all ranks together, on the trace's clock."""
    return metrics.traffic_over_time(trace, times_ns).sum(axis=(1, 2))


def strip_traces(
    trace: Trace, axis: TimeAxis, axes: tuple[str, str], *, label: str = "", dash: str = "solid"
) -> list[go.Scatter]:
    """Utilisation on the second of `axes` and bytes so far on the first, each as a line of at most 400 points."""
    start, end = trace.extent_ns
    edges = np.unique(np.linspace(start, end, MAX_POINTS + 1).astype(np.int64))
    moments = np.unique(trace.end_ns[trace.is_kind(*COMMUNICATION_KINDS)])
    moments = np.unique(np.concatenate([[start], moments if len(moments) <= MAX_POINTS else edges, [end]]))
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
            x=axis.of(moments), y=bytes_so_far(trace, moments), yaxis=axes[0], name=f"bytes so far{suffix}",
            line={"color": BLUE, "width": 2, "shape": "hv", "dash": dash}, legendrank=400, mode="lines",
            hovertemplate="%{y:.4s}B on the wire so far<extra></extra>",
        ),
    ]  # fmt: skip


def byte_ticks(final: int) -> dict[str, object]:
    """Ticks of an axis from 0 to `final` bytes: a few round numbers, with units.

    >>> byte_ticks(101_000_000)["ticktext"]
    ['0 B', '50 MB', '100 MB']
    """
    rough = max(final, 2) / 2
    power = 10 ** math.floor(math.log10(rough))
    step = max(digit * power for digit in (1, 2, 2.5, 5) if digit * power <= rough)
    values = np.arange(0, max(final, 2) * 1.001, step)
    return {"tickvals": values, "ticktext": [human_bytes(value) for value in values]}
