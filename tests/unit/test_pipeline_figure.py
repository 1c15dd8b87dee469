"""The pipeline picture: each action is a cell in its place, each idle moment is shaded, the cursor counts them."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vizkit as vk
from tests.strategies import drawn
from tests.unit.test_figures import contrast
from vizkit import metrics
from vizkit.errors import InvalidInputError
from vizkit.figures.pipeline import bubble_so_far, picture, sides_of
from vizkit.figures.pipeline_cells import HALF_CELL, HALF_CELL_WITH_LINKS, MAX_LINKS, stage_color
from vizkit.figures.placement import ROW_SCALE
from vizkit.figures.theme import TEXT
from vizkit.schedules.actions import ACTION_KINDS
from vizkit.trace import Counter, Span, SpanKind, Trace

S = 1_000_000_000
MS = 1_000_000
UNIT = {"F": 1, "I": 1, "W": 1}


def simulated(name: str = "1F1B", ranks: int = 4, microbatches: int = 8, **options) -> Trace:
    return vk.simulate(vk.schedule(name, num_ranks=ranks, num_microbatches=microbatches), UNIT, **options)


def traces_named(fig: go.Figure, name: str) -> list:
    return [trace for trace in fig.data if trace.name == name]


def cells(fig: go.Figure) -> list[tuple[float, float, float, float, int]]:
    """(rank, start, end, half height, microbatch) of each bar."""
    return sorted(
        (float(y) / ROW_SCALE, float(base), float(base + x), float(w) / 2, int(data[0]))
        for bar in fig.data
        if bar.type == "bar"
        for base, x, y, w, data in zip(
            bar.base, bar.x, bar.y, np.broadcast_to(bar.width, len(bar.x)), bar.customdata, strict=True
        )
    )


def rectangles(trace: go.Scatter) -> list[tuple[float, float, float, float]]:
    """Left, right, top, bottom of each filled rectangle."""
    x, y = np.asarray(trace.x).reshape(-1, 5), np.asarray(trace.y).reshape(-1, 5)
    return [(a[0], a[1], b[0], b[2]) for a, b in zip(x.tolist(), y.tolist(), strict=True)]


class TestCells:
    @pytest.mark.parametrize("name", vk.schedule_names())
    def test_every_action_is_a_cell_in_its_place(self, name: str):
        """At its time, in its rank's row, and with its microbatch's number."""
        trace = simulated(name)
        expected = [(s.rank, s.start_ns / S, s.end_ns / S, HALF_CELL, s.microbatch) for s in trace]
        assert cells(vk.pipeline_figure(trace)) == sorted(expected)

    def test_every_wide_cell_has_its_number_in_its_middle(self):
        trace = simulated()
        (numbers,) = traces_named(vk.pipeline_figure(trace), "microbatch")
        shown = sorted(zip(numbers.x.tolist(), numbers.y.tolist(), numbers.text, strict=True))
        assert shown == sorted(((s.start_ns + s.end_ns) / 2 / S, s.rank * ROW_SCALE, str(s.microbatch)) for s in trace)
        assert numbers.mode == "text"

    def test_narrow_cells_have_no_number(self):
        """At 8 ranks and 128 microbatches a backward takes 4 pixels, which no number of three digits fits."""
        (numbers,) = traces_named(vk.pipeline_figure(simulated("1F1B", 8, 128)), "microbatch")
        assert len(numbers.x) == 0

    def test_overlapped_actions_share_the_row(self):
        """The forward has the upper half, the backward the lower half; what does not overlap keeps the whole row."""
        spans = [
            Span(0, "F", 0, S, stage=0, microbatch=0),
            Span(0, "F", S, 2 * S, stage=0, microbatch=1),
            Span(0, "B", S, 2 * S, stage=0, microbatch=0),
        ]
        fig = vk.pipeline_figure(Trace.from_spans(spans, clock="ideal"))
        quarter = HALF_CELL / 2 / ROW_SCALE
        assert cells(fig) == [
            (-quarter, 1, 2, HALF_CELL / 2, 1),
            (0, 0, 1, HALF_CELL, 0),
            (quarter, 1, 2, HALF_CELL / 2, 0),
        ]

    def test_later_stages_of_a_rank_are_paler(self):
        """Two forwards' colours, one entry in the legend."""
        forwards = traces_named(vk.pipeline_figure(simulated("Interleaved1F1B")), "forward (F)")
        first, second = (bar.marker.color for bar in forwards)
        assert contrast(first, "#000000") < contrast(second, "#000000")
        assert [bar.showlegend for bar in forwards] == [True, False]
        stages = [{int(stage) for _, stage, _ in bar.customdata} for bar in forwards]
        assert stages == [{0, 1, 2, 3}, {4, 5, 6, 7}]

    @pytest.mark.parametrize("kind", ACTION_KINDS)
    @pytest.mark.parametrize("place", range(4))
    def test_numbers_read_on_every_colour(self, kind: SpanKind, place: int):
        """Black on each kind's colour, as pale as it gets, has WCAG 2's 4.5 to 1."""
        assert contrast("#000000", stage_color(kind, place, 4)) >= 4.5

    def test_kinds_differ_in_hatching(self):
        fig = vk.pipeline_figure([simulated("1F1B"), simulated("ZB-H1")])
        patterns = {bar.name: bar.marker.pattern.shape for bar in fig.data if bar.type == "bar"}
        assert len(set(patterns.values())) == len(patterns) == 4

    def test_messages_leave_and_arrive_at_the_edges_of_their_rows(self):
        """Rank 0 sends down to rank 1 after its forward; the gradient comes back up after F and B of rank 1."""
        fig = vk.pipeline_figure(simulated("1F1B", 2, 1, link=vk.Link(latency_s=0.5)))
        (links,) = traces_named(fig, "message")
        gap = ROW_SCALE - HALF_CELL_WITH_LINKS
        ways = np.stack([links.x, links.y], 1).reshape(-1, 3, 2)[:, :2].tolist()
        assert ways == [[[1, HALF_CELL_WITH_LINKS], [1.5, gap]], [[4.5, gap], [5, HALF_CELL_WITH_LINKS]]]

    @pytest.mark.parametrize(("microbatches", "is_drawn"), [(MAX_LINKS // 6, True), (MAX_LINKS, False)])
    def test_messages_are_drawn_while_they_can_be_told_apart(self, microbatches: int, is_drawn: bool):
        fig = vk.pipeline_figure(simulated("1F1B", 4, microbatches, link=vk.Link(latency_s=0.1)))
        assert bool(traces_named(fig, "message")) is is_drawn

    @pytest.mark.parametrize(
        ("ranks", "microbatches", "kinds"),
        [(16, 156, {"bar", "scatter"}), (16, 320, {"scatter"}), (64, 512, {"heatmap", "bar", "scatter"})],
    )
    def test_level_of_detail_follows_the_number_of_actions(self, ranks: int, microbatches: int, kinds: set[str]):
        """A handful of Plotly traces at each level, whatever the number of actions."""
        fig = vk.pipeline_figure(simulated("1F1B", ranks, microbatches))
        assert {trace.type for trace in fig.data} == kinds
        assert len(fig.data) < 10
        assert [trace.name for trace in fig.data if trace.showlegend] == [
            "idle (bubble)" if kinds != {"heatmap", "bar", "scatter"} else "forward (F)",
            *(["forward (F)", "backward (B)"] if "heatmap" not in kinds else ["backward (B)", "idle (bubble)"]),
        ]


class TestBubble:
    @given(
        name=st.sampled_from(["GPipe", "1F1B", "ZB-H1", "DualPipeV"]),
        ranks=st.integers(2, 5),
        rounds=st.integers(2, 4),
    )
    def test_cells_and_bubble_fill_each_rank(self, name: str, ranks: int, rounds: int):
        """Shaded time is the trace's extent on all ranks without the compute: what `metrics.bubble` counts."""
        trace = simulated(name, ranks, ranks * rounds)
        data = picture(sides_of([trace], ["it"]))["data"]
        (idle,) = (go.Scatter(part) for part in data if part["name"] == "idle (bubble)")
        shaded = sum(right - left for left, right, _, _ in rectangles(idle))
        total = ranks * trace.duration_ns / S
        assert shaded == pytest.approx(metrics.bubble(trace).over_total * total, rel=1e-5)

    def test_bubble_is_counted_as_the_cursor_moves(self):
        """Two ranks, F of 1 s then B of 2 s: rank 1 waits for 1 s, rank 0 for 2 s and for nothing at the end."""
        trace = drawn(["F0 .  .  B0", ".  F0 B0 . "])
        fig = vk.pipeline_figure(trace, max_frames=5)
        assert [step.label for step in fig.layout.sliders[0].steps] == [
            "0 s · bubble so far 0.0%",
            "1 s · bubble so far 50.0%",
            "2 s · bubble so far 50.0%",
            "3 s · bubble so far 50.0%",
            "4 s · bubble so far 50.0%",
        ]

    @pytest.mark.parametrize("name", vk.schedule_names())
    def test_the_last_count_is_the_bubble(self, name: str):
        (side,) = sides_of([simulated(name)], [name])
        last = bubble_so_far(side, np.array([side.trace.duration_ns / side.axis.ns_per_unit]))
        assert last == pytest.approx(metrics.bubble(side.trace).over_total)

    def test_the_title_tells_both_bubbles_and_the_clock(self):
        """1F1B: (p − 1)/(m + p − 1) = 3/11 of the total, (p − 1)/m = 3/8 of the ideal."""
        fig = vk.pipeline_figure(simulated())
        assert fig.layout.title.text == "1F1B: 4 ranks, 8 microbatches"
        assert fig.layout.title.subtitle.text == (
            "ideal clock: computed, nothing ran · 33 s · bubble 27.3% of the total time, 37.5% of the ideal time"
        )

    def test_the_summary_tells_bubble_and_memory(self):
        words = vk.describe(vk.pipeline_figure(simulated()))
        assert "Bubble: 27.3% of the total time, 37.5% of the ideal time." in words
        assert words.splitlines()[-1] == (
            "Peak memory of activations (microbatches of one rank's layers): rank 0 4, rank 1 3, rank 2 2, rank 3 1."
        )

    def test_many_ranks_are_summed_up(self):
        words = vk.describe(vk.pipeline_figure(simulated("1F1B", 32, 64)))
        assert words.splitlines()[-1].endswith("from 1 on rank 31 to 32 on rank 0.")


def with_memory(samples: dict[int, list[tuple[int, float]]], name: str = "activations", unit: str = "bytes") -> Trace:
    """Two ranks that compute for 10 s, with these samples (seconds, value) of memory."""
    spans = [Span(rank, "F", 0, 10 * S, stage=rank, microbatch=0) for rank in range(2)]
    counters = [
        Counter(name, rank, np.array([t * S for t, _ in rows]), np.array([v for _, v in rows]), unit)
        for rank, rows in samples.items()
    ]
    return Trace.from_spans(spans, clock="virtual", counters=counters)


def area(fig: go.Figure) -> list[list[tuple[float, float]]]:
    """Each rank's steps as (time, value), read from the drawn outline."""
    (drawn_area,) = traces_named(fig, "activation memory")
    points = np.stack([drawn_area.x, drawn_area.customdata], 1)
    cuts = np.flatnonzero(np.isnan(points[:, 0]))
    return [[tuple(row) for row in part[~np.isnan(part[:, 0])].tolist()] for part in np.split(points, cuts)[:-1]]


class TestMemory:
    def test_is_a_step_for_each_sample_to_the_end(self):
        fig = vk.pipeline_figure(with_memory({0: [(0, 5), (4, 8)]}))
        assert area(fig) == [[(0, 0), (0, 5), (4, 5), (4, 8), (10, 8), (10, 8), (10, 0)]]

    def test_samples_at_one_moment_count_once(self):
        """A backward that frees and a forward that keeps at the same moment are no dent."""
        fig = vk.pipeline_figure(with_memory({0: [(0, 5), (4, 2), (4, 5)]}))
        assert {value for _, value in area(fig)[0]} == {0, 5}

    @pytest.mark.parametrize("name", ["activations", "memory"])
    def test_rows_share_one_scale_and_name_their_peak(self, name: str):
        """The highest value of all ranks fills a row; the caption says what that is."""
        fig = vk.pipeline_figure(with_memory({0: [(0, 2_000_000)], 1: [(0, 500_000)]}, name))
        (heights,) = traces_named(fig, "activation memory")
        assert np.nanmin(heights.y[:6]) == pytest.approx(1 - 0.86)
        assert np.nanmin(heights.y[6:]) == pytest.approx(2 - 0.86 / 4)
        (peaks,) = traces_named(fig, "peak")
        assert [text.strip() for text in peaks.text] == ["2 MB", "500 kB"]
        assert fig.layout.annotations[0].text == "memory of activations, bytes; a row is 2 MB high"

    def test_is_left_out_where_nothing_was_counted(self):
        fig = vk.pipeline_figure(drawn(["F0 B0"]))
        assert not traces_named(fig, "activation memory")
        assert "yaxis2" not in fig.layout
        assert fig.layout.yaxis.domain == (0, 1)

    @pytest.mark.parametrize("ranks", [2, 8, 16, 32, 64])
    def test_names_of_ranks_do_not_touch(self, ranks: int):
        fig = vk.pipeline_figure(simulated("1F1B", ranks, ranks), max_frames=2)
        low, high = fig.layout.yaxis2.domain
        margin = fig.layout.margin
        height_px = (high - low) * (fig.layout.height - margin.t - margin.b)
        distances = [b - a for a, b in pairwise(fig.layout.yaxis2.tickvals)]
        assert min(distances) * height_px / ranks >= 12

    def test_long_counters_keep_their_peak(self):
        """Of 10,000 samples a few hundred are drawn; the one that is highest is among them."""
        rows = [(i, 1.0 + (i == 4_321)) for i in range(10_000)]
        outline = area(vk.pipeline_figure(with_memory({0: rows})))[0]
        assert max(value for _, value in outline) == 2
        assert len(outline) < 2_000


class TestSeveral:
    def test_share_one_time_axis_and_name_themselves(self):
        """GPipe above 1F1B: the same time, and captions with duration, bubbles and clock."""
        fig = vk.pipeline_figure([simulated("GPipe"), simulated("1F1B")])
        assert fig.layout.title.text == "GPipe against 1F1B: 4 ranks, 8 microbatches"
        assert fig.layout.title.subtitle.text.startswith("GPipe and 1F1B take the same time · ideal clock")
        assert fig.layout.xaxis.range == (0, 33)
        captions = [note.text for note in fig.layout.annotations]
        assert captions[0] == (
            "<b>GPipe</b> · 33 s · bubble 27.3% of the total time, 37.5% of the ideal time · ideal clock"
        )
        assert captions[1] == "memory of activations, microbatches of one rank's layers; a row is 8 high"
        assert {trace.yaxis for trace in fig.data} == {"y", "y2", "y3", "y4"}

    def test_the_shorter_one_keeps_its_bubble_when_it_is_done(self):
        """The cursor moves on over both; what is over counts no further."""
        fig = vk.pipeline_figure([simulated("1F1B"), simulated("1F1B", 4, 16)], labels=("a", "b"), max_frames=3)
        last = fig.layout.sliders[0].steps[-1].label
        assert last == "57 s · bubble so far a 27.3%, b 15.8%"

    def test_each_kind_has_one_legend_entry(self):
        fig = vk.pipeline_figure([simulated("ZB-H1"), simulated("ZBVZeroBubble")])
        listed = [trace.name for trace in fig.data if trace.showlegend]
        assert len(listed) == len(set(listed)) == 4

    def test_different_work_is_not_called_faster(self):
        """Two stages a rank that each take what the other's only stage takes do twice the work."""
        fig = vk.pipeline_figure([simulated("1F1B"), simulated("ZBVZeroBubble")])
        assert fig.layout.title.subtitle.text.startswith("not the same work: a rank computes 24 s and 48 s · ")

    def test_three_stand_below_each_other(self):
        fig = vk.pipeline_figure([simulated(name) for name in ("GPipe", "1F1B", "ZB-H1")])
        domains = [fig.layout[axis].domain for axis in ("yaxis", "yaxis2", "yaxis3", "yaxis4", "yaxis5", "yaxis6")]
        assert all(upper[0] >= lower[1] for upper, lower in pairwise(domains))

    def test_labels_have_to_match(self):
        with pytest.raises(InvalidInputError, match=r"^labels=\('a',\): there are 2 traces; give one label a trace$"):
            vk.pipeline_figure([simulated(), simulated()], labels=("a",))

    @pytest.mark.parametrize("wrong", [[], [3]])
    def test_refuses_what_is_no_trace(self, wrong: list):
        with pytest.raises(InvalidInputError, match=r"must be a trace or several; give vk.simulate\(…\)"):
            vk.pipeline_figure(wrong)

    def test_refuses_to_compare_nothing(self):
        nothing = Trace.from_spans([], clock="wall")
        with pytest.raises(InvalidInputError, match="has no spans to compare; give one that recorded some"):
            vk.pipeline_figure([simulated(), nothing])


class TestFigure:
    FIGURES = (
        lambda: vk.pipeline_figure(simulated("ZBVZeroBubble", link=vk.Link(latency_s=0.1))),
        lambda: vk.pipeline_figure([simulated("1F1B", 16, 320), simulated("1F1B", 64, 512)]),
        lambda: vk.pipeline_figure(Trace.from_spans([Span(0, "optimizer", 0, 5 * MS)], clock="wall")),
    )

    @pytest.mark.parametrize("draw", FIGURES)
    def test_is_valid_json_that_carries_its_summary(self, draw):
        fig = draw()
        text = fig.to_json()
        again = go.Figure(json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in the figure")))
        assert vk.describe(again) == vk.describe(fig) != ""

    @pytest.mark.parametrize("draw", FIGURES)
    def test_assumes_no_background(self, draw):
        fig = draw()
        assert fig.layout.paper_bgcolor == fig.layout.plot_bgcolor == "rgba(0,0,0,0)"
        assert fig.layout.font.color == TEXT

    def test_frames_move_the_veil_and_the_cursor_and_nothing_else(self):
        fig = vk.pipeline_figure(simulated(), max_frames=4)
        assert len(fig.frames) == 4
        for frame in fig.frames:
            assert not frame.data
            assert set(frame.layout.to_plotly_json()) == {"shapes"}
            assert len(frame.layout.shapes) == 2

    def test_plays_under_a_kernel(self):
        """The player of every figure moves this one's cursor: by 11 s the ranks computed 5, 6, 7 and 8 s of 44."""
        view = vk.widgets.player(vk.pipeline_figure(simulated(), max_frames=4))
        view.slider.value = 1
        assert view.picture.layout.shapes[1].x0 == 11
        assert view.moment.value == "11 s · bubble so far 40.9%"

    def test_names_its_clock(self):
        fig = vk.pipeline_figure(Trace.from_spans([Span(0, "F", 0, S, stage=0, microbatch=0)], clock="wall"))
        assert fig.layout.title.subtitle.text.startswith("wall clock: what happened on this machine")

    def test_says_that_there_is_nothing_to_show(self):
        fig = vk.pipeline_figure(Trace.from_spans([], clock="ideal"))
        assert fig.layout.annotations[0].text == "This trace has no spans: no rank recorded anything."

    def test_refuses_too_few_frames(self):
        with pytest.raises(InvalidInputError, match="max_frames=1: an animation has a first and a last frame; use 2"):
            vk.pipeline_figure(simulated(), max_frames=1)

    def test_many_legend_entries_get_a_second_line(self):
        """F, B, I, W, idle and messages do not fit beside each other on a narrow page: the plot begins lower."""
        few = vk.pipeline_figure(simulated())
        many = vk.pipeline_figure([simulated(), simulated("ZB-H1", link=vk.Link(latency_s=0.1))])
        assert many.layout.margin.t == few.layout.margin.t + 20
