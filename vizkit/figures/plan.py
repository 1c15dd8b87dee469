"""A plan in a picture: memory against time of every layout that fits, and where the first choices' time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from vizkit.errors import InvalidInputError
from vizkit.figures.describe import remember
from vizkit.figures.theme import (
    AXIS_STYLE,
    BLUE,
    CLEAR,
    CLOCK_MEANINGS,
    GREEN,
    HATCH,
    ORANGE,
    OUTLINE,
    PURPLE,
    SKY_BLUE,
    TEXT,
    VERMILLION,
    YELLOW,
    base_layout,
)
from vizkit.planner import Choice, Plan
from vizkit.sizes import whole_number
from vizkit.trace import Clock
from vizkit.units import seconds_text

MOST_BARS = 8
ROW_PX, SCATTER_PX, GAP_PX, MARGIN_PX, WORDS_PX = 30, 330, 84, 180, 180
PARTS: Mapping[str, tuple[str, str]] = {
    "matrix products": (SKY_BLUE, ""),
    "element by element": (GREEN, ""),
    "exposed tp": (PURPLE, "/"),
    "exposed cp": (BLUE, "x"),
    "exposed ep": (PURPLE, "x"),
    "exposed pp": (BLUE, "\\"),
    "exposed dp": (VERMILLION, "-"),
    "bubble": (YELLOW, "."),
    "optimizer": (ORANGE, "+"),
}
"""Colour and hatching of each part of a step."""
_ROUND = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
_LOG_AXIS: Mapping[str, Any] = {
    **AXIS_STYLE,
    "type": "log",
    "tickvals": _ROUND,
    "ticktext": [f"{value:g}" for value in _ROUND],
}


def plan_figure(plan: Plan, *, chosen: int = 1, title: str | None = None) -> go.Figure:
    """Above, memory of the fullest device (GB) against step time (s, clock ideal), a point for each layout that fits,
    with the limit and the layouts that no other beats in both; below, the parts of the first choices' steps.

    `chosen` is the place in the plan that is marked, from 1 on. A plan in which nothing fits is said in words. Raises
    `InvalidInputError` for anything but a plan, and a place that it has not.

    >>> from vizkit.hardware import dgx_a100
    >>> from vizkit.planner import plan
    >>> from vizkit.transformer import Transformer
    >>> gpt = Transformer(num_layers=24, hidden=2304, heads=24, vocab=51200, seq=2048)
    >>> [part.name for part in plan_figure(plan(gpt, dgx_a100(num_nodes=1), 32)).data][:3]
    ['layouts that fit', 'no other is smaller and faster', 'first choices, numbered']
    """
    if not isinstance(plan, Plan):
        raise InvalidInputError.because(
            "plan", type(plan).__name__, "must be what vk.plan gives back", "use plan=vk.plan(model, …)"
        )
    if whole_number("chosen", chosen) > max(len(plan), 1):
        raise InvalidInputError.because("chosen", chosen, f"the plan has {len(plan)} choices", "use chosen=1")
    content = plan_picture(plan, chosen=chosen, title=title)
    return remember(go.Figure(content), plan_words(plan, chosen))


def plan_words(plan: Plan, chosen: int = 1) -> str:
    """The plan, then what the chosen layout costs."""
    if not plan or chosen == 1:
        return str(plan)
    choice = plan[chosen - 1]
    return f"{plan}\n\nNumber {chosen}: {layout_text(choice)}. {choice.reason}\n{choice.prediction}"


def plan_picture(plan: Plan, *, chosen: int = 1, title: str | None = None) -> dict[str, Any]:
    """Data and layout of the figure as plain dicts; the choices' `customdata` are their places in the plan."""
    heading = title or "Which layout: memory against time, and where the time goes"
    if not plan:
        return words_picture(heading, _subtitle(plan), "Nothing fits. The summary says what would make it fit.")
    shown = list(plan[:MOST_BARS])
    bars_px = ROW_PX * len(shown)
    height = SCATTER_PX + GAP_PX + bars_px + MARGIN_PX
    layout = base_layout(heading, _subtitle(plan), height)
    area = height - MARGIN_PX
    layout |= {
        "margin": {"l": 90, "r": 20, "t": 80, "b": 100},
        "xaxis": {**_LOG_AXIS, "title": {"text": "memory of the fullest device (GB, log scale)"}, "anchor": "y"},
        "yaxis": {**_LOG_AXIS, "title": {"text": "step (s, log scale)"}, "domain": [1 - SCATTER_PX / area, 1]},
        "xaxis2": {**AXIS_STYLE, "type": "linear", "title": {"text": "one step (s, ideal clock)"}, "anchor": "y2"},
        "yaxis2": {
            **AXIS_STYLE,
            "domain": [0, bars_px / area],
            "type": "linear",  # else whole numbers may be taken for names
            "autorange": "reversed",
            "showgrid": False,
            "tickvals": list(range(1, len(shown) + 1)),
            "ticktext": [f"{choice.rank}. {layout_text(choice)}" for choice in shown],
            "tickfont": {"size": 11},
            "automargin": True,
        },
        "barmode": "stack",
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": -70 / area,
            "yanchor": "top",
            "bgcolor": CLEAR,
            "traceorder": "normal",
        },
    }
    limit_gb = plan[0].prediction.memory_limit_bytes / 1e9
    line = {"color": VERMILLION, "dash": "dash"}
    above = {"y": 1, "yref": "y domain", "xanchor": "right", "yanchor": "top", "showarrow": False}
    layout["shapes"] = [
        {"type": "line", "x0": limit_gb, "x1": limit_gb, "y0": 0, "y1": 1, "yref": "y domain", "line": line}
    ]
    layout["annotations"] = [{**above, "x": math.log10(limit_gb), "text": "limit ", "font": {"color": VERMILLION}}]
    return {"data": [*_points(plan, shown, chosen), *_bars(shown)], "layout": layout}


