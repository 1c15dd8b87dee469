"""The pipeline picture: a row a rank, a cell an action, the bubble shaded and counted, memory below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from vizkit import metrics
from vizkit.errors import InvalidInputError
from vizkit.figures.animation import add_cursor, frame_times
from vizkit.figures.describe import counted, remember, summarise
from vizkit.figures.empty import nothing_to_show
from vizkit.figures.pipeline_cells import cell_traces
from vizkit.figures.pipeline_layout import Side, labelled_ranks, pipeline_layout
from vizkit.figures.pipeline_memory import Memory, highest_of, memory_traces
from vizkit.figures.theme import TimeAxis
from vizkit.metrics.intervals import Intervals
from vizkit.trace import Role, Trace


def pipeline_figure(
    trace_or_traces: Trace | Sequence[Trace],
    *,
    labels: Sequence[str] | None = None,
    title: str | None = None,
    max_frames: int = 100,
) -> go.Figure:
    """The classic picture of a pipeline: a row a rank, a cell an action, its microbatch in it, memory below.

    Colour and hatching tell the kind; where a rank holds several stages, those of higher number are paler. Time in
    which a rank computes nothing is grey and counted under the cursor, in `max_frames` steps. Two overlapped actions
    have half a row each. Several traces stand one above the other on one time axis, each from its own first span;
    `labels` default to the schedules of simulated traces, and to numbers. Memory is drawn from counters named
    "activations" or "memory", else from what the passes hold.
    Raises `InvalidInputError` for no traces, for labels that do not match them, and for fewer than 2 frames.

    >>> from vizkit.schedules import schedule
    >>> from vizkit.simulator import simulate
    >>> fig = pipeline_figure(simulate(schedule("1F1B", num_ranks=4, num_microbatches=8), {"F": 1, "B": 2}))
    >>> fig.layout.title.text, fig.layout.sliders[0].steps[-1].label
    ('1F1B: 4 ranks, 8 microbatches', '33 s · bubble so far 27.3%')
    """
    times = frame_times(1.0, max_frames)
    traces = [trace_or_traces] if isinstance(trace_or_traces, Trace) else list(trace_or_traces)
    names = _labels(traces, labels)
    if len(traces) == 1 and not len(traces[0]):
        return nothing_to_show(traces[0], title or "Pipeline")
    sides = sides_of(traces, names)
    fig = go.Figure(picture(sides, title))
    duration = duration_of(sides)
    moments = times * duration
    add_cursor(fig, duration, moments, _moment_labels(sides, moments))
    return remember(fig, _in_words(sides))


def sides_of(traces: Sequence[Trace], labels: Sequence[str]) -> list[Side]:
    """The traces on one unit of time."""
    unit = max((TimeAxis.spanning(*trace.extent_ns) for trace in traces), key=lambda axis: axis.ns_per_unit)
    return [
        Side(
            trace,
            label,
            TimeAxis(trace.extent_ns[0], unit.unit, unit.ns_per_unit),
            Memory.of(trace),
            metrics.bubble(trace),
            number,
        )
        for number, (trace, label) in enumerate(zip(traces, labels, strict=True))
    ]


def duration_of(sides: Sequence[Side]) -> float:
    """Length of the shared time axis in its unit."""
    return max(side.trace.duration_ns / side.axis.ns_per_unit for side in sides)


def picture(sides: Sequence[Side], title: str | None = None) -> dict[str, Any]:
    """Data and layout in Plotly's words, without frames."""
    duration = duration_of(sides)
    highest = highest_of([side.memory for side in sides])
    data: list[dict[str, Any]] = []
    for side in sides:
        data += cell_traces(side.trace, side.axis, duration, side.rows_axis)
        if side.memory:
            shown = labelled_ranks(side.trace.world_size, len(sides))
            data += memory_traces(side.memory, side.axis, duration, highest, side.memory_axis, shown)
    _one_legend_entry_each(data)
    legend = [part["name"] for part in data if part["showlegend"]]
    return {"data": data, "layout": pipeline_layout(sides, title or _heading(sides), duration, highest, legend)}


def _labels(traces: Sequence[Trace], labels: Sequence[str] | None) -> list[str]:
    if not traces or not all(isinstance(trace, Trace) for trace in traces):
        raise InvalidInputError.because(
            "trace_or_traces", traces, "must be a trace or several", "give vk.simulate(…) or run.replay()"
        )
    if labels is not None and len(labels) != len(traces):
        raise InvalidInputError.because(
            "labels", labels, f"there are {counted(len(traces), 'trace')}", "give one label a trace"
        )
    for trace in traces if len(traces) > 1 else ():
        if not len(trace):
            raise InvalidInputError.because("trace", trace, "has no spans to compare", "give one that recorded some")
    return list(labels) if labels else [trace.notes.get("schedule", f"trace {i}") for i, trace in enumerate(traces)]


def _one_legend_entry_each(data: list[dict[str, Any]]) -> None:
    seen: set[str] = set()
    for part in data:
        if part["showlegend"]:
            part["showlegend"] = part["legendgroup"] not in seen
            seen.add(part["legendgroup"])


def _heading(sides: Sequence[Side]) -> str:
    names = " against ".join(side.label for side in sides)
    first = sides[0].trace
    microbatches = len(np.unique(first.microbatch[first.microbatch >= 0]))
    return f"{names}: {counted(first.world_size, 'rank')}, {microbatches} microbatch{'es' if microbatches != 1 else ''}"


def _moment_labels(sides: Sequence[Side], moments: np.ndarray) -> list[str]:
    """What the slider says at each moment: the time, and the share of rank time so far without compute."""
    shares = [bubble_so_far(side, moments) for side in sides]
    prefixes = [f"{side.label} " for side in sides] if len(sides) > 1 else [""]
    return [
        f"{sides[0].axis.label(time)} · bubble so far "
        + ", ".join(f"{prefix}{share:.1%}" for prefix, share in zip(prefixes, row, strict=True))
        for time, *row in zip(moments.tolist(), *(share.tolist() for share in shares), strict=True)
    ]


def bubble_so_far(side: Side, moments: np.ndarray) -> np.ndarray:
    """The share of all ranks' time up to each moment (on the side's axis) in which they did not compute; 0 at first."""
    trace = side.trace
    elapsed = np.minimum(np.rint(moments * side.axis.ns_per_unit), trace.duration_ns).astype(np.int64)
    compute = Intervals.of(trace, trace.is_role(Role.COMPUTE)).covered_before_ns(elapsed)
    return np.where(elapsed > 0, 1 - compute / np.maximum(elapsed * trace.world_size, 1), 0.0)


def _in_words(sides: Sequence[Side]) -> str:
    parts = []
    for side in sides:
        lines = [summarise(side.trace), *([side.memory.in_words()] if side.memory else [])]
        parts.append("\n".join([f"{side.label}: {lines[0]}", *lines[1:]] if len(sides) > 1 else lines))
    return "\n\n".join(parts)
