"""What every figure promises: kinds told apart, frames that move two shapes, text that reads on light and on dark."""

from __future__ import annotations

import json

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vizkit as vk
from vizkit.errors import InvalidInputError
from vizkit.figures.animation import CURSOR_SHAPE, VEIL_SHAPE, show_frame
from vizkit.figures.bars import Detail, span_traces
from vizkit.figures.coverage import dominant_kinds, idle_intervals
from vizkit.figures.links import collective_neighbours, message_pairs
from vizkit.figures.placement import COMMUNICATION_LANE, COMPUTE_LANE, MAX_SHARES, ROW_SCALE, lane_of
from vizkit.figures.theme import CLOCK_MEANINGS, STYLES, TEXT, TimeAxis
from vizkit.trace import KINDS, Clock, Role, Span, SpanKind, Trace

MS = 1_000_000


def two_ranks(clock: str = "virtual") -> Trace:
    """Rank 0 computes 4 ms and sends 1,000 bytes to rank 1, whose backward an all-reduce of 2,000 bytes overlaps."""
    message = {"payload_bytes": 1_000, "group": (0, 1), "operation": 0}
    return Trace.from_spans(
        [
            Span(0, SpanKind.FORWARD, 0, 4 * MS, "block 1", stage=0, microbatch=3),
            Span(0, SpanKind.SEND, 4 * MS, 5 * MS, "activation", peer=1, **message),
            Span(1, SpanKind.RECEIVE, 4 * MS, 5 * MS, "activation", peer=0, **message),
            Span(1, SpanKind.BACKWARD, 5 * MS, 9 * MS, "loss"),
            *(
                Span(r, SpanKind.ALL_REDUCE, 7 * MS, 10 * MS, payload_bytes=2_000, group=(0, 1), operation=1)
                for r in (0, 1)
            ),
        ],
        clock=clock,
    )


def many_spans(count: int, ranks: int = 4) -> Trace:
    """`count` forwards and backwards of 10 ns, back to back on each rank."""
    start = np.arange(count) // ranks * 10
    return Trace.from_columns(
        clock="ideal", rank=np.arange(count) % ranks, kind=start // 10 % 2, start_ns=start, end_ns=start + 10
    )


FIGURES = {
    "timeline": lambda: vk.timeline(two_ranks()),
    "timeline of polygons": lambda: vk.timeline(many_spans(6_000)),
    "timeline as a heat map": lambda: vk.timeline(many_spans(52_000)),
    "timeline of nothing": lambda: vk.timeline(Trace.from_spans([], clock="ideal")),
    "compare": lambda: vk.compare(two_ranks(), two_ranks("ideal")),
    "traffic map": lambda: vk.traffic_map(two_ranks()),
    "traffic map of nothing": lambda: vk.traffic_map(Trace.from_spans([], clock="ideal")),
    "collective steps": lambda: vk.collective_steps("all_reduce"),
}


@pytest.fixture(scope="module", params=FIGURES, name="fig")
def any_figure(request: pytest.FixtureRequest) -> go.Figure:
    return FIGURES[request.param]()


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast of two colours, 1 to 21."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


class TestEveryFigure:
    def test_assumes_no_background(self, fig: go.Figure):
        """Clear paper and plot, no template of Plotly's that would bring white."""
        assert fig.layout.paper_bgcolor == fig.layout.plot_bgcolor == "rgba(0,0,0,0)"
        assert not fig.layout.template.layout.to_plotly_json()

    def test_has_text_in_the_one_grey(self, fig: go.Figure):
        assert fig.layout.font.color == TEXT

    def test_is_valid_json_without_nan(self, fig: go.Figure):
        """Browsers refuse NaN in JSON; gaps between polygons travel inside binary arrays or as null."""
        json.loads(fig.to_json(), parse_constant=lambda constant: pytest.fail(f"{constant} in the figure"))

    def test_carries_its_summary_through_json(self, fig: go.Figure):
        again = go.Figure(json.loads(fig.to_json()))
        assert vk.describe(again) == vk.describe(fig) != ""

    def test_frames_all_carry_the_same_traces(self, fig: go.Figure):
        """A frame with other traces than the one before mixes two moments (plotly/plotly.js#2037)."""
        shapes = {(frame.traces, tuple(trace.type for trace in frame.data)) for frame in fig.frames}
        assert len(shapes) <= 1

    def test_slider_names_every_frame(self, fig: go.Figure):
        if not fig.frames:
            assert not fig.layout.sliders
            return
        targets = [step.args[0][0] for step in fig.layout.sliders[0].steps]
        assert targets == [frame.name for frame in fig.frames]
        assert len({frame.name for frame in fig.frames}) == len(fig.frames)


