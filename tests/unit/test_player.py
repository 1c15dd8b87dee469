"""The widget that plays a figure where a kernel runs, and what it leaves where none does."""

from __future__ import annotations

import json

import ipywidgets
import numpy as np
import plotly.graph_objects as go
import pytest

import vizkit as vk
from vizkit.figures.interactive import zoomable_timeline
from vizkit.trace import Span, Trace
from vizkit.widgets import player

MS = 1_000_000
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"


def trace() -> Trace:
    return Trace.from_spans([Span(0, "F", 0, 3 * MS), Span(1, "B", MS, 4 * MS)], clock="ideal")


def many_spans(count: int) -> Trace:
    start = np.arange(count) // 4 * 10
    rank = np.arange(count) % 4
    return Trace.from_columns(clock="ideal", rank=rank, start_ns=start, end_ns=start + 10, kind=start % 3)


def buttons(view: ipywidgets.Widget) -> dict[str, ipywidgets.Button]:
    return {part.description: part for part in view.children[0].children if isinstance(part, ipywidgets.Button)}


def test_slider_moves_the_veil_and_the_cursor():
    view = player(vk.timeline(trace(), max_frames=5))
    view.slider.value = 1
    veil, cursor = view.picture.layout.shapes
    assert (veil.x0, veil.x1, cursor.x0, cursor.x1) == (1, 4, 1, 1)
    assert view.moment.value == "1 ms · 0 B moved"


def test_play_and_slider_are_one():
    view = player(trace())
    view.play.value = 7
    assert view.slider.value == 7


def test_buttons_step_and_stop_at_the_ends():
    view = player(vk.timeline(trace(), max_frames=3))
    step = buttons(view)
    assert view.slider.value == 2
    step["Forward"].click()
    assert view.slider.value == 2
    for expected in (1, 0, 0):
        step["Back"].click()
        assert view.slider.value == expected


@pytest.mark.parametrize(
    "draw",
    [
        lambda: vk.collective_steps("all_reduce"),
        lambda: vk.traffic_map(trace()),
        lambda: vk.compare(trace(), trace()),
    ],
    ids=["steps", "traffic", "compare"],
)
def test_every_figure_plays(draw):
    """Each frame of each kind of figure can be shown, and the picture then has the frame's own data."""
    fig = draw()
    view = player(fig)
    for i in (0, len(fig.frames) - 1, 1):
        view.slider.value = i
        for position, change in zip(fig.frames[i].traces or (), fig.frames[i].data, strict=True):
            shown = view.picture.data[position].to_plotly_json()
            for name in {"x", "y", "z", "text", "customdata"} & set(change.to_plotly_json()):
                assert np.array_equal(np.asarray(shown[name]), np.asarray(change[name])), name


def test_picture_has_no_frames_and_none_of_plotlys_controls():
    """`FigureWidget` refuses frames (plotly/plotly.py#4839); its buttons could do nothing."""
    view = player(trace())
    assert isinstance(view.picture, go.FigureWidget)
    assert not view.picture.frames
    assert (view.picture.layout.sliders, view.picture.layout.updatemenus) == ((), ())


def test_the_browser_gets_the_picture_whole(monkeypatch: pytest.MonkeyPatch):
    """Plotly's widget announces itself empty, and what comes later may come too late: a blank picture. Not here."""
    announced = []
    create = ipywidgets.widgets.widget.comm.create_comm

    def spy(**message):
        announced.append(message["data"]["state"])
        return create(**message)

    monkeypatch.setattr(ipywidgets.widgets.widget.comm, "create_comm", spy)
    fig = vk.timeline(trace())
    view = player(fig)
    (picture,) = (state for state in announced if "_widget_data" in state)
    assert len(picture["_widget_data"]) == len(fig.data) > 0
    assert picture["_widget_layout"]["title"]["text"] == fig.layout.title.text
    assert "Plotly" in picture["_plotly_js"]
    assert view.picture.model_id


def test_a_picture_of_nothing_is_announced_too():
    """The widget waits until it is filled, which a figure without data never is in Plotly's sense."""
    assert player(go.Figure()).picture.model_id


def test_summary_is_below():
    view = player(trace())
    assert view.children[-1] is view.summary
    assert "2 ranks, 2 spans" in view.summary.value


def test_a_figure_without_frames_has_no_controls():
    view = player(Trace.from_spans([], clock="ideal"))
    assert view.children == (view.picture, view.summary)


def test_a_saved_notebook_has_the_picture_and_the_words():
    """Beside the widget's reference: the static figure for Plotly's renderer, the summary as text; all of it small."""
    fig = vk.timeline(trace())
    bundle = player(fig)._repr_mimebundle_()
    assert set(bundle) == {WIDGET, PLOTLY, "text/plain", "text/html"}
    assert bundle["text/plain"] == vk.describe(fig)
    assert bundle[PLOTLY] == json.loads(fig.to_json())
    assert len(str(bundle)) < 100_000


def test_zoom_draws_the_visible_part_in_more_detail():
    """60,000 spans are a heat map; a thousandth of them are bars, each with its hover; and back again."""
    whole = many_spans(60_000)
    widget = zoomable_timeline(whole)
    kinds = lambda: [drawn.type for drawn in widget.data if drawn.yaxis == "y" and drawn.name != "idle"]  # noqa: E731
    assert kinds()[0] == "heatmap"
    full = widget.layout.xaxis.range
    widget.layout.xaxis.range = (10, 10.1)
    assert set(kinds()) == {"bar"}
    assert all(len(bar.hovertext) == len(bar.x) for bar in widget.data if bar.type == "bar")
    assert [drawn.name for drawn in widget.data if drawn.yaxis in ("y2", "y3")] == ["utilisation", "bytes so far"]
    widget.layout.xaxis.range = full
    assert kinds()[0] == "heatmap"


def test_zoom_leaves_a_small_trace_alone():
    widget = zoomable_timeline(trace())
    before = widget.data
    widget.layout.xaxis.range = (1, 2)
    assert widget.data == before
