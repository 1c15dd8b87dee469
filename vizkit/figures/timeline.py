"""The animated timeline: one row a rank, and under the same cursor the bytes moved and the ranks that compute."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from vizkit.figures.animation import add_cursor, frame_times
from vizkit.figures.bars import span_traces
from vizkit.figures.describe import counted, remember, summarise
from vizkit.figures.empty import nothing_to_show
from vizkit.figures.links import link_traces
from vizkit.figures.placement import ROW_SCALE
from vizkit.figures.strip import Progress, byte_ticks, strip_traces
from vizkit.figures.theme import AXIS_STYLE, CLOCK_MEANINGS, TimeAxis, base_layout, duration_text
from vizkit.trace import Trace
from vizkit.units import bytes_text

STRIP_PX, GAP_PX, FOOTER_PX, HEADER_PX = 90, 26, 52, 84
MAX_RANK_LABELS = 32
LEGEND_ROW_PX = 20
PLOT_SHARE = 0.945
"""What the rows take of the width left of the legend; the rest is for the labels of the utilisation."""


def timeline(trace: Trace, *, title: str | None = None, max_frames: int = 100) -> go.Figure:
    """What each rank did, animated: compute and communication by rank, messages, collectives, bytes and utilisation.

    The figure first shows the whole trace; play and the slider move a cursor and a veil over what is yet to come, in
    `max_frames` steps. Up to 5,000 spans each has its own hover; above 50,000 each pixel shows its dominant kind.
    Raises `InvalidInputError` for fewer than 2 frames.

    >>> from vizkit.trace import Span, SpanKind
    >>> trace = Trace.from_spans([Span(0, SpanKind.FORWARD, 0, 5_000_000)], clock="ideal")
    >>> fig = timeline(trace, max_frames=10)
    >>> len(fig.frames), fig.layout.xaxis.title.text
    (10, 'time since the first span (ms)')
    """
    times = frame_times(1.0, max_frames)
    heading = title or "What each rank did"
    if not len(trace):
        return nothing_to_show(trace, heading)
    start, end = trace.extent_ns
    axis = TimeAxis.spanning(start, end)
    progress = Progress.of(trace, start + times * (end - start))
    fig = go.Figure([*span_traces(trace, axis), *link_traces(trace, axis)])
    fig.add_traces(strip_traces(trace, progress, axis, ("y2", "y3")))
    gantt_px = max(rows_px(trace.world_size), legend_px(fig) - GAP_PX - STRIP_PX)
    plot_px = gantt_px + GAP_PX + STRIP_PX
    fig.layout = base_layout(heading, subtitle(trace), plot_px + HEADER_PX + FOOTER_PX)
    duration = (end - start) / axis.ns_per_unit
    fig.layout.margin.update(t=HEADER_PX, b=FOOTER_PX)
    fig.layout.update(
        barmode="overlay",
        xaxis=time_axis(axis, duration, "y2"),
        yaxis=rank_axis(trace.world_size, (1 - gantt_px / plot_px, 1)),
        yaxis2=strip_axis(STRIP_PX / plot_px, progress.final),
        yaxis3=share_axis(),
    )
    moments = times * duration
    add_cursor(fig, duration, moments, moment_labels(progress, axis, moments))
    return remember(fig, summarise(trace))


def subtitle(trace: Trace) -> str:
    """The clock and what it means, then the size of the trace."""
    size = f"{counted(trace.world_size, 'rank')} · {duration_text(trace.duration_ns)} · {counted(len(trace), 'span')}"
    return f"{CLOCK_MEANINGS[trace.clock]} · {size}"


def moment_labels(progress: Progress, axis: TimeAxis, moments: np.ndarray) -> list[str]:
    """What the slider says at each moment: the time, and the bytes moved by then."""
    moved = progress.at(axis.start_ns + moments * axis.ns_per_unit)
    return [f"{axis.label(t)} · {bytes_text(num)} moved" for t, num in zip(moments, moved.tolist(), strict=True)]


def rows_px(world_size: int) -> int:
    """Height of all rows together in pixels: roomy for few ranks, capped for many."""
    return max(110, min(world_size * 62, 260 + world_size * 11))


def legend_px(fig: go.Figure) -> int:
    """Height of the legend, which scrolls where the plot is lower."""
    return LEGEND_ROW_PX * sum(trace.showlegend is not False for trace in fig.data)


def time_axis(axis: TimeAxis, duration: float, anchor: str) -> dict[str, object]:
    """The one time axis that all rows and the strip share."""
    return {
        **AXIS_STYLE, "anchor": anchor, "range": (0, duration or 1), "domain": (0, PLOT_SHARE), "type": "linear",
        "title": {"text": f"time since the first span ({axis.unit})", "standoff": 8}, "ticks": "outside",
    }  # fmt: skip


def rank_axis(world_size: int, domain: tuple[float, float], prefix: str = "rank ") -> dict[str, object]:
    """Rows for ranks, rank 0 on top."""
    shown = range(0, world_size, -(-world_size // MAX_RANK_LABELS))
    return {
        **AXIS_STYLE, "domain": domain, "range": ((world_size - 0.5) * ROW_SCALE, -0.5 * ROW_SCALE), "showgrid": False,
        "tickvals": [rank * ROW_SCALE for rank in shown], "ticktext": [f"{prefix}{rank}" for rank in shown],
        "fixedrange": True,
    }  # fmt: skip


def strip_axis(height: float, final_bytes: int) -> dict[str, object]:
    """Bytes so far, on the lowest `height` of the plot."""
    top = max(final_bytes, 1) * 1.05
    return {**AXIS_STYLE, "domain": (0, height), "range": (0, top), "fixedrange": True, **byte_ticks(final_bytes)}


def share_axis() -> dict[str, object]:
    """Utilisation, at the right of the strip."""
    return {
        **AXIS_STYLE, "overlaying": "y2", "side": "right", "range": (0, 105), "showgrid": False, "fixedrange": True,
        "tickvals": [0, 50, 100], "ticktext": ["0 %", "50 %", "100 %"], "tickfont": {"size": 10},
    }  # fmt: skip
