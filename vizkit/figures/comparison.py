"""Two traces on one time axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType

from vizkit.errors import InvalidInputError
from vizkit.figures.animation import add_cursor, frame_times
from vizkit.figures.bars import span_traces
from vizkit.figures.describe import remember, summarise
from vizkit.figures.links import link_traces
from vizkit.figures.strip import Progress, strip_traces
from vizkit.figures.theme import CLOCK_MEANINGS, TimeAxis, base_layout, duration_text
from vizkit.figures.timeline import (
    FOOTER_PX,
    GAP_PX,
    HEADER_PX,
    STRIP_PX,
    legend_px,
    rank_axis,
    rows_px,
    share_axis,
    strip_axis,
    time_axis,
)
from vizkit.trace import Trace
from vizkit.units import bytes_text

CAPTION_PX = 30
_DASHES = ("solid", "dot")
_ROW_AXES = ("y", "y4")


@dataclass(frozen=True)
class _Side:
    trace: Trace
    label: str
    axis: TimeAxis
    progress: Progress
    dash: str
    yaxis: str

    def caption(self) -> str:
        return f"<b>{self.label}</b> · {duration_text(self.trace.duration_ns)} · {CLOCK_MEANINGS[self.trace.clock]}"


def compare(
    a: Trace, b: Trace, labels: tuple[str, str] = ("a", "b"), *, title: str | None = None, max_frames: int = 100
) -> go.Figure:
    """Two traces one above the other on one time axis, each from its own first span, under one cursor.

    Each side names its clock; they may differ, as in predicted against measured. The title says which is faster, by the
    ratio of the two durations. Raises `InvalidInputError` for a trace without spans and for labels that are not two.

    >>> from vizkit.trace import Span
    >>> slow, fast = (Trace.from_spans([Span(0, "F", 0, end)], clock="ideal") for end in (6_000_000, 4_000_000))
    >>> compare(slow, fast, labels=("before", "after")).layout.title.text
    'after is 1.5 times as fast as before'
    """
    times = frame_times(1.0, max_frames)
    if len(labels) != 2:
        raise InvalidInputError.because("labels", labels, "there are two traces", "give two labels")
    for trace, label in zip((a, b), labels, strict=True):
        if not len(trace):
            raise InvalidInputError.because(label, trace, "has no spans to compare", "give a trace that recorded some")
    unit = max((TimeAxis.spanning(*trace.extent_ns) for trace in (a, b)), key=lambda axis: axis.ns_per_unit)
    longest_ns = max(trace.duration_ns for trace in (a, b))
    sides = []
    for trace, label, dash, yaxis in zip((a, b), labels, _DASHES, _ROW_AXES, strict=True):
        axis = TimeAxis(trace.extent_ns[0], unit.unit, unit.ns_per_unit)
        progress = Progress.of(trace, np.minimum(axis.start_ns + times * longest_ns, trace.extent_ns[1]))
        sides.append(_Side(trace, label, axis, progress, dash, yaxis))
    verdict = speed_up(sides[0].trace, sides[1].trace, labels)
    duration = longest_ns / unit.ns_per_unit
    drawn: list[BaseTraceType] = []
    for side in sides:
        drawn += span_traces(side.trace, side.axis, side.yaxis) + link_traces(side.trace, side.axis, side.yaxis)
    _one_legend_entry_each(drawn)
    for side in sides:
        drawn += strip_traces(side.trace, side.progress, side.axis, ("y2", "y3"), label=side.label, dash=side.dash)
    fig = go.Figure(drawn)
    _lay_out(fig, sides, title or verdict, duration)
    moments = times * duration
    add_cursor(fig, duration, moments, _labels(sides, moments))
    summary = "\n\n".join([f"{verdict}.", *(f"{side.label}: {summarise(side.trace)}" for side in sides)])
    return remember(fig, summary)


def speed_up(a: Trace, b: Trace, labels: tuple[str, str]) -> str:
    """Which of two traces is faster, and how much, by their durations.

    A clock is named where the two differ, because a ratio across clocks compares a prediction with a measurement.
    """
    (slow, slow_name), (fast, fast_name) = sorted(
        zip((a, b), labels, strict=True), key=lambda side: side[0].duration_ns, reverse=True
    )
    if slow.clock != fast.clock:
        slow_name, fast_name = f"{slow_name} ({slow.clock} clock)", f"{fast_name} ({fast.clock} clock)"
    if slow.duration_ns == fast.duration_ns:
        return f"{labels[0]} and {labels[1]} take the same time"
    if not fast.duration_ns:
        return f"{fast_name} takes no time"
    return f"{fast_name} is {slow.duration_ns / fast.duration_ns:.3g} times as fast as {slow_name}"


def _one_legend_entry_each(drawn: list[BaseTraceType]) -> None:
    seen: set[str] = set()
    for trace in drawn:
        trace.showlegend = trace.legendgroup is None or trace.legendgroup not in seen
        seen.add(trace.legendgroup)


def _lay_out(fig: go.Figure, sides: list[_Side], title: str, duration: float) -> None:
    final = max(side.progress.final for side in sides)
    other_px = 2 * CAPTION_PX + GAP_PX + STRIP_PX
    least_px = (legend_px(fig) - other_px) // 2
    heights = [max(rows_px(side.trace.world_size), least_px) for side in sides]
    plot_px = sum(heights) + other_px
    fig.layout = base_layout(title, "each trace from its own first span", plot_px + HEADER_PX + FOOTER_PX)
    fig.layout.margin.update(t=HEADER_PX, b=FOOTER_PX)
    top = plot_px
    for side, height in zip(sides, heights, strict=True):
        top -= CAPTION_PX
        fig.add_annotation(
            text=side.caption(), x=0, y=top / plot_px, xref="paper", yref="paper", xanchor="left", yanchor="bottom",
            showarrow=False,
        )  # fmt: skip
        rows = rank_axis(side.trace.world_size, ((top - height) / plot_px, top / plot_px))
        fig.layout["yaxis" + side.yaxis[1:]] = rows
        top -= height
    fig.layout.update(
        barmode="overlay",
        xaxis=time_axis(sides[0].axis, duration, "y2"),
        yaxis2=strip_axis(STRIP_PX / plot_px, final),
        yaxis3=share_axis(),
    )


def _labels(sides: list[_Side], moments: np.ndarray) -> list[str]:
    moved = [side.progress.at(side.axis.start_ns + moments * side.axis.ns_per_unit) for side in sides]
    return [
        f"{sides[0].axis.label(time)} · moved: "
        + ", ".join(f"{side.label} {bytes_text(num)}" for side, num in zip(sides, row, strict=True))
        for time, *row in zip(moments, *(part.tolist() for part in moved), strict=True)
    ]
