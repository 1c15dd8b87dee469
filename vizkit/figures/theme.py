"""What all figures share: a colour and a hatching for each kind, units, and a layout for light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vizkit.trace import NS_PER_S, Clock, SpanKind
from vizkit.units import seconds_text

# Okabe and Ito's colours, which people with any form of colour vision tell apart.
ORANGE, SKY_BLUE, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"

TEXT = "#797979"
"""The grey that reads best on white and on #111 alike: 4.35 to 1 on both. None has 4.5 on both (WCAG 2)."""
GRID = "rgba(128,128,128,0.28)"
IDLE = "rgba(128,128,128,0.22)"
VEIL = "rgba(128,128,128,0.62)"
CURSOR = VERMILLION
OUTLINE = "#6E6E6E"
"""Seen on both backgrounds, because a very short span is nothing but its outline."""
HATCH = "rgba(0,0,0,0.55)"
CLEAR = "rgba(0,0,0,0)"
FONT_FAMILY = "system-ui, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class KindStyle:
    """How spans of one kind look; `pattern` is one of Plotly's hatchings, and no two kinds share colour and pattern.

    `place` says where in a row they are drawn, for kinds that have a place of their own.
    """

    label: str
    color: str
    pattern: str = ""
    place: str = ""

    @property
    def legend(self) -> str:
        """What the legend says where each span is drawn in its place."""
        return f"{self.label}, {self.place}" if self.place else self.label


STYLES: Mapping[SpanKind, KindStyle] = {
    SpanKind.FORWARD: KindStyle("forward (F)", SKY_BLUE),
    SpanKind.BACKWARD: KindStyle("backward (B)", ORANGE, "/"),
    SpanKind.BACKWARD_INPUT: KindStyle("backward, input (I)", VERMILLION, "\\"),
    SpanKind.BACKWARD_WEIGHT: KindStyle("backward, weight (W)", YELLOW, "-"),
    SpanKind.OPTIMIZER: KindStyle("optimizer", GREEN, "x"),
    SpanKind.COMPUTE: KindStyle("other compute", GREEN),
    SpanKind.DATA: KindStyle("data", YELLOW, "."),
    SpanKind.ALL_REDUCE: KindStyle("all-reduce", PURPLE),
    SpanKind.ALL_GATHER: KindStyle("all-gather", BLUE, "/"),
    SpanKind.REDUCE_SCATTER: KindStyle("reduce-scatter", VERMILLION, "-"),
    SpanKind.ALL_TO_ALL: KindStyle("all-to-all", PURPLE, "x"),
    SpanKind.BROADCAST: KindStyle("broadcast", BLUE, "|"),
    SpanKind.REDUCE: KindStyle("reduce", VERMILLION, "+"),
    SpanKind.GATHER: KindStyle("gather", BLUE, "."),
    SpanKind.SCATTER: KindStyle("scatter", PURPLE, "."),
    SpanKind.BARRIER: KindStyle("barrier", BLUE, "x"),
    SpanKind.SEND: KindStyle("send", BLUE, place="upper half"),
    SpanKind.RECEIVE: KindStyle("receive", BLUE, "\\", place="lower half"),
    SpanKind.WAIT: KindStyle("thread blocked", "#8A8A8A", "."),
}

CLOCK_MEANINGS: Mapping[Clock, str] = {
    Clock.WALL: "wall clock: what happened on this machine",
    Clock.VIRTUAL: "virtual clock: one device a rank",
    Clock.IDEAL: "ideal clock: computed, nothing ran",
}


@dataclass(frozen=True)
class TimeAxis:
    """Turns a trace's nanoseconds into numbers in one unit, counted from the first span."""

    start_ns: int
    unit: str
    ns_per_unit: int

    @classmethod
    def spanning(cls, start_ns: int, end_ns: int) -> TimeAxis:
        """The axis whose unit suits this extent.

        >>> TimeAxis.spanning(0, 3_500_000).unit, TimeAxis.spanning(5, 6).unit
        ('ms', 'ns')
        """
        for unit, ns in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
            if end_ns - start_ns >= 2 * ns:
                return cls(start_ns, unit, ns)
        return cls(start_ns, "ns", 1)

    def of(self, times_ns: np.ndarray) -> np.ndarray:
        """Times in the axis's unit since its start."""
        return (times_ns - self.start_ns) / self.ns_per_unit

    def label(self, time: float) -> str:
        """A time on this axis with its unit.

        >>> TimeAxis(0, "ms", 10**6).label(12.3456)
        '12.35 ms'
        """
        return f"{time:.4g} {self.unit}"


def duration_text(duration_ns: int) -> str:
    """A trace's duration for people."""
    return seconds_text(duration_ns / NS_PER_S)


EMPTY_CELL = "rgba(128,128,128,0.16)"
SEQUENCE = ("#D6EAF8", "#A9D3EE", "#6CB4DF", "#2F92CB", "#0072B2")
"""Pale to dark in one hue, so that order shows without colour vision too; ends read on white and on #111."""


def sequential_scale(first: float = 0.0) -> list[list[object]]:
    """Plotly's colour scale over `SEQUENCE`, from `first` of the way on."""
    steps = np.linspace(first, 1, len(SEQUENCE))
    return [[float(step), color] for step, color in zip(steps, SEQUENCE, strict=True)]


def base_layout(title: str, subtitle: str, height: int) -> dict[str, object]:
    """Layout that assumes no background: clear paper, mid-contrast text, the legend at the right of the plot."""
    return {
        "template": "none",
        "title": {
            "text": title,
            "subtitle": {"text": subtitle, "font": {"size": 12}},
            "x": 0,
            "xref": "paper",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 14},
            "font": {"size": 17},
        },
        "font": {"family": FONT_FAMILY, "size": 12, "color": TEXT},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "height": height,
        "margin": {"l": 70, "r": 20, "t": 72, "b": 60},
        "legend": {
            "x": 1.01,
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "bgcolor": CLEAR,
            "itemwidth": 30,
            "tracegroupgap": 0,
        },
        "hoverlabel": {"align": "left", "font": {"family": FONT_FAMILY}},
        "hovermode": "closest",
        "modebar": {
            "bgcolor": CLEAR,
            "color": TEXT,
            "activecolor": VERMILLION,
            "remove": ["sendChartToCloud"],  # nothing leaves the reader's machine
        },
    }


AXIS_STYLE: Mapping[str, object] = {
    "gridcolor": GRID, "linecolor": GRID, "zeroline": False, "showline": False, "tickcolor": GRID,
}  # fmt: skip
