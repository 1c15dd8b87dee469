"""What joins ranks in a timeline: an arrow for each message, a band across its group for each collective."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from vizkit.figures.bars import polygons
from vizkit.figures.placement import COMMUNICATION_LANE, ROW_SCALE, lane_of
from vizkit.figures.theme import BLUE, OUTLINE, PURPLE, TimeAxis
from vizkit.trace import COLLECTIVE_KINDS, SpanKind, Trace

MAX_ARROWS = 2_000
MAX_BANDS = 4_000
BAND = "rgba(204,121,167,0.22)"
"""Okabe-Ito's purple, so thin that the rows under a band stay readable."""


def link_traces(trace: Trace, axis: TimeAxis, yaxis: str = "y") -> list[go.Scatter]:
    """Bands and arrows of a trace, as few Plotly traces as there are kinds of link; none where there are too many."""
    drawn = [_bands(trace, axis, yaxis), _arrows(trace, axis, yaxis)]
    return [link for link in drawn if link is not None]


def message_pairs(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Positions of each send and of its receive; a send without a receive is left out."""
    sends = np.flatnonzero(trace.is_kind(SpanKind.SEND) & (trace.operation >= 0))
    receives = np.flatnonzero(trace.is_kind(SpanKind.RECEIVE) & (trace.operation >= 0))
    _, first, second = np.intersect1d(trace.operation[sends], trace.operation[receives], return_indices=True)
    return sends[first], receives[second]


def collective_neighbours(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the spans of one collective on neighbouring members of its group: upper and lower."""
    members = np.flatnonzero(trace.is_kind(*COLLECTIVE_KINDS) & (trace.operation >= 0))
    members = members[np.lexsort([trace.rank[members], trace.operation[members]])]
    upper, lower = members[:-1], members[1:]
    joined = (trace.operation[upper] == trace.operation[lower]) & (trace.rank[upper] < trace.rank[lower])
    return upper[joined], lower[joined]


def _bands(trace: Trace, axis: TimeAxis, yaxis: str) -> go.Scatter | None:
    upper, lower = collective_neighbours(trace)
    if not 0 < len(upper) <= MAX_BANDS:
        return None
    lanes = lane_of(trace)
    x = axis.of(np.stack([trace.start_ns[upper], trace.end_ns[upper], trace.end_ns[lower], trace.start_ns[lower]], 1))
    y = np.stack([lanes[upper, 1], lanes[upper, 1], lanes[lower, 0], lanes[lower, 0]], 1)
    return go.Scatter(
        **polygons(x, y), mode="lines", line={"width": 0.7, "color": PURPLE}, fill="toself", fillcolor=BAND,
        hoverinfo="skip", yaxis=yaxis, name="collective", legendgroup="band", legendrank=310,
    )  # fmt: skip


def _arrows(trace: Trace, axis: TimeAxis, yaxis: str) -> go.Scatter | None:
    sends, receives = message_pairs(trace)
    if not 0 < len(sends) <= MAX_ARROWS:
        return None
    # from edge to edge of the communication lanes, because over the bars, which have its colour, an arrow is not seen
    top, bottom = (round(edge * ROW_SCALE) for edge in COMMUNICATION_LANE)
    downwards = trace.rank[receives] > trace.rank[sends]
    begin = trace.rank[sends] * ROW_SCALE + np.where(downwards, bottom, top)
    finish = trace.rank[receives] * ROW_SCALE + np.where(downwards, top, bottom)
    gap = np.full(len(sends), np.nan)
    x = np.stack([axis.of(trace.start_ns[sends]), axis.of(trace.end_ns[receives]), gap], 1)
    return go.Scatter(
        x=x.ravel(), y=np.stack([begin, finish, finish], 1).ravel().astype(np.int16),
        mode="lines+markers", line={"width": 1.2, "color": BLUE},
        marker={
            "symbol": "arrow", "angleref": "previous", "color": BLUE, "line": {"width": 0.5, "color": OUTLINE},
            "size": np.tile(np.array([0, 9, 0], np.int8), len(sends)),
        },
        hoverinfo="skip", yaxis=yaxis, name="message", legendgroup="message", legendrank=311,
    )  # fmt: skip
