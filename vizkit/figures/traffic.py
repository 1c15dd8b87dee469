"""Who sent how much to whom, growing with time."""

from __future__ import annotations

import math

import numpy as np
import plotly.graph_objects as go

from vizkit import metrics
from vizkit.figures.animation import PLAY_SECONDS, add_frames, frame_times
from vizkit.figures.describe import remember, summarise
from vizkit.figures.empty import nothing_to_show
from vizkit.figures.strip import with_known_ways
from vizkit.figures.theme import (
    AXIS_STYLE,
    CLOCK_MEANINGS,
    EMPTY_CELL,
    TimeAxis,
    base_layout,
    duration_text,
    sequential_scale,
)
from vizkit.trace import Trace
from vizkit.units import bytes_text

MAX_NUMBERED_RANKS = 12
MAX_TICKS = 32
LOG_RATIO = 100
MAX_FRAME_CELLS = 60_000
HEADER_PX, FOOTER_PX = 124, 20


def traffic_map(trace: Trace, *, title: str | None = None, max_frames: int = 40) -> go.Figure:
    """Bytes on the wire from rank (row) to rank (column), growing with time on the trace's clock.

    Colours are linear in bytes, or logarithmic where the largest edge carries over 100 times the smallest; the colour
    bar says which. Up to 12 ranks each cell holds its number; over 38 there are fewer
    frames than `max_frames`. Raises `InvalidInputError` for fewer than 2 frames.

    >>> from vizkit.trace import Span
    >>> sends = [Span(0, "send", 0, 9, peer=1, payload_bytes=2_000), Span(1, "send", 9, 20, peer=0, payload_bytes=500)]
    >>> traffic_map(Trace.from_spans(sends, clock="ideal")).data[0].text.tolist()
    [['', '2 kB'], ['500 B', '']]
    """
    times = frame_times(1.0, min(max_frames, max(2, MAX_FRAME_CELLS // max(trace.world_size, 1) ** 2)))
    heading = title or "Bytes on the wire, from rank (row) to rank (column)"
    if not len(trace):
        return nothing_to_show(trace, heading)
    start, _ = trace.extent_ns
    axis, size = TimeAxis.spanning(*trace.extent_ns), trace.world_size
    moments_ns = start + np.rint(times * trace.duration_ns).astype(np.int64)
    history = metrics.traffic_over_time(with_known_ways(trace), moments_ns)
    final = history[-1]
    logarithmic = _is_logarithmic(final)
    top = float(final.max(initial=0))
    low = math.log10(final[final > 0].min()) if logarithmic else 0.0
    high = max(math.log10(top), low + 1) if logarithmic else max(top, 1.0)

    def cells(matrix: np.ndarray) -> dict[str, object]:
        shades = np.log10(np.maximum(matrix, 1)) if logarithmic else matrix.astype(float)
        # an empty cell lies below the scale's range, so that "nothing" differs from "little"
        below = low - (high - low) * EMPTY_SHARE
        z = np.where(matrix > 0, np.maximum(shades, low), below)
        return {"z": z.astype(np.float32), "customdata": matrix.astype(np.float32), "text": _texts(matrix)}

    text_px = 12 if size <= 8 else 9
    fig = go.Figure(
        go.Heatmap(
            **cells(final),
            zmin=low - (high - low) * EMPTY_SHARE,
            zmax=high,
            colorscale=[[0, EMPTY_CELL], [EMPTY_EDGE, EMPTY_CELL], *sequential_scale(EMPTY_EDGE)],
            xgap=2 if size <= 32 else 0,
            ygap=2 if size <= 32 else 0,
            texttemplate="%{text}" if size <= MAX_NUMBERED_RANKS else None,
            textfont={"size": text_px},
            hovertemplate="rank %{y} → rank %{x}<br>%{customdata:.4s}B<extra></extra>",
            colorbar=_color_bar(low, high, logarithmic),
        )
    )
    side_px = max(240, min(size * 64, 560))
    _lay_out(fig, trace, heading, side_px)
    totals = history.sum(axis=(1, 2)).tolist()
    labels = [
        f"{axis.label(time)} · {bytes_text(total)} moved"
        for time, total in zip(axis.of(moments_ns).tolist(), totals, strict=True)
    ]
    frames = [
        {"name": f"{i}", "data": [{"type": "heatmap", **cells(matrix)}], "traces": [0]}
        for i, matrix in enumerate(history)
    ]
    add_frames(fig, frames, labels, redraw=True, frame_ms=round(1000 * PLAY_SECONDS / len(frames)))
    return remember(fig, f"{_busiest_edges(final)}\n{summarise(trace)}")


EMPTY_SHARE = 0.02
EMPTY_EDGE = EMPTY_SHARE / (1 + EMPTY_SHARE) * 0.99


def _is_logarithmic(matrix: np.ndarray) -> bool:
    used = matrix[matrix > 0]
    return bool(len(used)) and int(used.max()) > LOG_RATIO * int(used.min())


def _texts(matrix: np.ndarray) -> np.ndarray | None:
    if len(matrix) > MAX_NUMBERED_RANKS:
        return None
    texts = [[bytes_text(num) if num else "" for num in row] for row in matrix.tolist()]
    return np.array(texts, object).reshape(matrix.shape)


def _color_bar(low: float, high: float, logarithmic: bool) -> dict[str, object]:
    values = np.linspace(low, high, 5)
    sizes = 10**values if logarithmic else values
    return {
        "title": {"text": "bytes (log scale)" if logarithmic else "bytes (linear)", "side": "right"},
        "tickvals": values, "ticktext": [bytes_text(num) for num in sizes.tolist()],
        "outlinewidth": 0, "thickness": 14,
    }  # fmt: skip


def _lay_out(fig: go.Figure, trace: Trace, title: str, side_px: int) -> None:
    clock = f"{CLOCK_MEANINGS[trace.clock]} · {duration_text(trace.duration_ns)}"
    subtitle = f"{clock} · by each collective's algorithm, no headers"
    fig.layout = base_layout(title, subtitle, side_px + HEADER_PX + FOOTER_PX)
    fig.layout.margin.update(t=HEADER_PX, b=FOOTER_PX)
    size = trace.world_size
    ticks = list(range(0, size, -(-max(size, 1) // MAX_TICKS)))
    edges = (-0.5, max(size, 1) - 0.5)
    common = {**AXIS_STYLE, "tickvals": ticks, "showgrid": False}
    fig.layout.update(
        xaxis={**common, "title": {"text": "to rank", "standoff": 4}, "side": "top", "range": edges},
        yaxis={**common, "title": {"text": "from rank"}, "range": edges[::-1]},
    )


def _busiest_edges(matrix: np.ndarray) -> str:
    order = np.argsort(-matrix, axis=None, kind="stable")[:3]
    edges = [(*divmod(int(i), len(matrix)), int(matrix.flat[i])) for i in order if matrix.flat[i]]
    if not edges:
        return "No rank sent anything to another."
    return "Busiest: " + ", ".join(f"rank {src} to rank {dst} {bytes_text(num)}" for src, dst, num in edges) + "."