@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
def test_text_reads_on_light_and_on_dark(background: str):
    """No colour reaches 4.5 to 1 on both (the best possible is 4.35); the text's grey is within 0.01 of the best."""
    best = (1.05 / (luminance("#111111") + 0.05)) ** 0.5
    assert contrast(TEXT, background) == pytest.approx(best, abs=0.02)
    assert contrast(TEXT, background) > 4.3


def test_no_two_kinds_look_the_same():
    """Colour and hatching together tell any two kinds apart, and every kind has a look."""
    assert set(STYLES) == set(KINDS)
    assert len({(style.color, style.pattern) for style in STYLES.values()}) == len(KINDS)


def test_kinds_that_meet_differ_in_hatching_alone():
    """Without colour: forward, backward, its two halves, and the collectives that one strategy mixes."""
    for together in ("F B optimizer data", "F I W optimizer", "all_gather reduce_scatter all_reduce", "send receive"):
        patterns = [STYLES[SpanKind.parse(kind)].pattern for kind in together.split()]
        assert len(set(patterns)) == len(patterns), together


class TestTimeline:
    @pytest.mark.parametrize("clock", Clock)
    def test_names_its_clock_and_what_it_means(self, clock: Clock):
        subtitle = vk.timeline(two_ranks(clock)).layout.title.subtitle.text
        assert subtitle.startswith(CLOCK_MEANINGS[clock])
        assert subtitle.startswith(f"{clock.value} clock: ")

    def test_draws_one_bar_for_each_span_of_a_kind(self):
        bars = {trace.name: trace for trace in vk.timeline(two_ranks()).data if trace.type == "bar"}
        assert {name: len(bar.x) for name, bar in bars.items()} == {
            "forward (F)": 1, "backward (B)": 1, "all-reduce": 2, "send, upper half": 1, "receive, lower half": 1,
        }  # fmt: skip
        assert (bars["backward (B)"].base[0], bars["backward (B)"].x[0]) == (5.0, 4.0)

    def test_puts_communication_on_the_lower_part_of_the_row(self):
        """So an all-reduce beside a backward on the same rank is seen whole."""
        kinds = {style.legend: kind for kind, style in STYLES.items()}
        for bar in (trace for trace in vk.timeline(two_ranks()).data if trace.type == "bar"):
            is_communication = kinds[bar.name].role is Role.COMMUNICATION
            top, bottom = COMMUNICATION_LANE if is_communication else COMPUTE_LANE
            for y in bar.y:
                middle = (y + ROW_SCALE / 2) % ROW_SCALE - ROW_SCALE / 2
                assert top * ROW_SCALE <= middle - bar.width / 2 < middle + bar.width / 2 <= bottom * ROW_SCALE

    @pytest.mark.parametrize("copies", [1, 2_600], ids=["bars", "polygons"])
    def test_shows_a_send_and_a_receive_at_the_same_time(self, copies: int):
        """A rank of a ring does both at once: neither covers the other, and the legend says where each is."""
        starts = [i * 10 for i in range(copies)]
        spans = [Span(0, kind, t, t + 10, peer=1) for t in starts for kind in (SpanKind.SEND, SpanKind.RECEIVE)]
        trace = Trace.from_spans(spans, clock="ideal", world_size=2)
        drawn = {picture.name: picture for picture in vk.timeline(trace).data}
        send, receive = drawn["send, upper half"], drawn["receive, lower half"]
        if copies == 1:
            assert send.y[0] + send.width / 2 <= receive.y[0] - receive.width / 2
        else:
            assert (send.type, max(send.y)) == ("scatter", min(receive.y))

    def test_hover_tells_all_that_is_known(self):
        bars = {trace.name: trace for trace in vk.timeline(two_ranks()).data if trace.type == "bar"}
        assert bars["forward (F)"].hovertext[0] == (
            "<b>block 1</b><br>forward (F), rank 0, 4 ms<br>stage 0, microbatch 3"
        )
        assert bars["send, upper half"].hovertext[0] == (
            "<b>activation</b><br>send, rank 0, 1 ms<br>payload 1 kB (1,000 bytes)<br>peer: rank 1<br>group: ranks 0, 1"
        )

    def test_shows_names_as_they_are(self):
        """A name is text, not markup, and a long one is cut."""
        trace = Trace.from_spans([Span(0, "F", 0, MS, "<b>&" + "x" * 200)], clock="ideal")
        (bar,) = (drawn for drawn in vk.timeline(trace).data if drawn.type == "bar")
        assert bar.hovertext[0].startswith("<b>&lt;b&gt;&amp;xxx")
        assert "x…</b>" in bar.hovertext[0]

    def test_frames_move_the_veil_and_the_cursor_and_nothing_else(self):
        fig = vk.timeline(two_ranks(), max_frames=11)
        for i, frame in enumerate(fig.frames):
            veil, cursor = frame.layout.shapes
            assert frame.data == ()
            assert (veil.x0, veil.x1, cursor.x0, cursor.x1) == pytest.approx((i, 10, i, i))
        assert {step.args[1]["frame"]["redraw"] for step in fig.layout.sliders[0].steps} == {False}

    def test_shapes_of_the_user_stay_after_the_two(self):
        """Frames name only the first two shapes, so what is added later is left alone."""
        fig = vk.timeline(two_ranks())
        fig.add_vline(x=2)
        show_frame(fig, fig.frames[0])
        assert [shape.name for shape in fig.layout.shapes] == ["veil", "cursor", None]
        assert [fig.layout.shapes[i].x0 for i in (VEIL_SHAPE, CURSOR_SHAPE, 2)] == [0, 0, 2]

    def test_first_shows_the_whole_trace(self):
        """A reader without a kernel sees all of it: nothing is veiled, and the slider stands at the end."""
        fig = vk.timeline(two_ranks())
        assert fig.layout.shapes[VEIL_SHAPE].x0 == fig.layout.shapes[VEIL_SHAPE].x1 == 10.0
        assert fig.layout.sliders[0].active == len(fig.frames) - 1

    def test_slider_tells_time_and_bytes_so_far(self):
        """The send has arrived at 5 ms; the ring moves 2(n − 1)/n of 2,000 bytes on each of two ranks by 10 ms."""
        labels = [step.label for step in vk.timeline(two_ranks(), max_frames=11).layout.sliders[0].steps]
        assert (labels[4], labels[5], labels[10]) == ("4 ms · 0 B moved", "5 ms · 1 kB moved", "10 ms · 5 kB moved")

    def test_strip_holds_bytes_so_far_and_utilisation(self):
        strip = {trace.name: trace for trace in vk.timeline(two_ranks()).data}
        assert strip["bytes so far"].y[-1] == 5_000
        share = strip["utilisation"]
        assert [share.y[np.searchsorted(share.x, t)] for t in (1.0, 4.5, 6.0, 9.5)] == [50, 0, 50, 0]

    def test_arrow_joins_the_send_to_its_receive(self):
        (arrow,) = (trace for trace in vk.timeline(two_ranks()).data if trace.name == "message")
        assert arrow.x[:2].tolist() == [4.0, 5.0]
        assert arrow.y[:2].tolist() == [42, 112], "from under rank 0's lane to above rank 1's, and over no bar"

    def test_grey_is_where_a_rank_neither_computes_nor_communicates(self):
        rank, start, end = idle_intervals(two_ranks(), (0, 10 * MS))
        assert [(int(r), s / MS, e / MS) for r, s, e in zip(rank, start, end, strict=True)] == [
            (0, 5.0, 7.0), (1, 0.0, 4.0),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "duration_ns, unit", [(1, "ns"), (1_999, "ns"), (2_000, "µs"), (2 * MS, "ms"), (2_000 * MS, "s")]
    )
    def test_time_has_the_unit_that_suits(self, duration_ns: int, unit: str):
        fig = vk.timeline(Trace.from_spans([Span(0, "F", 7, 7 + duration_ns)], clock="ideal"))
        assert fig.layout.xaxis.title.text == f"time since the first span ({unit})"
        assert fig.layout.xaxis.type == "linear"

    @pytest.mark.parametrize("max_frames", [0, 1, -3, 2.5])
    def test_refuses_too_few_frames(self, max_frames: int):
        with pytest.raises(InvalidInputError) as caught:
            vk.timeline(two_ranks(), max_frames=max_frames)
        assert str(caught.value) == (
            f"max_frames={max_frames}: an animation has a first and a last frame; use 2 or more"
        )

    def test_says_that_there_is_nothing_to_show(self):
        fig = vk.timeline(Trace.from_spans([], clock="wall", world_size=2))
        assert fig.layout.annotations[0].text == "This trace has no spans: no rank recorded anything."

    @pytest.mark.parametrize("ranks", [1, 2, 8, 64])
    def test_height_grows_with_ranks_and_is_capped(self, ranks: int):
        height = vk.timeline(many_spans(ranks * 4, ranks)).layout.height
        assert 300 < height < 1_400
        assert height >= 300 + 10 * ranks


