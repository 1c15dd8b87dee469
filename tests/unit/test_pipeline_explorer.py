"""The pipeline explorer: controls change picture and words, refusals change neither, the page holds the simulator."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import ipywidgets
import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.basedatatypes import Undefined

import vizkit as vk
from tests.unit.test_figures_page import LOADING, Page
from vizkit import metrics
from vizkit.errors import InvalidInputError
from vizkit.figures import explorer_page as page_module
from vizkit.figures.explorer import ExplorerSettings, explore, explorer_figure, explorer_json, explorer_words
from vizkit.figures.explorer_page import explorer_page
from vizkit.figures.redraw import redraw
from vizkit.widgets import pipeline_explorer

MS = 1_000_000
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"


def content(fig: go.Figure | go.FigureWidget) -> str:
    """All that a figure draws, without the identifiers of its traces."""
    whole = json.loads(go.Figure(fig).to_json())
    for trace in whole["data"]:
        trace.pop("uid", None)
    return json.dumps(whole, sort_keys=True)


def as_lists(part: object) -> object:
    """The same with every array of numbers, Plotly's typed arrays too, as a list; a gap is None."""
    if isinstance(part, dict) and "bdata" in part:
        shape = [int(length) for length in part.get("shape", "-1").split(", ")]
        return as_lists(np.frombuffer(base64.b64decode(part["bdata"]), part["dtype"]).reshape(shape))
    if isinstance(part, np.ndarray):
        return np.where(np.isnan(part), None, part).tolist()
    if isinstance(part, dict):
        return {key: as_lists(value) for key, value in part.items()}
    return [as_lists(value) for value in part] if isinstance(part, (list, tuple)) else part


class TestExplore:
    def test_tells_makespan_both_bubbles_and_peak(self):
        """1F1B with p = 4, m = 8, F = I = W = 1 ms: (m + p − 1)(F + I + W), 3/11, 3/8, and p microbatches in flight."""
        (side,) = explore(ExplorerSettings(versus=None))
        assert explorer_words([side]) == (
            "1F1B: makespan 33 ms; bubble 27.3% of the total time, 37.5% of the ideal time; "
            "peak activations 4 microbatches of one rank's layers, on rank 0"
        )

    @pytest.mark.parametrize("name", vk.schedule_names())
    def test_every_schedule_does_the_same_work(self, name: str):
        """F, I and W are those of a rank's layers: however many stages share them, a rank computes m (F + I + W)."""
        (side,) = explore(ExplorerSettings(name, None, forward_ms=1, input_ms=1.5, weight_ms=0.5))
        passes = 1.0 if name == "ForwardOnly" else 3.0
        assert metrics.breakdown(side.trace).compute.mean() == 8 * passes * MS

    def test_transfer_is_paid_on_edges_between_ranks(self):
        """GPipe's critical path has 2 (p − 1) hops."""
        free, linked = (
            explore(ExplorerSettings("GPipe", None, transfer_ms=ms))[0].trace.duration_ns for ms in (0, 0.25)
        )
        assert linked - free == 2 * 3 * 0.25 * MS

    @pytest.mark.parametrize("field", ["schedule", "versus"])
    def test_sizes_that_a_schedule_does_not_have_are_its_own_message(self, field: str):
        with pytest.raises(InvalidInputError, match="DualPipe"):
            explore(replace(ExplorerSettings(num_ranks=3), **{field: "DualPipe"}))

    def test_json_is_the_figure(self):
        """Typed arrays come back as the numbers that went in."""
        settings = ExplorerSettings(transfer_ms=0.25)
        assert as_lists(json.loads(explorer_json(settings))) == as_lists(explorer_figure(settings))


