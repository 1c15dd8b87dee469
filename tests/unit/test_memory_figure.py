"""The memory figure: areas as high as what they stand for, a line where a model says, all under one cursor."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given

import vizkit as vk
from tests.unit.test_peak_memory import ROWS, samples, traced
from vizkit.figures.memory_areas import LEGEND, MAX_ROWS, ROW_HEIGHT
from vizkit.trace import Span, Trace

ALL = {"parameters": 100, "gradients": 40, "optimizer": 0, "activations": 60}


def areas(fig: go.Figure) -> dict[str, go.Scatter]:
    return {part.name: part for part in fig.data if part.legend == LEGEND and part.fill}


def bands(area: go.Scatter) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """x, y and bytes of each rank's closed outline."""
    x, y, value = (np.asarray(column, float) for column in (area.x, area.y, area.customdata))
    ends = np.flatnonzero(np.isnan(x))
    return [(x[i:j], y[i:j], value[i:j]) for i, j in zip([0, *(ends[:-1] + 1)], ends, strict=True)]


class TestAreas:
    def test_one_trace_for_each_category_however_many_ranks(self):
        """Those that nobody holds are left out."""
        fig = vk.memory_figure(traced(ROWS, ROWS, [(*row[:2], 0, 0) for row in ROWS]))
        assert list(areas(fig)) == ["activations", "optimizer", "gradients", "parameters"]
        assert [len(bands(area)) for area in areas(fig).values()] == [2, 2, 3, 3]

    @given(samples)
    def test_a_band_is_as_thick_as_its_bytes(self, rows: list[tuple[int, ...]]):
        """At each of its corners, on the scale of the largest sum, and it never leaves its row."""
        highest = max(max(map(sum, rows)), 1)
        for area in areas(vk.memory_figure(traced(rows), max_frames=2)).values():
            ((_, y, value),) = bands(area)
            half = (len(y) - 1) // 2
            there, back = y[:half], y[half:-1][::-1]
            assert np.allclose((back - there) * highest / ROW_HEIGHT, value[:half], atol=highest * 1e-5)
            assert ((y > 0) & (y < 1.0001)).all()

    def test_the_last_sample_holds_until_the_end(self):
        """Steps, not slopes: at a sample's time the band jumps."""
        ((x, _, value),) = bands(areas(vk.memory_figure(traced(ROWS)))["gradients"])
        half = (len(x) - 1) // 2
        assert x[:half].tolist() == [0, 20, 20, 30, 30, 100]
        assert value[:half].tolist() == [0, 0, 30, 30, 80, 80]

    def test_of_many_ranks_some_are_drawn_the_fullest_among_them(self):
        rows = [[(100 + (rank == 30), 0, 0, 0)] for rank in range(64)]
        fig = vk.memory_figure(traced(*rows))
        drawn = [text for text in fig.layout.yaxis2.ticktext if text.startswith("rank")]
        assert len(drawn) == MAX_ROWS
        assert {"rank 0", "rank 30", "rank 63"} <= set(drawn)
        assert fig.layout.title.subtitle.text.endswith("memory of 16 of 64 ranks")

    def test_categories_differ_without_colour(self):
        """Each has a hatching of its own."""
        patterns = [area.fillpattern.shape for area in areas(vk.memory_figure(traced(ROWS))).values()]
        assert len(set(patterns)) == len(patterns) == 4


