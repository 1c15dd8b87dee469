"""A figure or a trace in words, for those who cannot see the picture and for logs."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from vizkit.figures.theme import CLOCK_MEANINGS
from vizkit.trace import Trace

META_KEY = "vizkit_summary"


def summarise(trace: Trace) -> str:
    return f"{trace.world_size} ranks, {CLOCK_MEANINGS[trace.clock]}"


def remember(fig: go.Figure, summary: str) -> go.Figure:
    """Store a summary in the figure, where it survives JSON and copies."""
    meta: dict[str, Any] = dict(fig.layout.meta or {})
    fig.layout.meta = {**meta, META_KEY: summary}
    return fig


def describe(fig_or_trace: go.Figure | Trace) -> str:
    if isinstance(fig_or_trace, Trace):
        return summarise(fig_or_trace)
    return (fig_or_trace.layout.meta or {}).get(META_KEY, "")
