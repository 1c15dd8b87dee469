"""Which layout for this model on this cluster: a plan made anew at each move of a control, and a choice looked into."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import ipywidgets

from vizkit.errors import InvalidInputError
from vizkit.figures.pipeline import picture as pipeline_picture
from vizkit.figures.pipeline import sides_of
from vizkit.figures.plan import MOST_BARS, layout_text, plan_picture, plan_words, words_picture
from vizkit.figures.redraw import json_of, redraw, widget_of
from vizkit.hardware import PRESETS, Cluster
from vizkit.planner import Plan, plan, timeline
from vizkit.transformer import Transformer
from vizkit.widgets.player import PLOTLY_MIME_TYPE
from vizkit.widgets.words import preformatted

MODELS: Mapping[str, Transformer] = {
    "125 M": Transformer(num_layers=12, hidden=768, heads=12, vocab=50304, seq=1024),
    "1.3 B": Transformer(num_layers=24, hidden=2048, heads=16, vocab=50304, seq=2048),
    "7 B": Transformer(num_layers=32, hidden=4096, heads=32, vocab=32000, seq=4096),
    "18 B": Transformer(num_layers=40, hidden=6144, heads=48, vocab=51200, seq=2048),
    "70 B": Transformer(num_layers=80, hidden=8192, heads=64, vocab=32000, seq=4096),
    "175 B": Transformer(num_layers=96, hidden=12288, heads=96, vocab=51200, seq=2048),
    "1 T": Transformer(num_layers=128, hidden=25600, heads=160, vocab=51200, seq=2048),
}
"""GPTs of well-known sizes; names are rounded numbers of parameters."""
COUNTS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 384]
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072]
MOST_DRAWN = 8
"""Microbatches of the timeline: more repeat what these show."""
_STYLE, _LAYOUT = {"description_width": "9em"}, {"width": "26em"}


def planner(
    model: Transformer | None = None, cluster: str = "DGX A100", count: int = 4, global_batch: int = 256
) -> PlanExplorer:
    """Sliders for the model, the cluster and the batch; memory against time of all layouts that fit; the steps of the
    first choices in parts; and, for the choice that is clicked or reached with the slider, its pipeline over time.

    `model` is one of your own, first in the menu; `cluster` a name of `vk.hardware.PRESETS`, of which there are `count`
    (nodes, or devices where there are no nodes). All times are on the ideal clock. Needs a kernel. Raises
    `InvalidInputError` for an unknown cluster, and for a count or batch that is not on its slider.

    >>> view = planner(count=1)
    >>> view.controls["model"].value = "1.3 B"
    >>> view.plan.best.layout.world_size
    8
    """
    for name, value, options in (
        ("cluster", cluster, list(PRESETS)),
        ("count", count, COUNTS),
        ("global_batch", global_batch, BATCHES),
    ):
        if not any(type(value) is type(option) and value == option for option in options):
            raise InvalidInputError.because(
                name, value, f"its control has {', '.join(map(str, options))}", "use vizkit.plan for others"
            )
    return PlanExplorer(model, cluster, count, global_batch)


class PlanExplorer(ipywidgets.VBox):
    """The explorer; `controls` by name, `picture`, `choice`, `pipeline`, `summary` and `message` are its parts, `plan`
    is what they show."""

    def __init__(self, model: Transformer | None, cluster: str, count: int, global_batch: int) -> None:
        self._models = {"yours": model, **MODELS} if model is not None else dict(MODELS)
        start = "yours" if model is not None else "7 B"
        self.controls: dict[str, ipywidgets.Widget] = {
            "count": _slider("nodes or devices", COUNTS, count),
            "global_batch": _slider("global batch", BATCHES, global_batch),
            "model": _menu("model", list(self._models), start),
            "cluster": _menu("cluster", list(PRESETS), cluster),
        }
        self.choice = ipywidgets.IntSlider(
            value=1, min=1, max=1, description="look into number", style=_STYLE, layout=_LAYOUT
        )
        self.plan = self._planned()
        self._drawn, self._shown = self._pictures()
        self.picture, self.pipeline = widget_of(self._drawn), widget_of(self._shown)
        self.summary = ipywidgets.HTML(preformatted(self.words))
        self.message = ipywidgets.HTML("")
        self._bind_choice()
        for control in self.controls.values():
            control.observe(self._settings_changed, "value")
        self.choice.observe(self._choice_changed, "value")
        self._listen()
        panel = ipywidgets.Box(list(self.controls.values()), layout={"flex_flow": "row wrap"})
        super().__init__([panel, self.message, self.picture, self.choice, self.summary, self.pipeline])

    @property
    def words(self) -> str:
        """The plan, and what the choice costs."""
        return plan_words(self.plan, self.choice.value)

    @property
    def _model(self) -> Transformer:
        return self._models[self.controls["model"].value]

    @property
    def _cluster(self) -> Cluster:
        return PRESETS[self.controls["cluster"].value](self.controls["count"].value)

    def _planned(self) -> Plan:
        return plan(self._model, self._cluster, self.controls["global_batch"].value)

    def _pictures(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return plan_picture(self.plan, chosen=self.choice.value), self._pipeline_picture()

    def _pipeline_picture(self) -> dict[str, Any]:
        if not self.plan:
            return words_picture("No pipeline", "nothing fits, so there is no layout to look into", "")
        chosen = self.plan[self.choice.value - 1]
        trace = timeline(self._model, chosen.layout, self._cluster, most_microbatches=MOST_DRAWN)
        label = f"Number {self.choice.value}: {layout_text(chosen)}"
        drawn, planned = int(trace.microbatch.max()) + 1, chosen.layout.num_microbatches
        if drawn < planned:
            label += f" · drawn with {drawn} of {planned:,} microbatches"
        return pipeline_picture(sides_of([trace], [label]), label)

    def _bind_choice(self) -> None:
        self.choice.max = max(1, min(len(self.plan), MOST_BARS))
        self.choice.disabled = not self.plan

    def _settings_changed(self, _: dict[str, Any]) -> None:
        try:
            self.plan = self._planned()
        except InvalidInputError as refusal:
            self.message.value = f'<span role="alert"><b>Not planned:</b> {html.escape(str(refusal))}</span>'
            return
        self.message.value = ""
        self._bind_choice()
        self.choice.value = 1
        self._redraw()

    def _choice_changed(self, _: dict[str, Any]) -> None:
        self._redraw()

    def _redraw(self) -> None:
        drawn, shown = self._pictures()
        redraw(self.picture, self._drawn, drawn)
        redraw(self.pipeline, self._shown, shown)
        self._drawn, self._shown = drawn, shown
        self.summary.value = preformatted(self.words)
        self._listen()

    def _listen(self) -> None:
        """Clicks on numbered points and on bars choose; points of others have no number."""
        for part in self.picture.data:
            if part.name == "first choices, numbered" or part.type == "bar":
                part.on_click(self._clicked)

    def _clicked(self, _: Any, points: Any, __: Any) -> None:
        if points.point_inds:
            self.choice.value = min(points.point_inds[0] + 1, self.choice.max)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and what shows where no kernel answers: the picture for Plotly's renderer, and the words."""
        return {
            **super()._repr_mimebundle_(**kwargs),
            "text/plain": self.words,
            "text/html": preformatted(self.words),
            PLOTLY_MIME_TYPE: json_of(self._drawn),
        }


def _slider(label: str, options: list[int], value: int) -> ipywidgets.SelectionSlider:
    return ipywidgets.SelectionSlider(options=options, value=value, description=label, style=_STYLE, layout=_LAYOUT)


def _menu(label: str, options: list[str], value: str) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(options=options, value=value, description=label, style=_STYLE, layout=_LAYOUT)
