"""What stands in for a picture where there is nothing to draw."""

from __future__ import annotations

import plotly.graph_objects as go

from vizkit.figures.describe import remember, summarise
from vizkit.figures.theme import CLOCK_MEANINGS, TEXT, base_layout
from vizkit.trace import Trace


def nothing_to_show(trace: Trace, title: str) -> go.Figure:
    """A figure that says that the trace has no spans."""
    fig = go.Figure(layout=base_layout(title, f"{CLOCK_MEANINGS[trace.clock]} · no spans", 220))
    hidden = {"visible": False, "range": (0, 1)}
    fig.layout.update(xaxis=hidden, yaxis=hidden)
    fig.add_annotation(
        text="This trace has no spans: no rank recorded anything.", x=0.5, y=0.5, xref="paper", yref="paper",
        showarrow=False, font={"size": 15, "color": TEXT},
    )  # fmt: skip
    return remember(fig, summarise(trace))
