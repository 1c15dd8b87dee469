"""A trace as text: what a pipeline's schedule looks like in a terminal and in tests."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import drawn, traces
from vizkit.errors import InvalidInputError
from vizkit.grid import as_grid
from vizkit.trace import Clock, Span, SpanKind, Trace

GPIPE = [
    "F0 F1 .  .  .  .  B0 B1",
    ".  F0 F1 .  .  B0 B1 .",
    ".  .  F0 F1 B0 B1 .  .",
]


@pytest.mark.parametrize("cell_ns", [1, 7, 10**9])
def test_what_is_drawn_is_read_back(cell_ns: int):
    """The cell is the largest that fits all times, whatever the unit."""
    assert as_grid(drawn(GPIPE, cell_ns)) == GPIPE


@given(st.lists(st.lists(st.sampled_from(["F0", "B1", "W2", ". "]), min_size=6, max_size=6), min_size=1, max_size=4))
def test_any_drawing_with_a_cell_of_one_unit_is_read_back(cells: list[list[str]]):
    """Each rank is a line, each unit a cell, idle time a dot."""
    rows = [" ".join(["F0", *row, "F0"]) for row in cells]
    assert as_grid(drawn(rows), cell_s=1) == rows


def test_a_long_span_fills_its_cells():
    """B takes two units here."""
    spans = [Span(0, SpanKind.FORWARD, 0, 5), Span(0, SpanKind.BACKWARD, 5, 15)]
    assert as_grid(Trace.from_spans(spans, clock="ideal")) == ["F B B"]


def test_stages_are_told_apart_where_a_rank_holds_several():
    """`1F0` is the forward of microbatch 0 on stage 1."""
    spans = [Span(0, SpanKind.FORWARD, i, i + 1, stage=i, microbatch=0) for i in range(2)]
    assert as_grid(Trace.from_spans(spans, clock="ideal")) == ["0F0 1F0"]


def test_communication_and_waiting_are_no_compute():
    """Only compute is drawn, over the extent of the whole trace."""
    spans = [Span(0, SpanKind.FORWARD, 0, 10), Span(0, SpanKind.ALL_REDUCE, 10, 20), Span(0, SpanKind.WAIT, 10, 20)]
    assert as_grid(Trace.from_spans(spans, clock="ideal")) == ["F ."]


def test_a_trace_without_time_is_an_empty_line_for_each_rank():
    """No span, or none that lasts."""
    assert as_grid(Trace.from_spans([], clock=Clock.IDEAL, world_size=2)) == ["", ""]


def test_times_without_a_common_unit_are_sampled():
    """A year at odd nanoseconds does not become a million million cells."""
    year_ns = 31_536_000 * 10**9
    spans = [Span(0, SpanKind.FORWARD, 0, year_ns // 2), Span(0, SpanKind.BACKWARD, year_ns // 2 + 1, year_ns)]
    (row,) = as_grid(Trace.from_spans(spans, clock="wall"))
    assert row.split() == ["F"] * 40 + ["B"] * 40


@pytest.mark.parametrize("cell_s", [1e-12, 1e9])
def test_any_positive_cell_works(cell_s: float):
    """A cell below a nanosecond is one; a cell longer than the trace is one cell."""
    spans = [Span(0, SpanKind.FORWARD, 0, 4)]
    assert as_grid(Trace.from_spans(spans, clock="ideal"), cell_s=cell_s) in (["F F F F"], ["."])


@pytest.mark.parametrize("cell_s", [0, -1.0, math.nan, math.inf])
def test_a_cell_that_is_not_positive_is_refused(cell_s: float):
    """The message says what to do."""
    with pytest.raises(InvalidInputError) as error:
        as_grid(drawn(GPIPE), cell_s=cell_s)
    assert str(error.value) == (
        f"cell_s={cell_s!r}: must be positive and finite; leave it out for the largest exact cell"
    )


@given(traces())
def test_any_trace_has_a_line_for_each_rank(trace: Trace):
    """Overlapping, empty and huge traces too."""
    assert len(as_grid(trace)) == trace.world_size
