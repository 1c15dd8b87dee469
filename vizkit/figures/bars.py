"""Spans as pictures, in three levels of detail by their number."""

from __future__ import annotations

import enum

import numpy as np
import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType

from vizkit.figures.coverage import dominant_kinds, idle_intervals
from vizkit.figures.placement import COMMUNICATION_LANE, COMPUTE_LANE, ROW_SCALE, lane_of
from vizkit.figures.theme import CLEAR, HATCH, IDLE, OUTLINE, STYLES, TimeAxis, duration_text
from vizkit.trace import COLLECTIVE_KINDS, KINDS, NONE, SpanKind, Trace
from vizkit.units import bytes_text

MAX_BARS = 5_000
MAX_POLYGONS = 50_000
HEAT_MAP_COLUMNS = 1_200
SLIVERS_PER_PIXEL = 10
"""Where there are many, gaps under a tenth of a pixel are left out."""


class Detail(enum.StrEnum):
    """How spans are drawn: each with its own hover, each without, or the dominant kind of each pixel."""

    BARS = "bars"
    POLYGONS = "polygons"
    HEAT_MAP = "heat map"

    @classmethod
    def of(cls, num_spans: int) -> Detail:
        """The level for this many spans.

        >>> [Detail.of(n).value for n in (5_000, 50_000, 50_001)]
        ['bars', 'polygons', 'heat map']
        """
        if num_spans <= MAX_BARS:
            return cls.BARS
        return cls.POLYGONS if num_spans <= MAX_POLYGONS else cls.HEAT_MAP


def span_traces(
    trace: Trace, axis: TimeAxis, yaxis: str = "y", *, window_ns: tuple[int, int] | None = None
) -> list[BaseTraceType]:
    """Plotly traces of all spans on `yaxis` (a row is `ROW_SCALE` high, rank r in the middle at r × `ROW_SCALE`).

    With `window_ns` only what is seen in that part of the trace, in the detail that its spans allow.
    """
    window = window_ns or trace.extent_ns
    shown = trace if window_ns is None else within(trace, window_ns)
    detail = Detail.of(len(shown))
    idle = _idle(shown, axis, yaxis, window)
    if detail is Detail.HEAT_MAP:
        return [idle, *_heat_map(shown, axis, yaxis, window)]
    draw = _bars if detail is Detail.BARS else _polygons
    lanes = lane_of(shown)
    drawn = []
    for code in np.unique(shown.kind).tolist():
        is_kind = shown.kind == code
        drawn.append(draw(KINDS[code], shown.filter(is_kind), lanes[is_kind], axis, yaxis, shown.duration_ns))
    return [idle, *drawn]


def within(trace: Trace, window_ns: tuple[int, int]) -> Trace:
    """The spans that are seen in this part of the trace."""
    return trace.filter((trace.end_ns >= window_ns[0]) & (trace.start_ns <= window_ns[1]))


def rectangles(left: np.ndarray, right: np.ndarray, top: np.ndarray, bottom: np.ndarray) -> dict[str, np.ndarray]:
    """`x` and `y` of one filled trace with a rectangle for each entry, separated by gaps."""
    return polygons(np.stack([left, right, right, left], 1), np.stack([top, top, bottom, bottom], 1))


