"""The explorer: controls as in `interact`, an answer in words or a picture, refusals that lose nothing."""

from __future__ import annotations

import ipywidgets
import numpy as np
import plotly.graph_objects as go
import pytest

import vizkit as vk


def bars(count: int, height: float = 1.0) -> tuple[go.Figure, str]:
    if count == 3:
        raise vk.InvalidInputError.because("count", count, "must be even", "use count=2 or count=4")
    return go.Figure(go.Bar(y=[height] * count)), f"{count} bars"


def test_a_move_changes_words_and_picture() -> None:
    """One widget, changed in place."""
    view = vk.widgets.explorer(bars, count=[2, 4], height=(0.5, 2.0))
    picture = view.picture
    view.controls["count"].value = 4
    assert view.words == "4 bars"
    assert "4 bars" in view.summary.value
    assert view.picture is picture
    assert len(picture.data[0].y) == 4
    view.controls["height"].value = 2.0
    assert list(picture.data[0].y) == [2.0] * 4


def test_a_refusal_keeps_what_was_shown() -> None:
    """The message says the rule and the remedy; the next right value takes it away."""
    view = vk.widgets.explorer(bars, count=[2, 3, 4])
    view.controls["count"].value = 3
    assert "count=3: must be even; use count=2 or count=4" in view.message.value
    assert (view.words, len(view.picture.data[0].y)) == ("2 bars", 2)
    view.controls["count"].value = 4
    assert view.message.value == ""


def test_pictures_may_change_their_traces() -> None:
    """Other traces, other axes: drawn anew."""

    def lines(count: int) -> go.Figure:
        return go.Figure([go.Scatter(x=[0, 1], y=[0, i], name=str(i)) for i in range(count)])

    view = vk.widgets.explorer(lines, count=(1, 5))
    view.controls["count"].value = 5
    assert [trace.name for trace in view.picture.data] == list("01234")


def test_words_alone_need_no_picture() -> None:
    """And what is no markup is not read as such."""
    view = vk.widgets.explorer(lambda n: f"<b>{n}</b>", n=(0, 4))
    assert view.picture is None
    assert "&lt;b&gt;2&lt;/b&gt;" in view.summary.value
    assert "application/vnd.plotly.v1+json" not in view._repr_mimebundle_()


def test_a_saved_notebook_has_the_first_answer() -> None:
    """Words as text and as HTML, the picture for Plotly's renderer."""
    bundle = vk.widgets.explorer(bars, count=[2, 4])._repr_mimebundle_()
    assert bundle["text/plain"] == "2 bars"
    assert bundle["application/vnd.plotly.v1+json"]["data"][0]["type"] == "bar"


def test_lists_of_numbers_are_sliders() -> None:
    """JupyterLab takes a menu's arrow keys for its own; a slider's it leaves alone."""
    view = vk.widgets.explorer(lambda n=4, kind="ring": f"{n} {kind}", n=[1, 2, 4], kind=["tree", "ring"])
    assert [type(control).__name__ for control in view.controls.values()] == ["SelectionSlider", "Dropdown"]
    assert view.words == "4 ring"


def test_defaults_are_where_controls_begin() -> None:
    """As in `interact`."""
    view = vk.widgets.explorer(lambda n=7, kind="ring": f"{n} {kind}", n=(1, 9), kind=["tree", "ring"])
    assert view.words == "7 ring"


def test_widgets_of_ones_own_keep_their_labels() -> None:
    """Where a widget has no label it gets the argument's name."""
    slider = ipywidgets.FloatLogSlider(value=10, min=-1, max=3, description="Gbit/s")
    view = vk.widgets.explorer(lambda gbit_per_s, num_ranks: "", gbit_per_s=slider, num_ranks=(1, 4))
    assert [control.description for control in view.controls.values()] == ["Gbit/s", "num ranks"]


@pytest.mark.parametrize(
    ("controls", "message"),
    [
        ({}, "controls={}: an explorer needs something to move; give explorer(draw, ranks=(1, 8))"),
        ({"n": object}, "n=<class 'object'>: is no control; use (least, most), (least, most, step), a list, a number"),
        ({"n": (8, 1)}, "n=(8, 1): is no control; use (least, most), (least, most, step), a list, a number"),
        ({"n": []}, "n=[]: is no control; use (least, most), (least, most, step), a list, a number"),
        ({"n": [3]}, "n=3: stands first"),
        (
            {"n": [3], "m": 2},
            "controls='n, m': do not fit draw(n: 'int' = 3) -> 'str': got an unexpected keyword argument 'm'; "
            "name each argument of draw once",
        ),
    ],
)
def test_what_cannot_be_moved_is_refused(controls: dict[str, object], message: str) -> None:
    """The value, the rule, the remedy."""

    def draw(n: int = 3) -> str:
        raise vk.InvalidInputError("n=3: stands first")

    with pytest.raises(vk.InvalidInputError) as refusal:
        vk.widgets.explorer(draw, **controls)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        ("text", "draw='text': must be a function; give def draw(ranks): return …"),
        (lambda n: None, "draw='NoneType': returns no text, figure or (figure, text); return a text"),
        (lambda n: (go.Figure(),), "draw='tuple': returns no text, figure or (figure, text); return a text"),
        (lambda n: (go.Figure(), 5), "draw='tuple': returns no text, figure or (figure, text); return a text"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: object, message: str) -> None:
    """What a function should have returned is said in its place, not by what happens to break next."""
    with pytest.raises(vk.InvalidInputError) as refusal:
        vk.widgets.explorer(draw, n=(1, 4))
    assert str(refusal.value) == message


def test_numbers_of_numpy_are_controls() -> None:
    """A size that came out of a computation moves as Python's does."""
    assert vk.widgets.explorer(lambda n: f"{n}", n=np.uint8(2)).words == "2"
