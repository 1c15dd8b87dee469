"""Two pipeline schedules side by side, simulated anew at each move of a slider."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ipywidgets

from vizkit.errors import InvalidInputError
from vizkit.figures.explorer import ExplorerSettings, explore, explorer_words
from vizkit.figures.explorer_page import explorer_page
from vizkit.figures.pipeline import picture
from vizkit.figures.redraw import json_of, redraw, widget_of
from vizkit.schedules.catalogue import recipe, schedule_names
from vizkit.widgets.player import PLOTLY_MIME_TYPE
from vizkit.widgets.words import preformatted

NO_SCHEDULE = "none"
_SLIDERS: Mapping[str, tuple[str, float, float, float]] = {
    "num_ranks": ("ranks", 1, 16, 1),
    "stages_per_rank": ("stages per rank", 1, 4, 1),
    "num_microbatches": ("microbatches", 1, 64, 1),
    "forward_ms": ("F (ms)", 0.25, 4, 0.25),
    "input_ms": ("I (ms)", 0.25, 4, 0.25),
    "weight_ms": ("W (ms)", 0.0, 4, 0.25),
    "transfer_ms": ("transfer (ms)", 0.0, 2, 0.05),
}
"""Label, least, most and step of each setting that is a number; whole numbers where the step is one."""


def pipeline_explorer(**settings: Any) -> PipelineExplorer:
    """Sliders and menus for one pipeline schedule or two, drawn one above the other on one time axis.

    `settings` are where the controls begin, by the names of `ExplorerSettings`: `schedule`, `versus` (None for one
    schedule alone), `num_ranks`, `stages_per_rank` (for schedules that leave it open), `num_microbatches`, and
    `forward_ms`, `input_ms`, `weight_ms`, `transfer_ms`: milliseconds of F, I and W for one microbatch on all layers of
    a rank (B = I + W), and of a message between ranks. Sizes that a schedule does not have show its message and leave
    the picture as it was. Needs a kernel; `to_html` gives the same for chosen settings without one. Raises
    `InvalidInputError` for an unknown setting or schedule and for a number outside its slider.

    >>> explorer = pipeline_explorer(schedule="1F1B", versus=None, num_ranks=4)
    >>> explorer.controls["num_microbatches"].value = 16
    >>> explorer.words.split("; ")[:2]
    ['1F1B: makespan 57 ms', 'bubble 15.8% of the total time, 18.8% of the ideal time']
    """
    known = asdict(ExplorerSettings())
    for name, value in settings.items():
        if name not in known:
            raise InvalidInputError.because(name, value, "is not a setting of the explorer", f"use {', '.join(known)}")
    return PipelineExplorer(ExplorerSettings(**{**known, **settings}))


class PipelineExplorer(ipywidgets.VBox):
    """The explorer; `controls` by setting, `picture`, `summary` and `message` are its parts."""

    def __init__(self, settings: ExplorerSettings) -> None:
        self.controls = _controls(settings)
        self.settings = settings
        sides = explore(settings)
        self.words = explorer_words(sides)
        self._drawn = picture(sides)
        self.picture = widget_of(self._drawn)
        self.summary = ipywidgets.HTML(preformatted(self.words))
        self.message = ipywidgets.HTML("")
        for control in self.controls.values():
            control.observe(self._settings_changed, "value")
        self._free_or_bind_stages()
        super().__init__([_laid_out(self.controls), self.message, self.summary, self.picture])

    def to_html(self, path: str | Path | None = None) -> str:
        """One page, offline and without a kernel, for a grid of precomputed settings; also written to `path`."""
        page = explorer_page(self.settings)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _free_or_bind_stages(self) -> None:
        """The slider of stages per rank is off where neither schedule leaves them open."""
        names = {self.controls[name].value for name in ("schedule", "versus")} - {NO_SCHEDULE}
        self.controls["stages_per_rank"].disabled = all(recipe(name).fixed_stages for name in names)

    def _settings_changed(self, _: dict[str, Any]) -> None:
        values = {name: control.value for name, control in self.controls.items()}
        values["versus"] = None if values["versus"] == NO_SCHEDULE else values["versus"]
        settings = ExplorerSettings(**values)
        self._free_or_bind_stages()
        try:
            sides = explore(settings)
        except InvalidInputError as refusal:
            self.message.value = f'<span role="alert"><b>Not drawn:</b> {html.escape(str(refusal))}</span>'
            return
        self.message.value = ""
        self.settings = settings
        self.words = explorer_words(sides)
        self.summary.value = preformatted(self.words)
        drawn = picture(sides)
        redraw(self.picture, self._drawn, drawn)
        self._drawn = drawn

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and what shows where no kernel answers: the picture for Plotly's renderer, and the words."""
        return {
            **super()._repr_mimebundle_(**kwargs),
            "text/plain": self.words,
            "text/html": preformatted(self.words),
            PLOTLY_MIME_TYPE: json_of(self._drawn),
        }


def _controls(settings: ExplorerSettings) -> dict[str, ipywidgets.Widget]:
    """One for each setting, by its name."""
    style, layout = {"description_width": "9em"}, {"width": "24em"}
    names, start = schedule_names(), asdict(settings)
    chosen = recipe(settings.schedule).name
    versus = recipe(settings.versus).name if settings.versus else NO_SCHEDULE
    controls: dict[str, ipywidgets.Widget] = {
        "schedule": ipywidgets.Dropdown(
            options=names, value=chosen, description="schedule", style=style, layout=layout
        ),
        "versus": ipywidgets.Dropdown(
            options=[NO_SCHEDULE, *names], value=versus, description="against", style=style, layout=layout
        ),
    }
    for name, (label, least, most, step) in _SLIDERS.items():
        value = start[name]
        if not least <= value <= most:
            raise InvalidInputError.because(
                name, value, f"its slider goes from {least} to {most}", "use vizkit.simulate for other sizes"
            )
        slider = ipywidgets.IntSlider if step == 1 else ipywidgets.FloatSlider
        controls[name] = slider(
            value=value, min=least, max=most, step=step, description=label, style=style, layout=layout
        )
    return controls


def _laid_out(controls: dict[str, ipywidgets.Widget]) -> ipywidgets.Widget:
    """Side by side where the page is wide, below each other where it is not."""
    return ipywidgets.Box(list(controls.values()), layout={"flex_flow": "row wrap"})