def lanes(*spans: Span) -> list[list[int]]:
    return (lane_of(Trace.from_spans(spans, clock="ideal")) - 100 * np.array([[s.rank] for s in spans])).tolist()


class TestPlacement:
    """Top and bottom of spans in hundredths of a row, from the row's middle; the communication lane is 12 to 42."""

    def test_collectives_that_do_not_overlap_have_the_whole_lane(self):
        """On one rank one after the other, or at the same time on two ranks."""
        spans = Span(0, "all_reduce", 0, 5), Span(0, "all_gather", 5, 9), Span(1, "all_reduce", 0, 5)
        assert lanes(*spans) == [[12, 42]] * 3

    def test_collectives_that_overlap_share_it(self):
        """A tensor group's all-reduce within a data-parallel group's: both are seen, the next one is whole again."""
        spans = Span(0, "all_reduce", 0, 9), Span(0, "all_reduce", 2, 4), Span(0, "all_reduce", 5, 7)
        assert lanes(*spans, Span(0, "all_reduce", 9, 12)) == [[12, 27], [27, 42], [27, 42], [12, 42]]

    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 10)), min_size=1, max_size=12))
    @settings(max_examples=60, deadline=None)
    def test_collectives_lie_in_the_lane_and_apart(self, drawn: list[tuple[int, int, int]]):
        """Where no moment has more than `MAX_SHARES` on one rank, no two cover each other in time and height."""
        spans = [Span(rank, "all_gather", start, start + length) for rank, start, length in drawn]
        trace = Trace.from_spans(spans, clock="ideal", world_size=3)
        spans, boxes = list(trace), (lane_of(trace) - ROW_SCALE * trace.rank[:, None]).tolist()
        assert all(12 <= top < bottom <= 42 for top, bottom in boxes)
        depth = max(sum(s.rank == r and s.start_ns <= t < s.end_ns for s in spans) for r in range(3) for t in range(41))
        if depth > MAX_SHARES:
            return
        for i, (one, (top, bottom)) in enumerate(zip(spans, boxes, strict=True)):
            for other, (top2, bottom2) in zip(spans[i + 1 :], boxes[i + 1 :], strict=True):
                apart = one.rank != other.rank or one.end_ns <= other.start_ns or other.end_ns <= one.start_ns
                assert apart or bottom <= top2 or bottom2 <= top


