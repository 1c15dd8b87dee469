"""The timeline with the memory of each rank's tensors under it, by category, under one cursor."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from vizkit.figures.animation import add_cursor, frame_times
from vizkit.figures.bars import span_traces
from vizkit.figures.describe import MAX_RANKS_LISTED, remember, summarise
from vizkit.figures.empty import nothing_to_show
from vizkit.figures.links import link_traces
from vizkit.figures.memory_areas import LEGEND, MemoryRows, area_traces, expected_text
from vizkit.figures.theme import AXIS_STYLE, TimeAxis, base_layout
from vizkit.figures.timeline import FOOTER_PX, GAP_PX, HEADER_PX, legend_px, rank_axis, rows_px, subtitle, time_axis
from vizkit.memory_samples import CATEGORIES
from vizkit.metrics.memory import holdings
from vizkit.trace import Trace
from vizkit.units import bytes_text

ROW_PX = (44, 170)
"""Least and greatest height of a rank's row of memory."""
ROWS_PX = 480
"""Of all rows together, as long as each fits."""
MAX_ROOMY_ROWS = 4
"""Up to so many rows have room for labels of two lines."""


def memory_figure(trace: Trace, expected: Any = None, *, title: str | None = None, max_frames: int = 100) -> go.Figure:
    """What each rank did, and below it what its tensors held meanwhile, by category, animated under one cursor.

    Draws the counters of `vk.track_memory`: stacked areas, all ranks to one scale, the peak of each row at its right.
    Of more than 16 ranks 16 are drawn, the fullest among them. `expected` is what a model says: bytes by category, or
    an object with `parameters_bytes` and so on, such as `vk.memory.per_rank` and `vk.memory.model_states` give, or one
    of these a rank. Its sum is a dashed line; the categories that it names lie lowest, so that they should reach it.
    Raises `InvalidInputError` for a trace without such counters, for categories that do not exist, and for fewer than
    2 frames.

    >>> from vizkit.trace import Counter, Span
    >>> counter = Counter("parameters", 0, np.array([0]), np.array([4_000]))
    >>> trace = Trace.from_spans([Span(0, "F", 0, 5_000_000)], clock="virtual", counters=[counter])
    >>> fig = memory_figure(trace, {"parameters": 4_000})
    >>> fig.layout.sliders[0].steps[-1].label, [part.name for part in fig.data if part.legend == "legend2"]
    ('5 ms · most: rank 0, 4 kB', ['parameters', 'expected parameters'])
    """
    times = frame_times(1.0, max_frames)
    heading = title or "What each rank did, and what its tensors held"
    memory = MemoryRows.of(trace, expected)
    if not len(trace):
        return nothing_to_show(trace, heading)
    start, end = trace.extent_ns
    axis = TimeAxis.spanning(start, end)
    duration = (end - start) / axis.ns_per_unit
    fig = go.Figure([*span_traces(trace, axis), *link_traces(trace, axis)])
    gantt_px = max(rows_px(trace.world_size), legend_px(fig))
    fig.add_traces(area_traces(memory, axis, duration, "y2"))
    _lay_out(fig, memory, axis, duration, heading, trace, gantt_px)
    moments = times * duration
    add_cursor(fig, duration, moments, _moment_labels(trace, axis, moments))
    return remember(fig, "\n".join([summarise(trace), *_expected_in_words(memory)]))