class TestWidget:
    def test_has_a_control_for_each_setting(self):
        explorer = pipeline_explorer()
        assert list(explorer.controls) == list(ExplorerSettings.__dataclass_fields__)
        assert all(control.description for control in explorer.controls.values())

    def test_a_slider_changes_picture_and_words(self):
        explorer = pipeline_explorer(versus=None)
        explorer.controls["num_microbatches"].value = 16
        assert explorer.words.startswith("1F1B: makespan 57 ms; bubble 15.8% of the total time")
        assert "makespan 57 ms" in explorer.summary.value
        assert explorer.picture.layout.title.text == "1F1B: 4 ranks, 16 microbatches"
        assert explorer.picture.layout.xaxis.range == (0, 57)

    def test_whatever_changes_the_picture_is_as_if_drawn_anew(self):
        """In place or not: after each step the widget shows what a fresh figure of the same settings shows."""
        explorer = pipeline_explorer()
        steps = [
            ("num_microbatches", 12),
            ("transfer_ms", 0.2),
            ("schedule", "GPipe"),
            ("versus", "none"),
            ("num_ranks", 2),
            ("versus", "DualPipeV"),
            ("weight_ms", 0.0),
            ("transfer_ms", 0.0),
            ("schedule", "Interleaved1F1B"),
            ("stages_per_rank", 3),
            ("num_microbatches", 64),
            ("num_ranks", 8),
        ]
        for name, value in steps:
            explorer.controls[name].value = value
            assert explorer.message.value == ""
            assert content(explorer.picture) == content(go.Figure(explorer_figure(explorer.settings))), (name, value)

    def test_a_change_of_numbers_keeps_the_traces(self):
        """They are updated in place: the browser keeps its elements, and nothing flickers."""
        explorer = pipeline_explorer()
        before = [trace.uid for trace in explorer.picture.data]
        explorer.controls["forward_ms"].value = 2
        assert [trace.uid for trace in explorer.picture.data] == before

    def test_no_more_is_sent_than_what_differs(self):
        settings = ExplorerSettings()
        before, after = explorer_figure(settings), explorer_figure(replace(settings, num_microbatches=9))
        widget = go.FigureWidget(before)
        changed = []
        widget._send_update_msg = lambda restyle_data, relayout_data, **_: changed.append((restyle_data, relayout_data))
        redraw(widget, before, after)
        restyled = {name for styles, _ in changed for name in styles}
        relaid = {name.split(".")[0] for _, layout in changed for name in layout}
        assert not {"type", "orientation", "name", "hovertemplate"} & restyled
        assert not {"margin", "legend", "yaxis"} & relaid

    def test_a_property_goes_only_to_traces_that_change_it(self):
        """Plotly's widget drops a property, in the page, from traces of a message in which only others change it."""
        before = {"data": [{"type": "bar", "name": name, "x": [1], "y": [2]} for name in "ab"], "layout": {}}
        after = {"data": [{**before["data"][0], "x": [3]}, {**before["data"][1], "x": [3], "y": [4]}], "layout": {}}
        widget = go.FigureWidget(before)
        sent = []
        widget._send_update_msg = lambda restyle_data, relayout_data, trace_indexes=None, **_: sent.append(restyle_data)
        redraw(widget, before, after)
        assert [trace.y for trace in widget.data] == [(2,), (4,)]
        assert not any(value is Undefined for styles in sent for values in styles.values() for value in values)

    def test_a_refusal_keeps_the_last_picture_and_says_the_nearest_sizes(self):
        """DualPipe needs an even number of microbatches, at least twice the ranks."""
        explorer = pipeline_explorer(schedule="1F1B", versus="DualPipe")
        before, words = content(explorer.picture), explorer.words
        explorer.controls["num_microbatches"].value = 9
        assert re.search(r"num_microbatches=9: DualPipe .*; use num_microbatches=8 or 10", explorer.message.value)
        assert (content(explorer.picture), explorer.words) == (before, words)
        explorer.controls["num_microbatches"].value = 10
        assert explorer.message.value == ""
        assert explorer.words != words

    def test_stages_can_be_chosen_where_a_schedule_leaves_them_open(self):
        explorer = pipeline_explorer(schedule="1F1B", versus="ZBVZeroBubble")
        assert explorer.controls["stages_per_rank"].disabled
        explorer.controls["versus"].value = "Interleaved1F1B"
        assert not explorer.controls["stages_per_rank"].disabled

    def test_names_in_any_case(self):
        explorer = pipeline_explorer(schedule="gpipe", versus="zbvzerobubble")
        assert (explorer.controls["schedule"].value, explorer.controls["versus"].value) == ("GPipe", "ZBVZeroBubble")

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"num_ranks": 99}, "num_ranks=99: its slider goes from 1 to 16; use vizkit.simulate for other sizes"),
            ({"forward_ms": 0}, "forward_ms=0: its slider goes from 0.25 to 4; use vizkit.simulate for other sizes"),
            ({"schedule": "1F2B"}, "name='1F2B': is not a schedule that vizkit knows; did you mean 1F1B? use one of "),
            ({"ranks": 4}, "ranks=4: is not a setting of the explorer; use schedule, versus, num_ranks, "),
        ],
    )
    def test_refuses_what_it_has_no_control_for(self, settings: dict, message: str):
        with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}"):
            pipeline_explorer(**settings)

    def test_leaves_picture_and_words_where_no_kernel_answers(self):
        explorer = pipeline_explorer()
        bundle = explorer._repr_mimebundle_()
        assert bundle["text/plain"] == explorer.words
        assert WIDGET in bundle
        assert content(go.Figure(bundle[PLOTLY])) == content(explorer.picture)

    def test_sliders_take_the_keyboard(self):
        """ipywidgets' own controls, none made of HTML."""
        kinds = {type(control) for control in pipeline_explorer().controls.values()}
        assert kinds == {ipywidgets.Dropdown, ipywidgets.IntSlider, ipywidgets.FloatSlider}


