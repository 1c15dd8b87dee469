"""What if: controls, and below them what a function says and draws for their values."""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import ipywidgets
import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.figures.redraw import json_of, redraw, widget_of
from vizkit.sizes import is_number
from vizkit.widgets.player import PLOTLY_MIME_TYPE
from vizkit.widgets.words import preformatted

_PARTS = 2
"""Of an answer that is a figure with words."""
STYLE, LAYOUT = {"description_width": "11em"}, {"width": "27em"}


class HasFigure(Protocol):
    """A `plotly.graph_objects.Figure`."""

    def to_plotly_json(self) -> dict[str, Any]: ...


Answer = str | HasFigure | tuple[HasFigure, str]


def explorer(draw: Callable[..., Answer], /, **controls: Any) -> Explorer:
    """Controls for the arguments of `draw`, and what it returns for them: a text, a figure, or both.

    Each control is what `ipywidgets.interact` takes: a number, (least, most) or (least, most, step), a list of choices
    (numbers become a slider), a bool, or a widget of your own; it begins at the argument's default, if there is one.
    `draw` is called with their values at each change; an `InvalidInputError` that it raises shows as a message, and
    what was shown before stays.
    Needs a kernel to answer; a saved notebook has the first answer. Raises `InvalidInputError` without controls, for
    one that interact does not take, where they are not the arguments of `draw`, where `draw` refuses the values to
    begin with or returns something else.

    >>> view = explorer(lambda ranks, bucket: f"{ranks} ranks, {bucket} MB", ranks=(1, 8), bucket=[1, 25])
    >>> view.controls["bucket"].value = 25
    >>> view.words
    '4 ranks, 25 MB'
    """
    if not controls:
        raise InvalidInputError.because(
            "controls", controls, "an explorer needs something to move", "give explorer(draw, ranks=(1, 8))"
        )
    if not callable(draw):
        raise InvalidInputError.because("draw", draw, "must be a function", "give def draw(ranks): return …")
    parameters = _parameters(draw, controls)
    defaults = {name: parameters[name].default if name in parameters else inspect.Parameter.empty for name in controls}
    return Explorer(draw, {name: _control(name, given, defaults[name]) for name, given in controls.items()})


class Explorer(ipywidgets.VBox):
    """`controls` by name, `picture` (None where nothing is drawn), `summary` and `message` are its parts."""

    def __init__(self, draw: Callable[..., Answer], controls: Mapping[str, ipywidgets.Widget]) -> None:
        self.controls = dict(controls)
        self._draw = draw
        self._drawn, self.words = self._answer()
        self.picture = widget_of(self._drawn) if self._drawn else None
        self.summary = ipywidgets.HTML(preformatted(self.words))
        self.message = ipywidgets.HTML("")
        for control in self.controls.values():
            control.observe(self._changed, "value")
        box = ipywidgets.Box(list(self.controls.values()), layout={"flex_flow": "row wrap"})
        super().__init__([box, self.message, self.summary, *([self.picture] if self.picture else [])])

    def _answer(self) -> tuple[dict[str, Any], str]:
        answer = self._draw(**{name: control.value for name, control in self.controls.items()})
        figure: Any = answer
        words: Any = ""
        if isinstance(answer, tuple) and len(answer) == _PARTS:
            figure, words = answer
        if isinstance(figure, str):
            return {}, figure
        if not hasattr(figure, "to_plotly_json") or not isinstance(words, str):
            raise InvalidInputError.because(
                "draw", type(answer).__name__, "returns no text, figure or (figure, text)", "return a text"
            )
        picture = figure.to_plotly_json()
        return {"data": picture["data"], "layout": picture["layout"]}, words

    def _changed(self, _: dict[str, Any]) -> None:
        try:
            drawn, self.words = self._answer()
        except InvalidInputError as refusal:
            self.message.value = f'<span role="alert"><b>Not drawn:</b> {html.escape(str(refusal))}</span>'
            return
        self.message.value = ""
        self.summary.value = preformatted(self.words)
        if self.picture is not None:
            redraw(self.picture, self._drawn, drawn)
            self._drawn = drawn

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and what shows where no kernel answers: the words, and the picture for Plotly's renderer."""
        shown = {
            **super()._repr_mimebundle_(**kwargs),
            "text/plain": self.words,
            "text/html": preformatted(self.words),
        }
        return {**shown, PLOTLY_MIME_TYPE: json_of(self._drawn)} if self._drawn else shown


def _parameters(draw: Callable[..., Answer], controls: Mapping[str, Any]) -> Mapping[str, inspect.Parameter]:
    signature = inspect.signature(draw)
    try:
        signature.bind(**controls)
    except TypeError as mismatch:
        raise InvalidInputError.because(
            "controls",
            ", ".join(controls),
            f"do not fit draw{signature}: {mismatch}",
            "name each argument of draw once",
        ) from None
    return signature.parameters


def _control(name: str, given: Any, default: Any) -> ipywidgets.Widget:
    if isinstance(given, np.generic):
        given = given.item()
    control = given if isinstance(given, ipywidgets.Widget) else None
    if control is None and not isinstance(given, bytes):
        try:
            control = ipywidgets.interactive.widget_from_abbrev(given, default)
        except (TypeError, ValueError, ArithmeticError):  # such as (8, 1), whose least is its most
            control = None
    if control is None or not hasattr(control, "value") or getattr(control, "options", True) == ():
        raise InvalidInputError.because(
            name, given, "is no control", "use (least, most), (least, most, step), a list, a number or a widget"
        )
    if control is not given and isinstance(control, ipywidgets.Dropdown) and all(map(is_number, control.options)):
        control = ipywidgets.SelectionSlider(options=control.options, value=control.value)  # the arrows reach it
    control.description = control.description or name.replace("_", " ")
    control.style, control.layout = STYLE, LAYOUT
    return control