def words_picture(title: str, subtitle: str, words: str) -> dict[str, Any]:
    """A sentence where there is nothing to draw: no axes, whose numbers would mean nothing."""
    hidden = {"visible": False}
    note = {"text": words, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False}
    layout = base_layout(title, subtitle, WORDS_PX)
    return {"data": [], "layout": layout | {"xaxis": hidden, "yaxis": hidden, "annotations": [note]}}


def layout_text(choice: Choice) -> str:
    """The axes that are used, and what else tells this layout from others.

    >>> from vizkit.layout import Layout
    >>> class Chosen:
    ...     layout = Layout(dp=4, tp=8, zero_stage=1)
    >>> layout_text(Chosen())
    'dp 4 · tp 8 · ZeRO-1'
    """
    layout = choice.layout
    sizes = [f"{axis} {size}" for axis in ("dp", "tp", "pp", "cp", "ep") if (size := getattr(layout, axis)) > 1]
    return " · ".join([*(sizes or ["one device"]), *([f"ZeRO-{layout.zero_stage}"] if layout.zero_stage else [])])


def _subtitle(plan: Plan) -> str:
    clock = CLOCK_MEANINGS[Clock.IDEAL]
    return f"{clock} · {plan.fitting:,} of {plan.considered:,} layouts fit"


def _points(plan: Plan, shown: Sequence[Choice], chosen: int) -> list[dict[str, Any]]:
    points, pareto = plan.points, plan.pareto
    mark = plan[chosen - 1]
    hover = "%{text}<br>%{x:.1f} GB, %{y:.3~g} s<extra></extra>"
    axes = {"xaxis": "x", "yaxis": "y", "hovertemplate": hover}

    def line(choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            "x": [choice.prediction.memory_bytes / 1e9 for choice in choices],
            "y": [choice.prediction.step_s for choice in choices],
            "text": [layout_text(choice) for choice in choices],
        }

    return [
        {
            **axes, "type": "scatter", "mode": "markers", "name": "layouts that fit",
            "x": points["memory_GB"].to_numpy(np.float32), "y": points["step_s"].to_numpy(np.float32),
            "text": [_row_text(row) for row in points.to_dict("records")],
            "marker": {"size": 5, "color": TEXT, "opacity": 0.45},
        },
        {
            **axes, **line(pareto), "type": "scatter", "mode": "lines+markers",
            "name": "no other is smaller and faster",
            "line": {"color": BLUE, "width": 2, "shape": "hv"},
            "marker": {"size": 7, "color": BLUE, "symbol": "diamond"},
        },
        {
            **axes, **line(shown), "type": "scatter", "mode": "markers+text", "name": "first choices, numbered",
            "marker": {"size": 17, "color": ORANGE, "line": {"color": OUTLINE, "width": 1}},
            "texttemplate": "%{customdata}", "customdata": [choice.rank for choice in shown],
            "textfont": {"color": "#000", "size": 11},
        },
        {
            **axes, **line([mark]), "type": "scatter", "mode": "markers", "name": "looked into",
            "marker": {"size": 24, "color": VERMILLION, "line": {"width": 3}, "symbol": "circle-open"},
        },
    ]  # fmt: skip


def _row_text(row: Mapping[Any, Any]) -> str:
    sizes = " · ".join(f"{axis} {row[axis]}" for axis in ("dp", "tp", "pp", "cp", "ep") if row[axis] > 1)
    return f"{sizes or 'one device'}, ZeRO-{row['zero_stage']}, microbatch {row['microbatch']}, {row['recompute']}"


def _bars(shown: Sequence[Choice]) -> list[dict[str, Any]]:
    parts = [parts_of(choice) for choice in shown]
    used = [name for name in PARTS if any(part.get(name) for part in parts)]
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "xaxis": "x2",
            "yaxis": "y2",
            "y": list(range(1, len(shown) + 1)),
            "x": [part.get(name, 0.0) for part in parts],
            "marker": {
                "color": PARTS[name][0],
                "pattern": {"shape": PARTS[name][1], "fgcolor": HATCH, "fillmode": "overlay", "size": 6},
                "line": {"color": OUTLINE, "width": 0.5},
            },
            "text": [seconds_text(part.get(name, 0.0)) for part in parts],
            "textposition": "none",
            "hovertemplate": f"{name}: %{{text}}<extra></extra>",
        }
        for name in used
    ]


def parts_of(choice: Choice) -> dict[str, float]:
    """Seconds of each part of a step, which add up to it; names are those of `PARTS`."""
    found = choice.prediction
    return {
        "matrix products": found.matrix_s,
        "element by element": found.elementwise_s,
        **{f"exposed {axis}": seconds for axis, seconds in found.exposed_s.items()},
        "bubble": found.bubble_s,
        "optimizer": found.optimizer_s,
    }