def _lay_out(
    fig: go.Figure, memory: MemoryRows, axis: TimeAxis, duration: float, heading: str, trace: Trace, gantt_px: int
) -> None:
    count = len(memory.rows)
    memory_px = count * min(max(ROWS_PX // count, ROW_PX[0]), ROW_PX[1])
    memory_px = max(memory_px, legend_px(fig) - gantt_px)
    plot_px = gantt_px + GAP_PX + memory_px
    said = subtitle(trace)
    if count < memory.num_tracked:
        said += f" · memory of {count} of {memory.num_tracked} ranks"
    fig.layout = base_layout(heading, said, plot_px + HEADER_PX + FOOTER_PX)
    fig.layout.margin.update(t=HEADER_PX, b=FOOTER_PX)
    share = memory_px / plot_px
    fig.layout.update(
        barmode="overlay",
        xaxis=time_axis(axis, duration, "y2"),
        yaxis=rank_axis(trace.world_size, (1 - gantt_px / plot_px, 1)),
        yaxis2=_memory_axis(memory, share),
        yaxis3=_peaks_axis(memory),
    )
    fig.layout[LEGEND] = {
        **fig.layout.legend.to_plotly_json(), "x": 1.035, "y": share, "title": {"text": "memory of tensors"},
    }  # fmt: skip
    # an axis is drawn only where a trace lies on it
    fig.add_scatter(x=[None], y=[None], yaxis="y3", showlegend=False, hoverinfo="skip")


def _memory_axis(memory: MemoryRows, share: float) -> dict[str, object]:
    """Each row's rank at its floor, and what is expected at its height."""
    count = len(memory.rows)
    places = [(position + 0.94, f"rank {held.rank}") for position, held in enumerate(memory.rows)]
    word = "expected<br>" if count <= MAX_ROOMY_ROWS else ""
    for position, level in memory.expected_levels.items():
        places.append((level, f"{word}{bytes_text(sum(memory.expected[position].values()))}"))
    return {
        **AXIS_STYLE, "domain": (0, share), "range": (count + 0.02, 0), "fixedrange": True, "showgrid": False,
        "tickvals": [place for place, _ in places],
        "ticktext": [text for _, text in places],
    }  # fmt: skip


def _peaks_axis(memory: MemoryRows) -> dict[str, object]:
    """At the right the peak of each row at its height, with a line to it across the row."""
    peaks = [int(held.num_bytes[held.fullest].sum()) for held in memory.rows]
    return {
        **AXIS_STYLE, "overlaying": "y2", "side": "right", "range": (len(peaks) + 0.02, 0), "fixedrange": True,
        "showgrid": False, "ticks": "outside", "tickfont": {"size": 10},
        "tickvals": [float(memory.y_of(position, peak)) for position, peak in enumerate(peaks)],
        "ticktext": [bytes_text(peak) for peak in peaks],
    }  # fmt: skip


def _moment_labels(trace: Trace, axis: TimeAxis, moments: np.ndarray) -> list[str]:
    """What the slider says at each moment: the time, and which rank holds most by then."""
    tracked = holdings(trace)
    when = np.rint(axis.start_ns + moments * axis.ns_per_unit).astype(np.int64)
    held = np.zeros((len(tracked), len(when)))
    for row, part in zip(held, tracked, strict=True):
        last = np.searchsorted(part.times_ns, when, side="right") - 1
        row[:] = np.where(last >= 0, part.num_bytes.sum(1)[np.maximum(last, 0)], 0)
    return [
        f"{axis.label(time)} · most: rank {tracked[most].rank}, {bytes_text(num_bytes)}"
        for time, most, num_bytes in zip(moments.tolist(), held.argmax(0).tolist(), held.max(0).tolist(), strict=True)
    ]


def _expected_in_words(memory: MemoryRows) -> list[str]:
    """Each category's own peak beside what is expected, for the ranks that have a row."""
    lines = []
    for held, expected in list(zip(memory.rows, memory.expected, strict=True))[:MAX_RANKS_LISTED]:
        if expected:
            highest = dict(zip(CATEGORIES, held.num_bytes.max(0).tolist(), strict=True))
            parts = (
                f"{name} {bytes_text(highest[name])} of {bytes_text(num_bytes)}" for name, num_bytes in expected.items()
            )
            lines.append(f"Rank {held.rank}, highest of {expected_text(expected)}: {', '.join(parts)}.")
    return lines
