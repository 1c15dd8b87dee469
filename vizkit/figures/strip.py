"""The strip under a timeline: bytes moved so far and utilisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from vizkit.figures.coverage import utilisation
from vizkit.figures.theme import BLUE, GREEN, TimeAxis, human_bytes
from vizkit.trace import Role, Trace

MAX_POINTS = 400
BYTE_TICKS = 3


@dataclass(frozen=True)
class Progress:
    """Bytes on the wire by each of some moments, all ranks together."""

    times_ns: np.ndarray
    total_bytes: np.ndarray

    @classmethod
    def of(cls, trace: Trace) -> Progress:
        spans = trace.filter(trace.is_role(Role.COMMUNICATION))
        order = np.argsort(spans.end_ns)
        return cls(spans.end_ns[order], np.cumsum(spans.payload_bytes[order]))

    def at(self, time_ns: float) -> int:
        """Bytes moved by `time_ns`."""
        return int(self.at_all(np.array([time_ns]))[0])

    def at_all(self, times_ns: np.ndarray) -> np.ndarray:
        """Bytes moved by each of these moments."""
        position = np.searchsorted(self.times_ns, times_ns, side="right") - 1
        if not len(self.times_ns):
            return np.zeros(len(times_ns), np.int64)
        return np.where(position >= 0, self.total_bytes[position], 0)

    @property
    def final(self) -> int:
        return int(self.total_bytes[-1]) if len(self.total_bytes) else 0


def strip_traces(
    trace: Trace, progress: Progress, axis: TimeAxis, axes: tuple[str, str], *, label: str = "", dash: str = "solid"
) -> list[go.Scatter]:
    """Bytes so far on the first of `axes` and utilisation on the second, each as a line of at most 400 points."""
    start, end = trace.extent_ns
    edges = np.linspace(start, end, MAX_POINTS + 1)
    moments = progress.times_ns if len(progress.times_ns) <= MAX_POINTS else edges
    moments = np.concatenate([[start], moments, [end]])
    suffix = f", {label}" if label else ""
    share = utilisation(trace, MAX_POINTS)
    common = {"mode": "lines", "legendgroup": "strip"}
    return [
        go.Scatter(
            x=axis.of(edges), y=(np.append(share, share[-1:]) * 100).astype(np.float32), yaxis=axes[1],
            name=f"utilisation{suffix}", line={"color": GREEN, "width": 1.2, "shape": "hv", "dash": dash},
            fill=None if label else "tozeroy", fillcolor="rgba(0,158,115,0.18)", legendrank=401,
            hovertemplate="%{y:.0f} % of ranks compute<extra></extra>", **common,
        ),
        go.Scatter(
            x=axis.of(moments), y=progress.at_all(moments), yaxis=axes[0], name=f"bytes so far{suffix}",
            line={"color": BLUE, "width": 2, "shape": "hv", "dash": dash}, legendrank=400,
            hovertemplate="%{y:.4s}B on the wire so far<extra></extra>", **common,
        ),
    ]  # fmt: skip


def byte_ticks(final: int) -> dict[str, object]:
    """Tick values and texts of an axis from 0 to `final` bytes."""
    values = np.linspace(0, max(final, 1), BYTE_TICKS)
    return {"tickvals": values, "ticktext": [human_bytes(value) for value in values]}