def polygons(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """`x` and `y` of one filled trace with a polygon for each row of corners, separated by gaps."""
    gap = np.full((len(x), 1), np.nan)
    corners = np.concatenate([x, gap], 1, dtype=np.float32)
    heights = np.concatenate([y, y[:, -1:]], 1).astype(np.int16)
    return {"x": corners.ravel(), "y": heights.ravel()}


def _bars(kind: SpanKind, spans: Trace, lanes: np.ndarray, axis: TimeAxis, yaxis: str, total_ns: int) -> go.Bar:
    style, heights = STYLES[kind], lanes[:, 1] - lanes[:, 0]
    # a span under a pixel is nothing but its outline, which therefore has the kind's colour
    is_sliver = (spans.end_ns - spans.start_ns) * HEAT_MAP_COLUMNS <= total_ns
    outline: dict[str, object] = {"width": 0.6, "color": OUTLINE}
    if is_sliver.any():
        outline = {"width": np.where(is_sliver, 1.5, 0.6), "color": np.where(is_sliver, style.color, OUTLINE).tolist()}
    return go.Bar(
        orientation="h",
        base=axis.of(spans.start_ns),
        x=(spans.end_ns - spans.start_ns) / axis.ns_per_unit,
        y=lanes.mean(1),
        width=heights if np.ptp(heights) else int(heights[0]),
        yaxis=yaxis,
        name=style.legend,
        legendgroup=kind.value,
        legendrank=100 + kind.code,
        marker={
            "color": style.color,
            "line": outline,
            "pattern": _pattern(kind),
        },
        hovertext=_hover_texts(spans),
        hovertemplate="%{hovertext}<br>starts at %{base:.6~g} " + axis.unit + "<extra></extra>",
    )


def _polygons(kind: SpanKind, spans: Trace, lanes: np.ndarray, axis: TimeAxis, yaxis: str, total_ns: int) -> go.Scatter:
    style = STYLES[kind]
    return go.Scatter(
        **rectangles(axis.of(spans.start_ns), axis.of(spans.end_ns), lanes[:, 0], lanes[:, 1]),
        mode="none",
        fill="toself",
        fillcolor=style.color,
        fillpattern=_pattern(kind),
        hoveron="fills",
        hoverinfo="name",
        yaxis=yaxis,
        name=style.legend,
        legendgroup=kind.value,
        legendrank=100 + kind.code,
    )


def _heat_map(trace: Trace, axis: TimeAxis, yaxis: str, window_ns: tuple[int, int]) -> list[BaseTraceType]:
    """Two rows of pixels a rank: the kind that fills most of each pixel, in its colour."""
    start, end = window_ns
    codes = np.unique(trace.kind)
    dominant = dominant_kinds(trace, HEAT_MAP_COLUMNS, window_ns)
    position = np.zeros(len(KINDS) + 1, np.uint8)
    position[codes] = np.arange(1, len(codes) + 1)
    colors = [CLEAR, *(STYLES[KINDS[code]].color for code in codes)]
    edges = np.linspace(0, 1, len(colors) + 1)
    lanes = np.rint(np.array([COMPUTE_LANE, COMMUNICATION_LANE]) * ROW_SCALE)
    # a heat map's rows share their edges, so an empty row stands between the two lanes
    rows = (np.arange(trace.world_size)[:, None] * ROW_SCALE + lanes.ravel()).ravel()
    z = np.zeros((len(rows) - 1, dominant.shape[2]), np.uint8)
    z[0::4], z[2::4] = position[dominant[:, 0]], position[dominant[:, 1]]
    picture = go.Heatmap(
        x0=float(axis.of(np.array(start))) + (end - start) / axis.ns_per_unit / HEAT_MAP_COLUMNS / 2,
        dx=(end - start) / axis.ns_per_unit / HEAT_MAP_COLUMNS,
        y=rows,
        z=z,
        zmin=-0.5,
        zmax=len(colors) - 0.5,
        colorscale=[[float(edge), color] for i, color in enumerate(colors) for edge in (edges[i], edges[i + 1])],
        showscale=False,
        hoverinfo="skip",
        yaxis=yaxis,
    )
    return [picture, *(_legend_key(code, yaxis) for code in codes.tolist())]


def _legend_key(code: int, yaxis: str) -> go.Bar:
    kind = KINDS[code]
    return go.Bar(
        x=[0], y=[0], width=0, orientation="h", yaxis=yaxis, name=STYLES[kind].label, legendgroup=kind.value,
        legendrank=100 + code, marker={"color": STYLES[kind].color}, hoverinfo="skip",
    )  # fmt: skip


def _pattern(kind: SpanKind) -> dict[str, object]:
    style = STYLES[kind]
    return {"shape": style.pattern, "fgcolor": HATCH, "bgcolor": style.color, "size": 7, "solidity": 0.25}


def _idle(trace: Trace, axis: TimeAxis, yaxis: str, window_ns: tuple[int, int]) -> go.Scatter:
    """Grey over each time in which a rank neither computes nor communicates."""
    rank, left, right = idle_intervals(trace, window_ns)
    if len(left) > MAX_BARS:
        visible = (right - left) * SLIVERS_PER_PIXEL * HEAT_MAP_COLUMNS >= window_ns[1] - window_ns[0]
        rank, left, right = rank[visible], left[visible], right[visible]
    top = rank * ROW_SCALE + round(COMPUTE_LANE[0] * ROW_SCALE)
    bottom = rank * ROW_SCALE + round(COMMUNICATION_LANE[1] * ROW_SCALE)
    return go.Scatter(
        **rectangles(axis.of(left), axis.of(right), top, bottom),
        mode="none", fill="toself", fillcolor=IDLE, hoverinfo="skip", yaxis=yaxis, name="idle",
        legendgroup="idle", legendrank=300,
    )  # fmt: skip


def _hover_texts(spans: Trace) -> list[str]:
    return [_hover_text(*row) for row in zip(
        *(spans.columns[c].tolist() for c in _HOVER_COLUMNS),
        [spans.tables["name"][i] for i in spans.name.tolist()],
        [spans.tables["group"][i] for i in spans.group.tolist()],
        strict=True,
    )]  # fmt: skip


_HOVER_COLUMNS = ("rank", "kind", "start_ns", "end_ns", "stage", "microbatch", "payload_bytes", "peer")
_MAX_NAME = 80


def _hover_text(
    rank: int, kind: int, start: int, end: int, stage: int, microbatch: int, payload: int, peer: int,
    name: str, group: tuple[int, ...],
) -> str:  # fmt: skip
    label = STYLES[KINDS[kind]].label
    lines = [f"<b>{_escape(name) or label}</b>", f"{label}, rank {rank}, {duration_text(end - start)}"]
    place = [f"{word} {value}" for word, value in (("stage", stage), ("microbatch", microbatch)) if value != NONE]
    if place:
        lines.append(", ".join(place))
    if payload:
        lines.append(f"payload {bytes_text(payload)} ({payload:,} bytes)")
    if peer != NONE:
        lines.append(f"{'root' if KINDS[kind] in COLLECTIVE_KINDS else 'peer'}: rank {peer}")
    if len(group) > 1:
        lines.append(f"group: ranks {', '.join(map(str, group[:16]))}{' …' if len(group) > 16 else ''}")
    return "<br>".join(lines)


def _escape(name: str) -> str:
    short = name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"
    return short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
