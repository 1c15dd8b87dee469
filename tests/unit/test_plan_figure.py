"""The picture of a plan, and the explorer that plans anew at each move."""

from __future__ import annotations

import ipywidgets
import numpy as np
import pytest

import vizkit as vk
from vizkit.figures.plan import MOST_BARS, PARTS, parts_of, plan_figure
from vizkit.figures.theme import CLEAR

GPT = vk.Transformer(num_layers=24, hidden=2304, heads=24, vocab=51200, seq=2048)
PLAN = vk.plan(GPT, vk.hardware.dgx_a100(num_nodes=2), 64)
TOO_LARGE = vk.plan(GPT, vk.hardware.laptop(num_processes=2), 8)


def parts(name: str, fig=None):
    return next(trace for trace in (fig or plan_figure(PLAN)).data if trace.name == name)


def test_each_point_is_a_layout():
    """Memory and step time of the points are those of the plan's layouts; the front and the choices lie among them."""
    cloud, front, choices = (
        parts(name) for name in ("layouts that fit", "no other is smaller and faster", "first choices, numbered")
    )
    assert len(cloud.x) == len(PLAN.points)
    assert list(front.x) == sorted(front.x)
    assert list(front.y) == sorted(front.y, reverse=True)
    assert list(choices.customdata) == [choice.rank for choice in PLAN[:MOST_BARS]]
    assert choices.y[0] == PLAN.best.prediction.step_s == min(front.y)


def test_bars_add_up_to_the_step():
    """The parts of a bar are the step: compute, exposed communication by axis, bubble, optimizer."""
    bars = [trace for trace in plan_figure(PLAN).data if trace.type == "bar"]
    assert {bar.name for bar in bars} <= set(PARTS)
    steps = [choice.prediction.step_s for choice in PLAN[:MOST_BARS]]
    assert np.sum([bar.x for bar in bars], axis=0) == pytest.approx(steps)


def test_parts_have_a_look_of_their_own():
    """No two parts share colour and hatching."""
    assert len(set(PARTS.values())) == len(PARTS)
    assert set(parts_of(PLAN.best)) <= set(PARTS)


def test_the_summary_says_the_plan_and_the_choice():
    """What the figure shows is in its words, with the clock."""
    assert vk.describe(plan_figure(PLAN)) == str(PLAN)
    words = vk.describe(plan_figure(PLAN, chosen=2))
    assert "times are ideal" in words
    assert "\n\nNumber 2: " in words
    assert "of 77.3 GB a device" in words


def test_a_plan_in_which_nothing_fits():
    """No empty axes, whose numbers would mean nothing: the figure and its summary say what would help."""
    fig = plan_figure(TOO_LARGE)
    assert not TOO_LARGE
    assert not fig.layout.xaxis.visible
    assert not fig.layout.yaxis.visible
    assert fig.layout.annotations[0].text == "Nothing fits. The summary says what would make it fit."
    assert "0 fit" in vk.describe(fig)


@pytest.fixture
def view() -> vk.widgets.PlanExplorer:
    return vk.widgets.planner(GPT, count=2, global_batch=64)


def test_the_explorer_begins_with_the_plan_of_its_controls(view):
    """Same model, cluster and batch, same plan."""
    assert [choice.layout for choice in view.plan] == [choice.layout for choice in PLAN]
    assert view.words == str(PLAN)


def test_a_control_plans_anew(view):
    """More nodes, a shorter step; the choice goes back to the first."""
    before = view.plan.best.prediction.step_s
    view.choice.value = 3
    view.controls["count"].value = 4
    assert view.plan.best.prediction.step_s < before
    assert view.choice.value == 1


def test_the_slider_and_a_click_choose_alike(view):
    """The keyboard reaches what the mouse does: the pipeline of the chosen layout, and its cost in words."""
    view.choice.value = 2
    by_keyboard = view.words, view.pipeline.layout.title.text
    view.choice.value = 1
    choices = next(trace for trace in view.picture.data if trace.name == "first choices, numbered")
    view._clicked(choices, type("Points", (), {"point_inds": [1]}), None)
    assert (view.words, view.pipeline.layout.title.text) == by_keyboard
    assert view.pipeline.layout.title.text.startswith("Number 2: ")


def test_a_pipeline_drawn_shorter_than_planned_says_so(view):
    """Its time and its bubble are those of fewer microbatches than the step has; a whole step needs no such word."""
    place, piped = next((at, choice) for at, choice in enumerate(view.plan[:MOST_BARS], 1) if choice.layout.pp == 2)
    assert piped.layout.num_microbatches == 8
    view.choice.value = place
    assert "microbatches" not in view.pipeline.layout.title.text
    view.controls["global_batch"].value = 1024
    longer = next(at for at, choice in enumerate(view.plan[:MOST_BARS], 1) if choice.layout.num_microbatches == 32)
    view.choice.value = longer
    assert view.pipeline.layout.title.text.endswith(" · drawn with 8 of 32 microbatches")


def test_a_cluster_too_small_empties_the_picture_and_recovers(view):
    """Nothing fits: the slider is off, the words say why; the way back is open."""
    view.controls["cluster"].value = "Laptop"
    assert len(view.picture.data) == len(view.pipeline.data) == 0
    assert view.choice.disabled
    assert "0 fit" in view.summary.value
    assert view.pipeline.layout.title.text == "No pipeline"
    assert view.picture.layout.paper_bgcolor == view.pipeline.layout.paper_bgcolor == CLEAR, "also on a dark page"
    view.controls["cluster"].value = "DGX A100"
    assert len(view.picture.data) > 4
    assert not view.choice.disabled


def test_without_a_kernel_the_picture_stays(view):
    """A saved notebook has the figure and the words."""
    shown = view._repr_mimebundle_()
    assert shown["text/plain"] == view.words
    assert shown["application/vnd.plotly.v1+json"]["data"]
    assert isinstance(view, ipywidgets.VBox)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"cluster": "Frontier"}, "cluster='Frontier': its control has DGX A100, "),
        ({"count": 3}, "count=3: its control has 1, 2, 4, 8, 16, 32, 64, 128, 256, 384; use vizkit.plan for others"),
        ({"global_batch": 0}, "global_batch=0: its control has 1, 2, 4"),
    ],
)
def test_what_is_not_on_a_control_is_refused(given, message):
    """Value, rule and remedy."""
    with pytest.raises(vk.InvalidInputError) as refused:
        vk.widgets.planner(**given)
    assert message in str(refused.value)