@pytest.fixture(scope="module")
def small_grid():
    """The page with a grid of few points, which takes less time to compute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module, "RANKS", (2, 4))
        patch.setattr(page_module, "MICROBATCHES", (4, 8))
        yield explorer_page(ExplorerSettings("GPipe", None, num_ranks=5, num_microbatches=4))


class TestPage:
    def test_nothing_is_loaded_from_anywhere(self, small_grid: str):
        page = Page(small_grid)
        assert [(tag, set(attrs) & LOADING) for tag, attrs in page.elements if set(attrs) & LOADING] == []

    def test_controls_are_native_and_labelled(self, small_grid: str):
        """Menus and range inputs, each inside its label; refusals and words are announced."""
        page = Page(small_grid)
        assert [select["name"] for select in page.of("select")] == ["schedule", "versus", "ratio", "transfer", "stages"]
        assert [(field["type"], field["name"]) for field in page.of("input")] == [
            ("range", "ranks"),
            ("range", "microbatches"),
        ]
        assert len(page.of("label")) == 7
        assert {element.get("role") for element in page.of("p") + page.of("pre")} >= {"alert", "status"}

    def test_begins_at_the_nearest_point_of_the_grid(self, small_grid: str):
        (data,) = Page(small_grid).data()
        assert data["start"] == {
            "schedule": "GPipe", "versus": "", "ranks": 4, "microbatches": 4, "stages": "2",
            "ratio": "1 : 1 : 1", "transfer": "0",
        }  # fmt: skip

    @pytest.mark.parametrize("name", vk.schedule_names())
    def test_holds_what_the_simulator_says(self, small_grid: str, name: str):
        """The starts of every action, in ticks, for one ratio with transfer; or the schedule's own refusal."""
        (data,) = Page(small_grid).data()
        entry = data["schedules"][name]
        stored = entry["sizes"]["4 8 -" if entry["fixed"] else "4 8 2"]
        (side,) = explore(ExplorerSettings(name, None, 4, 2, 8, 1.0, 1.5, 1.0, 0.25))
        starts = np.frombuffer(base64.b64decode(stored["starts"]["1 : 1.5 : 1 0.25"]), "<u2")
        compute_ns = side.trace.start_ns[: len(starts)]
        assert (starts * data["grid"]["tick_ms"] * MS).tolist() == compute_ns.tolist()
        assert len(starts) == stored["offsets"][-1]

    def test_holds_refusals(self, small_grid: str):
        (data,) = Page(small_grid).data()
        refusal = data["schedules"]["DualPipe"]["sizes"]["4 4 -"]
        assert refusal.startswith("num_microbatches=4: DualPipe ")

    def test_is_written_where_it_is_asked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(page_module, "RANKS", (2,))
        monkeypatch.setattr(page_module, "MICROBATCHES", (4,))
        target = tmp_path / "explorer.html"
        page = pipeline_explorer().to_html(target)
        assert target.read_text(encoding="utf-8") == page
        assert page.startswith("<!DOCTYPE html>")
