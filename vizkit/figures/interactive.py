"""Figures that a kernel drives: Plotly's widget, with no frames, drawn again in more detail on zoom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import traitlets

from vizkit.figures.bars import Detail, span_traces, within
from vizkit.figures.links import link_traces
from vizkit.figures.theme import TimeAxis
from vizkit.figures.timeline import timeline
from vizkit.trace import Trace


def as_widget(fig: go.Figure) -> go.FigureWidget:
    """A `FigureWidget` of the same picture without Plotly's own controls, which it does not support."""
    content = fig.to_plotly_json()
    layout = {key: value for key, value in content["layout"].items() if key not in ("sliders", "updatemenus")}
    return _WholeWidget(data=content["data"], layout=layout)


class _WholeWidget(go.FigureWidget):
    """Plotly's widget, made reliable where several are shown at once.

    Plotly's own announces itself while it is empty and sends the data after. Its view draws what is there once
    plotly.js has loaded and ignores data that comes later: the picture stays blank whenever the load wins. This one
    announces itself with its data. `page/widget.js` says what else is different in the browser.
    """

    _esm = Path(__file__).parent / "page" / "widget.js"
    _plotly_js = traitlets.Unicode().tag(sync=True)
    _is_filled = False

    def __init__(self, **content: Any) -> None:
        super().__init__(**content)
        self._plotly_js = str(go.FigureWidget._esm)
        self._is_filled = True
        self.open()

    def open(self) -> None:
        """Announce the widget, once it holds its data."""
        if self._is_filled:
            super().open()


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
