"""Play, pause and scrub a figure from the keyboard, with its summary in words below."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

import ipywidgets

from vizkit.figures.animation import show_frame
from vizkit.figures.describe import describe
from vizkit.figures.interactive import as_widget, zoomable_timeline
from vizkit.figures.timeline import timeline
from vizkit.trace import Trace

if TYPE_CHECKING:
    import plotly.graph_objects as go

PLOTLY_MIME_TYPE = "application/vnd.plotly.v1+json"


def player(trace_or_fig: Trace | go.Figure) -> Player:
    """The figure, or the trace's timeline, with a play button, a slider and step buttons that the keyboard reaches.

    Needs a kernel to play; nothing is raised without one. Of a trace with over 5,000 spans the visible part is drawn
    anew on zoom. Plotly's widget carries 5 MB of state: save notebooks without widget state (JupyterLab's default;
    `store_widget_state=False` in nbclient). A saved notebook then has the figure for Plotly's renderer and the summary.

    >>> from vizkit.trace import Span
    >>> view = player(Trace.from_spans([Span(0, "F", 0, 5_000_000)], clock="ideal"))
    >>> view.slider.value = 0
    >>> view.moment.value, view.picture.layout.shapes[0].x0
    ('0 ms · 0 B moved', 0.0)
    """
    return Player(trace_or_fig)


class Player(ipywidgets.VBox):
    """A figure under ipywidgets controls; `picture`, `slider`, `moment` and `summary` are its parts."""

    def __init__(self, trace_or_fig: Trace | go.Figure) -> None:
        self.figure: go.Figure
        if isinstance(trace_or_fig, Trace):
            self.figure = timeline(trace_or_fig)
            self.picture = zoomable_timeline(trace_or_fig, self.figure)
        else:
            self.figure = trace_or_fig
            self.picture = as_widget(trace_or_fig)
        self.summary = ipywidgets.HTML(_preformatted(describe(self.figure)))
        self._labels: list[str] = []
        super().__init__([*self._controls(), self.picture, self.summary])

    def _controls(self) -> list[ipywidgets.Widget]:
        if not self.figure.frames or not self.figure.layout.sliders:
            return []
        controls = self.figure.layout.sliders[0]
        self._labels = [step.label for step in controls.steps]
        last = len(self._labels) - 1
        interval = self.figure.layout.updatemenus[0].buttons[0].args[1]["frame"]["duration"]
        self.play = ipywidgets.Play(value=controls.active, max=last, interval=interval, description="Play")
        self.slider = ipywidgets.IntSlider(
            value=controls.active, max=last, description="Moment", readout=False, layout={"flex": "1 1 auto"}
        )
        self.moment = ipywidgets.Label(self._labels[controls.active], layout={"min_width": "16em"})
        back = ipywidgets.Button(description="Back", tooltip="One step back", layout={"width": "5em"})
        forward = ipywidgets.Button(description="Forward", tooltip="One step forward", layout={"width": "6em"})
        back.on_click(lambda _: self._step(-1))
        forward.on_click(lambda _: self._step(+1))
        ipywidgets.link((self.play, "value"), (self.slider, "value"))
        self.slider.observe(self._show, "value")
        return [ipywidgets.HBox([self.play, back, forward, self.slider, self.moment])]

    def _step(self, by: int) -> None:
        self.slider.value = min(max(self.slider.value + by, 0), self.slider.max)

    def _show(self, change: dict[str, Any]) -> None:
        self.moment.value = self._labels[change["new"]]
        show_frame(self.picture, self.figure.frames[change["new"]])

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and what shows where no kernel answers: the figure for Plotly's renderer, the summary."""
        words = describe(self.figure)
        bundle = super()._repr_mimebundle_(**kwargs)
        return {
            **bundle,
            "text/plain": words,
            "text/html": _preformatted(words),
            PLOTLY_MIME_TYPE: json.loads(self.figure.to_json()),
        }


def _preformatted(words: str) -> str:
    return f"<pre>{html.escape(words)}</pre>"