class TestDetail:
    @pytest.mark.parametrize(
        "count, kinds", [(5_000, {"bar"}), (5_004, {"scatter"}), (50_000, {"scatter"}), (50_004, {"heatmap", "bar"})]
    )
    def test_level_follows_the_number_of_spans(self, count: int, kinds: set[str]):
        """Bars with hover, then polygons, then a heat map (whose bars are legend keys alone)."""
        trace = many_spans(count)
        drawn = span_traces(trace, TimeAxis.spanning(*trace.extent_ns))
        assert {picture.type for picture in drawn if picture.name != "idle"} == kinds

    @pytest.mark.parametrize("count", [500, 5_004, 50_004])
    def test_number_of_traces_depends_on_kinds_not_on_spans(self, count: int):
        assert len(vk.timeline(many_spans(count)).data) <= 7

    def test_polygons_are_the_spans(self):
        """Four corners and a gap for each span, at the span's times."""
        trace = many_spans(6_000)
        drawn = span_traces(trace, TimeAxis(0, "ns", 1))
        corners = np.concatenate([p.x.reshape(-1, 5) for p in drawn if p.name != "idle"])
        assert sorted(corners[:, 0].tolist()) == sorted(trace.start_ns.tolist())
        assert (corners[:, 1] - corners[:, 0] == 10).all()
        assert np.isnan(corners[:, 4]).all()

    def test_window_shows_more_of_less(self):
        """What is a heat map from afar is bars from near, and spans outside the window are not drawn."""
        trace = many_spans(60_000)
        drawn = span_traces(trace, TimeAxis(0, "ns", 1), window_ns=(1_000, 2_000))
        bars = [picture for picture in drawn if picture.type == "bar"]
        assert Detail.of(len(trace)) is Detail.HEAT_MAP
        assert sum(len(bar.x) for bar in bars) == 4 * 102
        assert min(float(bar.base.min()) for bar in bars) == 990