class TestExpected:
    def line(self, fig: go.Figure) -> go.Scatter:
        (line,) = [part for part in fig.data if part.legend == LEGEND and not part.fill]
        return line

    @pytest.mark.parametrize(
        "expected, name, order",
        [
            (ALL, "expected", ["activations", "optimizer", "gradients", "parameters"]),
            ({"activations": 200}, "expected activations", ["optimizer", "gradients", "parameters", "activations"]),
            (
                vk.memory.model_states(50, precision="fp32_adam"),
                "expected up to optimizer",
                ["activations", "optimizer", "gradients", "parameters"],
            ),
            (
                SimpleNamespace(gradients_bytes=200),
                "expected gradients",
                ["activations", "optimizer", "parameters", "gradients"],
            ),
        ],
    )  # fmt: skip
    def test_what_is_expected_lies_lowest_under_its_line(self, expected: object, name: str, order: list[str]):
        """A dashed line across the row at the sum of what is expected, from a mapping or an object with bytes."""
        fig = vk.memory_figure(traced(ROWS), expected)
        line = self.line(fig)
        total = {"expected": 200, "expected up to optimizer": 800}.get(name, 200)
        assert (line.name, line.line.dash, list(areas(fig))) == (name, "dash", order)
        assert line.y[0] == line.y[1] == pytest.approx(1 - ROW_HEIGHT * total / max(total, 190))
        assert fig.layout.yaxis2.ticktext[-1] == f"expected<br>{total} B"

    def test_each_rank_may_have_its_own(self):
        line = self.line(vk.memory_figure(traced(ROWS, ROWS), [{"parameters": 100}, {"parameters": 200}]))
        assert [line.y[0], line.y[3]] == pytest.approx([1 - ROW_HEIGHT / 2, 2 - ROW_HEIGHT])

    @pytest.mark.parametrize(
        "expected, message",
        [
            (
                {"weights": 1},
                "expected='weights': is not a category of memory; use parameters, gradients, optimizer, activations",
            ),
            ({"gradients": -1}, "expected['gradients']=-1: must be finite and not negative; give bytes, such as 4096"),
            ([ALL, ALL], "expected='2 entries': there are 1 ranks; give one a rank, or one for all"),
            (5, 'expected=5: names no bytes of any category; give {"parameters": 4096} or vk.memory.per_rank(…)'),
        ],
    )  # fmt: skip
    def test_what_does_not_fit_is_refused(self, expected: object, message: str):
        with pytest.raises(vk.InvalidInputError) as error:
            vk.memory_figure(traced(ROWS), expected)
        assert str(error.value) == message

    def test_a_trace_without_memory_is_refused(self):
        """With what to do."""
        with pytest.raises(vk.InvalidInputError, match=r"has no memory of tensors; run the training inside vk\.track"):
            vk.memory_figure(Trace.from_spans([Span(0, "F", 0, 9)], clock="wall"))


class TestFigure:
    def test_it_plays(self):
        """The slider says who holds most at each moment; frames move two shapes only."""
        fig = vk.memory_figure(traced(ROWS, [(120, 0, 0, 0)]), max_frames=6)
        assert [step.label for step in fig.layout.sliders[0].steps] == [
            "0 ns · most: rank 1, 120 B",
            "20 ns · most: rank 0, 190 B",
            "40 ns · most: rank 0, 185 B",
            "60 ns · most: rank 0, 185 B",
            "80 ns · most: rank 0, 185 B",
            "100 ns · most: rank 0, 185 B",
        ]
        assert not fig.frames[0].data
        assert fig.layout.xaxis.anchor == "y2"

    def test_the_same_in_words(self):
        """Peaks by rank, and beside what was expected; it survives JSON."""
        fig = vk.memory_figure(traced(ROWS), {"parameters": 100, "gradients": 90})
        said = vk.describe(go.Figure(fig.to_dict())).splitlines()
        assert "Tensors at the peak: rank 0 190 B (parameters 100 B, gradients 30 B, activations 60 B)." in said
        assert said[-1] == (
            "Rank 0, highest of expected 190 B (parameters, gradients): "
            "parameters 100 B of 100 B, gradients 80 B of 90 B."
        )

    def test_it_stays_small(self):
        """8 ranks with 600 samples each, none like the one before: less than a notebook may have in all."""
        rng = np.random.default_rng(0)
        rows = [rng.integers(0, 10**6, (600, 4)).tolist() for _ in range(8)]
        assert len(vk.memory_figure(traced(*rows)).to_json()) < 400_000
