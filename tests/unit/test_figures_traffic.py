"""The traffic map and the comparison: what the numbers in them are, and what they call it."""

from __future__ import annotations

import numpy as np
import pytest

import vizkit as vk
from vizkit import metrics
from vizkit.errors import InvalidInputError
from vizkit.figures.comparison import speed_up
from vizkit.trace import Span, Trace

MS = 1_000_000


def ring(ranks: int, payload_bytes: int = 1_200) -> Trace:
    return Trace.from_spans(
        [Span(r, "all_reduce", 0, 4 * MS, payload_bytes=payload_bytes, operation=0) for r in range(ranks)],
        clock="virtual",
    )


def sends(*sizes: int) -> Trace:
    """Rank 0 sends to rank 1, 2, … one message after another, 1 ms each."""
    return Trace.from_spans(
        [Span(0, "send", i * MS, (i + 1) * MS, peer=i + 1, payload_bytes=size) for i, size in enumerate(sizes)],
        clock="ideal", world_size=len(sizes) + 1,
    )  # fmt: skip


class TestTrafficMap:
    def test_ends_with_the_bytes_that_metrics_count(self):
        trace = ring(4)
        picture = vk.traffic_map(trace).data[0]
        assert (picture.customdata == metrics.traffic(trace).wire_bytes).all()
        assert picture.text[0].tolist() == ["", "1.8 kB", "", ""]

    def test_grows_with_the_cursor(self):
        """Bytes of a message are there from its end on, on the trace's clock."""
        fig = vk.traffic_map(sends(100, 200), max_frames=5)
        rows = [frame.data[0].customdata[0].tolist() for frame in fig.frames]
        assert rows == [[0, 0, 0], [0, 0, 0], [0, 100, 0], [0, 100, 0], [0, 100, 200]]
        labels = [step.label for step in fig.layout.sliders[0].steps]
        assert (labels[0], labels[2], labels[4]) == ("0 ms · 0 B moved", "1 ms · 100 B moved", "2 ms · 300 B moved")

    @pytest.mark.parametrize("sizes, scale", [((100, 10_000), "bytes (linear)"), ((100, 10_001), "bytes (log scale)")])
    def test_colours_are_logarithmic_only_where_linear_would_hide_edges(self, sizes: tuple[int, int], scale: str):
        assert vk.traffic_map(sends(*sizes)).data[0].colorbar.title.text == scale

    def test_nothing_differs_from_little(self):
        """An edge without bytes lies outside the colours of the scale, also beside the smallest edge."""
        for trace in (sends(1, 100), sends(1, 10**9)):
            shades = vk.traffic_map(trace).data[0].z
            assert shades[1, 0] < shades[0, 1] < shades[0, 2]

    def test_many_ranks_stay_small(self):
        """Frames carry the whole matrix, so there are fewer of them for 64 ranks, and no text."""
        fig = vk.traffic_map(ring(64, 64_000))
        assert len(fig.frames) * 64**2 <= 60_000
        assert fig.data[0].text is None
        assert len(fig.to_json()) < 1_000_000

    def test_summary_names_the_busiest_edges(self):
        assert vk.describe(vk.traffic_map(sends(5, 7))).startswith(
            "Busiest: rank 0 to rank 2 7 B, rank 0 to rank 1 5 B.\n"
        )


class TestCompare:
    def one(self, duration_ns: int, clock: str = "ideal", start_ns: int = 0) -> Trace:
        return Trace.from_spans([Span(0, "F", start_ns, start_ns + duration_ns)], clock=clock)

    def test_says_which_is_faster(self):
        slow, fast = self.one(6 * MS), self.one(4 * MS)
        assert speed_up(slow, fast, ("a", "b")) == "b is 1.5 times as fast as a"
        assert speed_up(fast, slow, ("a", "b")) == "a is 1.5 times as fast as b"
        assert speed_up(fast, fast, ("a", "b")) == "a and b take the same time"

    def test_names_both_clocks_where_they_differ(self):
        """Predicted against measured is not a speed-up of the machine, so the title says whose time is whose."""
        fig = vk.compare(self.one(4 * MS), self.one(8 * MS, "wall"), labels=("theory", "measured"))
        assert fig.layout.title.text == "theory (ideal clock) is 2 times as fast as measured (wall clock)"
        captions = [note.text for note in fig.layout.annotations]
        assert captions == [
            "<b>theory</b> · 4 ms · ideal clock: computed, nothing ran",
            "<b>measured</b> · 8 ms · wall clock: what happened on this machine",
        ]

    def test_both_start_at_zero_on_one_axis(self):
        """Each trace counts from its own first span, in the longer one's unit."""
        fig = vk.compare(self.one(3 * MS, start_ns=50 * MS), self.one(5_000 * MS, start_ns=7))
        bars = [trace for trace in fig.data if trace.type == "bar"]
        assert [(float(bar.base[0]), float(bar.x[0]), bar.yaxis) for bar in bars] == [(0, 0.003, "y"), (0, 5, "y4")]
        assert {trace.xaxis for trace in fig.data} == {None}
        assert tuple(fig.layout.xaxis.range) == (0, 5)
        assert fig.layout.xaxis.title.text == "time since the first span (s)"

    def test_each_kind_stands_in_the_legend_once(self):
        fig = vk.compare(ring(2), ring(3))
        names = [trace.name for trace in fig.data if trace.showlegend is not False]
        assert len(names) == len(set(names))
        assert "all-reduce" in names

    def test_slider_tells_the_bytes_of_both(self):
        fig = vk.compare(sends(100), sends(300, 5), labels=("x", "y"), max_frames=3)
        labels = [step.label for step in fig.layout.sliders[0].steps]
        assert labels == [
            "0 ms · moved: x 0 B, y 0 B", "1 ms · moved: x 100 B, y 300 B", "2 ms · moved: x 100 B, y 305 B",
        ]  # fmt: skip

    def test_rows_do_not_overlap(self):
        fig = vk.compare(ring(4), ring(64))
        upper, lower, strip = (np.array(fig.layout[axis].domain) for axis in ("yaxis", "yaxis4", "yaxis2"))
        assert upper[0] > lower[1] > lower[0] > strip[1] > strip[0] == 0

    def test_refuses_what_it_cannot_compare(self):
        nothing = Trace.from_spans([], clock="ideal")
        with pytest.raises(InvalidInputError, match=r"^b=Trace.*: has no spans to compare; give a trace"):
            vk.compare(self.one(1), nothing)
        with pytest.raises(InvalidInputError, match=r"^labels=\('a',\): there are two traces; give two labels$"):
            vk.compare(self.one(1), self.one(2), labels=("a",))