@st.composite
def grids_of_spans(draw: st.DrawFn) -> Trace:
    """Spans on whole nanoseconds below 40, of any kind, on up to 3 ranks; they may overlap."""
    spans = draw(
        st.lists(
            st.builds(
                lambda rank, kind, start, length: Span(rank, kind, start, start + length),
                st.integers(0, 2), st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 10),
            ),
            min_size=1, max_size=12,
        )
    )  # fmt: skip
    return Trace.from_spans(spans, clock="ideal", world_size=3)


@given(grids_of_spans())
@settings(max_examples=60, deadline=None)
def test_idle_is_what_no_busy_span_covers(trace: Trace):
    """For each rank and nanosecond of any window: grey exactly where no compute and no communication is."""
    for window in (trace.extent_ns, (5, 25)):
        rank, start, end = idle_intervals(trace, window)
        grey = {(int(r), t) for r, s, e in zip(rank, start, end, strict=True) for t in range(s, e)}
        busy = {(s.rank, t) for s in trace if s.kind.role is not Role.WAIT for t in range(s.start_ns, s.end_ns)}
        assert grey == {(r, t) for r in range(3) for t in range(*window)} - busy


@given(grids_of_spans(), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_each_pixel_shows_a_kind_that_fills_most_of_it(trace: Trace, columns: int):
    """Against counting span by span: no other kind of that rank and lane covers more of the column."""
    start, end = trace.extent_ns
    shown = dominant_kinds(trace, columns, (start, end))
    edges = np.linspace(start, end, columns + 1)
    for rank in range(3):
        for lane in (0, 1):
            for column in range(columns):
                covered = dict.fromkeys(range(len(KINDS)), 0.0)
                for span in trace:
                    if span.rank == rank and (span.kind.role is Role.COMMUNICATION) == lane:
                        overlap = min(span.end_ns, edges[column + 1]) - max(span.start_ns, edges[column])
                        covered[span.kind.code] += max(overlap, 0.0)
                most, code = max(covered.values()), int(shown[rank, lane, column])
                if code == len(KINDS):
                    assert most == pytest.approx(0, abs=1e-6)
                else:
                    assert covered[code] == pytest.approx(most, abs=1e-6)


class TestLinks:
    def test_messages_pair_by_operation(self):
        sends, receives = message_pairs(two_ranks())
        assert (sends.tolist(), receives.tolist()) == ([1], [2])

    def test_a_band_joins_neighbours_within_the_group(self):
        """Ranks 0, 2 and 3 of a group: 0 to 2 and 2 to 3, and nothing to rank 1."""
        trace = Trace.from_spans(
            [Span(r, "all_gather", 0, 9, group=(0, 2, 3), operation=4) for r in (3, 0, 2)], clock="ideal"
        )
        upper, lower = collective_neighbours(trace)
        assert list(zip(trace.rank[upper].tolist(), trace.rank[lower].tolist(), strict=True)) == [(0, 2), (2, 3)]

    def test_two_collectives_are_not_joined(self):
        trace = Trace.from_spans([Span(r, "barrier", 0, 9, operation=r) for r in (0, 1)], clock="ideal")
        assert len(collective_neighbours(trace)[0]) == 0
