"""The cells of a pipeline picture: an action each, coloured by kind, numbered by microbatch, idle time shaded.

Everything is a plain dict in Plotly's words, because a control moves faster when nothing validates each step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vizkit.figures.bars import HEAT_MAP_COLUMNS, Detail, rectangles
from vizkit.figures.coverage import dominant_kinds, idle_intervals
from vizkit.figures.describe import PIPELINE_KINDS
from vizkit.figures.links import message_pairs
from vizkit.figures.placement import ROW_SCALE
from vizkit.figures.theme import OUTLINE, STYLES, TimeAxis
from vizkit.trace import KINDS, Role, SpanKind, Trace

BUBBLE = "rgba(128,128,128,0.30)"
HATCHING = {"fgcolor": "rgba(0,0,0,0.20)", "size": 6, "solidity": 0.22}
"""Fainter than in a timeline: the cell's number has to be read over it."""
LINK = "#1B87C9"
HALF_CELL, HALF_CELL_WITH_LINKS = 46, 36
"""Half the height of a cell in hundredths of a row; messages run in the gap between rows."""
USUAL_WIDTH_PX = 750
"""Of the time axis, in a figure 900 pixels wide."""
MAX_LINKS = 160
MAX_RANKS_WITH_LINKS = 16
LARGEST_NUMBER_PX, SMALLEST_NUMBER_PX = 13, 8
DIGIT_WIDTH = 0.64
"""Of a digit, as a share of the font's size."""
PALEST = 0.62
"""How much white the last of a rank's stages has."""


def cell_traces(trace: Trace, axis: TimeAxis, duration: float, yaxis: str) -> list[dict[str, Any]]:
    """Idle time, cells by kind and stage, numbers, messages; `duration` is the time axis's length in its unit."""
    compute = trace.filter(trace.is_role(Role.COMPUTE))
    detail = Detail.of(len(compute))
    if detail is Detail.HEAT_MAP:
        return _heat_map(compute, axis, trace.extent_ns, yaxis)
    sends, receives = _links(trace)
    half = HALF_CELL_WITH_LINKS if len(sends) else HALF_CELL
    top, bottom = _edges(compute, half)
    local, num_local = stage_on_rank(compute)
    per_px = duration / USUAL_WIDTH_PX
    drawn = [_idle(compute, axis, trace.extent_ns, half, yaxis)]
    for code in np.unique(compute.kind).tolist():
        for place in range(num_local):
            chosen = np.flatnonzero((compute.kind == code) & (local == place))
            if len(chosen):
                part = compute.filter(_mask(chosen, len(compute)))
                color = stage_color(KINDS[code], place, num_local)
                look = _look(KINDS[code], color, is_first=not _has(drawn, KINDS[code]), yaxis=yaxis)
                draw = _bars if detail is Detail.BARS else _polygons
                drawn.append(look | draw(part, top[chosen], bottom[chosen], axis, per_px, look))
    if detail is Detail.BARS:
        drawn.append(_numbers(compute, top, bottom, axis, per_px, yaxis))
    if len(sends):
        drawn.append(_arrows(trace, sends, receives, half, axis, yaxis))
    return drawn


