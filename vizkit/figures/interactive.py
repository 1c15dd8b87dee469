"""Figures that a kernel drives: Plotly's widget, with no frames, drawn again in more detail on zoom."""

from __future__ import annotations

import plotly.graph_objects as go

from vizkit.figures.bars import Detail, span_traces, within
from vizkit.figures.links import link_traces
from vizkit.figures.theme import TimeAxis
from vizkit.figures.timeline import timeline
from vizkit.trace import Trace


def as_widget(fig: go.Figure) -> go.FigureWidget:
    """A `FigureWidget` of the same picture without Plotly's own controls, which it does not support."""
    content = fig.to_plotly_json()
    layout = {key: value for key, value in content["layout"].items() if key not in ("sliders", "updatemenus")}
    return go.FigureWidget(data=content["data"], layout=layout)


def zoomable_timeline(trace: Trace, fig: go.Figure | None = None) -> go.FigureWidget:
    """A timeline whose spans are drawn anew for the visible part: the closer the look, the more detail.

    `fig` is the trace's timeline, where one has been drawn already.
    """
    widget = as_widget(fig or timeline(trace))
    if Detail.of(len(trace)) is not Detail.BARS:
        widget.layout.on_change(_Redraw(trace, widget), "xaxis.range")
    return widget


class _Redraw:
    """Callback for a new range of the time axis."""

    def __init__(self, trace: Trace, widget: go.FigureWidget) -> None:
        self._trace = trace
        self._widget = widget
        self._axis = TimeAxis.spanning(*trace.extent_ns)

    def __call__(self, layout: go.Layout, visible: tuple[float, float]) -> None:
        first, last = (self._trace.extent_ns[0] + round(edge * self._axis.ns_per_unit) for edge in visible)
        strip = [trace for trace in self._widget.data if trace.yaxis in ("y2", "y3")]
        seen = within(self._trace, (first, last))
        rows = span_traces(seen, self._axis, window_ns=(first, last))
        with self._widget.batch_update():
            self._widget.data = strip
            self._widget.add_traces([*rows, *link_traces(seen, self._axis)])
