"""A figure or a trace in words, for those who cannot see the picture and for logs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go

from vizkit import metrics
from vizkit.errors import InvalidInputError
from vizkit.figures.strip import with_known_ways
from vizkit.figures.theme import CLOCK_MEANINGS, STYLES, duration_text
from vizkit.memory_samples import CATEGORIES
from vizkit.trace import NONE, SpanKind, Trace
from vizkit.units import bytes_text

META_KEY = "vizkit_summary"
MAX_RANKS_LISTED = 16
PIPELINE_KINDS = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.BACKWARD_INPUT, SpanKind.BACKWARD_WEIGHT)


def describe(fig_or_trace: go.Figure | Trace) -> str:
    """What a figure of `vizkit`, or a trace, shows, in words: clock, times by rank, bytes, bubble, straggler.

    A figure carries its summary in `layout.meta`, so that it survives JSON. Other Plotly figures get a list of what
    they draw. Raises `InvalidInputError` for anything else.

    >>> from vizkit.trace import Span
    >>> print(describe(Trace.from_spans([Span(0, SpanKind.OPTIMIZER, 0, 5_000_000)], clock="ideal")))
    1 rank, 1 span, 5 ms on the ideal clock: computed, nothing ran.
    Share of 5 ms   compute  communication  exposed communication     idle
    rank 0           100.0%           0.0%                   0.0%     0.0%
    No bytes moved between ranks.
    """
    if isinstance(fig_or_trace, Trace):
        return summarise(fig_or_trace)
    if not isinstance(fig_or_trace, go.Figure):
        raise InvalidInputError.because(
            "fig_or_trace",
            fig_or_trace,
            "is neither a trace nor a Plotly figure",
            "give run.trace or vizkit.timeline(…)",
        )
    stored = (fig_or_trace.layout.meta or {}).get(META_KEY)
    return stored if stored is not None else _foreign(fig_or_trace)


def remember(fig: go.Figure, summary: str) -> go.Figure:
    """Store a summary in the figure, where it survives JSON and copies."""
    meta: dict[str, Any] = dict(fig.layout.meta or {})
    fig.layout.meta = {**meta, META_KEY: summary}
    return fig


def summarise(trace: Trace) -> str:
    """The summary of a trace, a few lines."""
    size = f"{counted(trace.world_size, 'rank')}, {counted(len(trace), 'span')}"
    if not len(trace):
        return f"{size}: nothing was recorded ({CLOCK_MEANINGS[trace.clock]})."
    lines = [
        f"{size}, {duration_text(trace.duration_ns)} on the {CLOCK_MEANINGS[trace.clock]}.",
        *_notes(trace),
        *_time_by_rank(trace),
        *_bytes(trace),
        *_memory(trace),
        *_bubble(trace),
        *_straggler(trace),
    ]
    return "\n".join(lines)


def _notes(trace: Trace) -> list[str]:
    return [", ".join(f"{key} {value}" for key, value in trace.notes.items()) + "."] if trace.notes else []


def _time_by_rank(trace: Trace) -> list[str]:
    parts = metrics.breakdown(trace)
    names = ("compute", "communication", "exposed_communication", "idle")
    shares = np.stack([getattr(parts, name) / max(trace.duration_ns, 1) for name in names], 1)
    widths = [max(len(name), 7) for name in names]
    label_width = max(len(f"Share of {duration_text(trace.duration_ns)}"), 14)
    header = f"Share of {duration_text(trace.duration_ns)}".ljust(label_width) + "".join(
        "  " + name.replace("_", " ").rjust(width) for name, width in zip(names, widths, strict=True)
    )

    def row(label: str, values: np.ndarray) -> str:
        cells = (f"  {value:>{width}.1%}" for value, width in zip(values, widths, strict=True))
        return label.ljust(label_width) + "".join(cells)

    if trace.world_size <= MAX_RANKS_LISTED:
        rows = [row(f"rank {rank}", values) for rank, values in enumerate(shares)]
    else:
        rows = [row(label, pick(shares, axis=0)) for label, pick in
                (("least", np.min), ("mean", np.mean), ("most", np.max))]  # fmt: skip
    return [header, *rows]


def _bytes(trace: Trace) -> list[str]:
    known = with_known_ways(trace)
    traffic = metrics.traffic(known)
    if len(known) < len(trace):
        return [*_bytes(known), f"{counted(len(trace) - len(known), 'send')} without a known receiver not counted."]
    if not traffic.total_wire_bytes and not traffic.operations:
        return ["No bytes moved between ranks."]
    by_kind = ", ".join(
        f"{counted(part.operations, STYLES[kind].label)} ({bytes_text(int(part.wire_bytes.sum()))})"
        for kind, part in traffic.by_kind.items()
    )
    return [
        f"On the wire: {bytes_text(traffic.total_wire_bytes)} for {bytes_text(traffic.payload_bytes)} of payload. "
        f"{by_kind}."
    ]


def _memory(trace: Trace) -> list[str]:
    tracked = sorted({counter.rank for counter in trace.counters if counter.name in CATEGORIES})
    peak = metrics.peak_memory(trace)
    if not peak.total_bytes.any():
        return []
    if len(tracked) > MAX_RANKS_LISTED:
        by_size = sorted(tracked, key=lambda rank: int(peak.total_bytes[rank]))
        tracked = [by_size[0], by_size[-1]]
    said = []
    for rank in tracked:
        parts = ", ".join(f"{name} {bytes_text(num)}" for name, num in peak.of(rank).items() if num)
        said.append(f"rank {rank} {bytes_text(int(peak.total_bytes[rank]))} ({parts})")
    return [f"Tensors at the peak: {'; '.join(said)}."]


def _bubble(trace: Trace) -> list[str]:
    if not trace.is_kind(*PIPELINE_KINDS).any():
        return []
    bubble = metrics.bubble(trace)
    if math.isnan(bubble.over_total):
        return []
    return [f"Bubble: {bubble.over_total:.1%} of the total time, {bubble.over_ideal:.1%} of the ideal time."]


def _straggler(trace: Trace) -> list[str]:
    if (trace.stage != NONE).any():  # in a pipeline, who waits for whose message follows from the order of the stages
        trace = trace.filter(~trace.is_kind(SpanKind.SEND, SpanKind.RECEIVE))
    found = metrics.straggler(trace)
    return [] if found is None else [f"Straggler: {found}."]


def counted(number: int, word: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _foreign(fig: go.Figure) -> str:
    title = fig.layout.title.text or "A figure without a title"
    drawn = ", ".join(f"{trace.name or 'unnamed'} ({trace.type})" for trace in fig.data) or "nothing"
    return f"{title}: {drawn}."