def stage_on_rank(compute: Trace) -> tuple[np.ndarray, int]:
    """For each span which of its rank's stages it works on, counted from 0, and the most stages that a rank has."""
    place = np.zeros(len(compute), np.int64)
    is_pass = compute.is_kind(*PIPELINE_KINDS)
    if not is_pass.any():
        return place, 1
    width = int(compute.stage.max()) + 2
    pairs, position = np.unique(
        compute.rank[is_pass].astype(np.int64) * width + compute.stage[is_pass] + 1, return_inverse=True
    )
    place[is_pass] = (np.arange(len(pairs)) - np.searchsorted(pairs, pairs // width * width))[position]
    return place, int(place.max()) + 1


def tinted(color: str, share: float) -> str:
    """The colour with this share of white.

    >>> tinted("#56B4E9", 0.5)
    '#aadaf4'
    """
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def stage_color(kind: SpanKind, place: int, num_stages: int) -> str:
    """The kind's colour, paler for each later one of a rank's stages."""
    return tinted(STYLES[kind].color, PALEST * place / max(num_stages - 1, 1))


def _mask(positions: np.ndarray, length: int) -> np.ndarray:
    mask = np.zeros(length, bool)
    mask[positions] = True
    return mask


def _has(drawn: list[dict[str, Any]], kind: SpanKind) -> bool:
    return any(part["legendgroup"] == kind.value for part in drawn)


def _edges(compute: Trace, half: int) -> tuple[np.ndarray, np.ndarray]:
    """Top and bottom of each cell; where two overlap on a rank the forward has the upper half, the other the lower."""
    top = compute.rank * ROW_SCALE - half
    bottom = compute.rank * ROW_SCALE + half
    order = np.lexsort([compute.start_ns, compute.rank])
    before, after = order[:-1], order[1:]
    meet = (compute.rank[before] == compute.rank[after]) & (compute.start_ns[after] < compute.end_ns[before])
    shares = _mask(np.concatenate([before[meet], after[meet]]), len(compute))
    is_forward = compute.kind == SpanKind.FORWARD.code
    middle = compute.rank * ROW_SCALE
    return np.where(shares & ~is_forward, middle, top), np.where(shares & is_forward, middle, bottom)


def _look(kind: SpanKind, color: str, *, is_first: bool, yaxis: str) -> dict[str, Any]:
    return {
        "name": STYLES[kind].label,
        "legendgroup": kind.value,
        "legendrank": 100 + kind.code,
        "showlegend": is_first,
        "yaxis": yaxis,
        "meta": {"color": color, "kind": kind.value},
    }


def _bars(
    part: Trace, top: np.ndarray, bottom: np.ndarray, axis: TimeAxis, per_px: float, look: dict[str, Any]
) -> dict[str, Any]:
    kind, color = SpanKind(look["meta"]["kind"]), look["meta"]["color"]
    length = (part.end_ns - part.start_ns) / axis.ns_per_unit
    heights = bottom - top
    place = "microbatch %{customdata[0]}, stage %{customdata[1]}, " if kind in PIPELINE_KINDS else ""
    return {
        "type": "bar",
        "orientation": "h",
        "base": axis.of(part.start_ns),
        "x": length,
        "y": (top + bottom) / 2,
        "width": int(heights[0]) if (heights == heights[0]).all() else heights,
        # many narrow cells would be nothing but their outlines
        "marker": {
            "color": color,
            "line": {"width": 0.7, "color": OUTLINE if float(np.median(length)) >= 4 * per_px else color},
            "pattern": pattern(kind, color),
        },
        "customdata": np.stack([part.microbatch, part.stage, part.rank], 1),
        "hovertemplate": f"<b>{STYLES[kind].label}</b><br>{place}rank %{{customdata[2]}}<br>"
        f"from %{{base:.6~g}} to %{{x:.6~g}} {axis.unit}<extra></extra>",
    }


def _polygons(
    part: Trace, top: np.ndarray, bottom: np.ndarray, axis: TimeAxis, per_px: float, look: dict[str, Any]
) -> dict[str, Any]:
    kind, color = SpanKind(look["meta"]["kind"]), look["meta"]["color"]
    wide = float(np.median(part.end_ns - part.start_ns)) / axis.ns_per_unit >= 4 * per_px
    return {
        "type": "scatter",
        **rectangles(axis.of(part.start_ns), axis.of(part.end_ns), top, bottom),
        "mode": "none",
        "fill": "toself",
        "fillcolor": color,
        "fillpattern": pattern(kind, color) if wide else {},
        "hoveron": "fills",
        "hoverinfo": "name",
    }


def pattern(kind: SpanKind, color: str) -> dict[str, Any]:
    """The kind's hatching on this colour."""
    return {**HATCHING, "shape": STYLES[kind].pattern, "bgcolor": color}


def _numbers(
    compute: Trace, top: np.ndarray, bottom: np.ndarray, axis: TimeAxis, per_px: float, yaxis: str
) -> dict[str, Any]:
    """The microbatch in each cell that is wide enough, in one size that suits most."""
    width_px = (compute.end_ns - compute.start_ns) / axis.ns_per_unit / per_px
    numbered = np.flatnonzero((compute.microbatch >= 0) & compute.is_kind(*PIPELINE_KINDS))
    # the widest number decides for all, or numbers would end in the middle of a row
    digits = len(str(compute.microbatch.max(initial=0)))
    fitting = (width_px[numbered] - 2) / (DIGIT_WIDTH * digits)
    size = int(np.clip(np.median(fitting) if len(fitting) else 0, SMALLEST_NUMBER_PX, LARGEST_NUMBER_PX))
    shown = numbered[fitting >= size]
    middle_ns = compute.start_ns[shown] + (compute.end_ns[shown] - compute.start_ns[shown]) / 2
    return {
        "type": "scatter",
        "mode": "text",
        "x": axis.of(middle_ns),
        "y": (top[shown] + bottom[shown]) / 2,
        "text": list(map(str, compute.microbatch[shown].tolist())),
        "textfont": {"size": size, "color": "#000"},
        "hoverinfo": "skip",
        "showlegend": False,
        "name": "microbatch",
        "legendgroup": "number",
        "yaxis": yaxis,
    }


def _idle(compute: Trace, axis: TimeAxis, extent_ns: tuple[int, int], half: int, yaxis: str) -> dict[str, Any]:
    rank, left, right = idle_intervals(compute, extent_ns)
    return {
        "type": "scatter",
        **rectangles(axis.of(left), axis.of(right), rank * ROW_SCALE - half, rank * ROW_SCALE + half),
        "mode": "none",
        "fill": "toself",
        "fillcolor": BUBBLE,
        "hoverinfo": "skip",
        "name": "idle (bubble)",
        "legendgroup": "idle",
        "legendrank": 300,
        "showlegend": bool(len(rank)),
        "yaxis": yaxis,
    }


def _links(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    sends, receives = message_pairs(trace)
    if len(sends) > MAX_LINKS or trace.world_size > MAX_RANKS_WITH_LINKS:
        return sends[:0], receives[:0]
    return sends, receives


def _arrows(
    trace: Trace, sends: np.ndarray, receives: np.ndarray, half: int, axis: TimeAxis, yaxis: str
) -> dict[str, Any]:
    """From the sender's row when a message leaves to the receiver's row when it is there."""
    side = np.where(trace.rank[receives] > trace.rank[sends], half, -half)
    begin, finish = trace.rank[sends] * ROW_SCALE + side, trace.rank[receives] * ROW_SCALE - side
    x = np.stack([axis.of(trace.start_ns[sends]), axis.of(trace.end_ns[receives]), np.full(len(sends), np.nan)], 1)
    return {
        "type": "scatter",
        "x": x.ravel(),
        "y": np.stack([begin, finish, finish], 1).ravel(),
        "mode": "lines+markers",
        "line": {"width": 1, "color": LINK},
        "marker": {
            "symbol": "arrow", "angleref": "previous", "color": LINK,
            "size": np.tile(np.array([0, 5, 0]), len(sends)),
        },
        "hoverinfo": "skip",
        "name": "message",
        "legendgroup": "message",
        "legendrank": 311,
        "showlegend": True,
        "yaxis": yaxis,
    }  # fmt: skip


def _heat_map(compute: Trace, axis: TimeAxis, extent_ns: tuple[int, int], yaxis: str) -> list[dict[str, Any]]:
    """One row of pixels a rank: the kind that fills most of each pixel, in its colour."""
    start, end = extent_ns
    codes = np.unique(compute.kind)
    position = np.zeros(len(KINDS) + 1, np.uint8)
    position[codes] = np.arange(1, len(codes) + 1)
    colors = [BUBBLE, *(STYLES[KINDS[code]].color for code in codes.tolist())]
    edges = np.linspace(0, 1, len(colors) + 1)
    step = (end - start) / axis.ns_per_unit / HEAT_MAP_COLUMNS
    picture = {
        "type": "heatmap",
        "x0": step / 2,
        "dx": step,
        "y0": 0,
        "dy": ROW_SCALE,
        "z": position[dominant_kinds(compute, HEAT_MAP_COLUMNS, extent_ns)[:, 0]],
        "zmin": -0.5,
        "zmax": len(colors) - 0.5,
        "colorscale": [[float(edge), color] for i, color in enumerate(colors) for edge in (edges[i], edges[i + 1])],
        "showscale": False,
        "hoverinfo": "skip",
        "ygap": 1,
        "yaxis": yaxis,
        "name": "cells",
        "legendgroup": "cells",
        "showlegend": False,
    }
    keys = [(STYLES[KINDS[code]].label, STYLES[KINDS[code]].color, 100 + code) for code in codes.tolist()]
    return [picture, *(_legend_key(*key, yaxis) for key in [*keys, ("idle (bubble)", BUBBLE, 300)])]


def _legend_key(name: str, color: str, rank: int, yaxis: str) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "x": [0], "y": [0], "width": 0, "yaxis": yaxis, "name": name,
        "legendgroup": name, "legendrank": rank, "marker": {"color": color}, "hoverinfo": "skip", "showlegend": True,
    }  # fmt: skip
