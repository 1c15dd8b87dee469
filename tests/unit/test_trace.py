"""The trace: immutable columns, one row a span, with the clock that the times are on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import spans, traces
from vizkit.errors import InvalidInputError
from vizkit.trace import (
    COLUMNS,
    COMMUNICATION_KINDS,
    COMPUTE_KINDS,
    KINDS,
    NONE,
    Clock,
    Counter,
    Role,
    Span,
    SpanKind,
    Trace,
)

FORWARD = Span(0, SpanKind.FORWARD, 0, 10, name="layer", stage=1, microbatch=2)
SEND = Span(1, SpanKind.SEND, 5, 9, payload_bytes=64, peer=0, operation=3)
TRACE = Trace.from_spans([FORWARD, SEND], clock=Clock.VIRTUAL, notes={"backend": "gloo"})


class TestKinds:
    """Kinds have a role, a code, and the names that people type."""

    @pytest.mark.parametrize(
        "kind, role",
        [
            ("F", "compute"),
            ("data", "compute"),
            ("barrier", "communication"),
            ("send", "communication"),
            ("wait", "wait"),
        ],
    )
    def test_each_kind_has_a_role(self, kind: str, role: str):
        """Which resource of a rank it occupies."""
        assert SpanKind(kind).role is Role(role)

    def test_every_kind_is_in_one_role(self):
        """Compute, communication and wait share out all kinds."""
        assert {*COMPUTE_KINDS, *COMMUNICATION_KINDS, SpanKind.WAIT} == set(SpanKind)
        assert len(COMPUTE_KINDS) + len(COMMUNICATION_KINDS) + 1 == len(SpanKind)

    @pytest.mark.parametrize("kind", SpanKind)
    def test_values_names_and_codes_lead_back(self, kind: SpanKind):
        """`F`, `FORWARD` and `forward` are one kind; its code is its place in `KINDS`."""
        assert {SpanKind.parse(text) for text in (kind.value, kind.name, kind.name.lower(), kind)} == {kind}
        assert KINDS[kind.code] is kind

    def test_an_unknown_kind_is_answered_with_the_known_ones(self):
        """All of them are listed."""
        with pytest.raises(InvalidInputError) as error:
            SpanKind.parse("forwards")
        assert str(error.value) == (
            "kind='forwards': is not a kind of span; use one of F, B, I, W, optimizer, compute, data, all_reduce, "
            "all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, barrier, send, receive, wait"
        )


class TestBuilding:
    """A trace is checked when it is built, so that nothing later has to be."""

    @given(st.lists(spans(), max_size=10))
    def test_the_spans_that_go_in_come_out(self, rows: list[Span]):
        """In order, by iteration and by index."""
        trace = Trace.from_spans(rows, clock="wall")
        assert list(trace) == rows
        assert [trace[i] for i in range(len(trace))] == rows
        assert trace.world_size == max((span.rank + 1 for span in rows), default=0)

    def test_columns_left_out_take_their_default(self):
        """What does not apply is −1 or empty."""
        trace = Trace.from_columns(clock="ideal", rank=[0], kind=[SpanKind.BACKWARD.code], start_ns=[1], end_ns=[2])
        assert trace[0] == Span(0, SpanKind.BACKWARD, 1, 2)
        assert trace[0].stage == NONE

    def test_a_million_spans_are_columns(self):
        """Built from arrays they take a few dozen bytes each, and filters give the right ones."""
        n = 1_000_000
        start = np.arange(n) * 100
        trace = Trace.from_columns(
            clock="wall", rank=np.arange(n) % 8, kind=np.arange(n) % len(KINDS), start_ns=start, end_ns=start + 60
        )
        assert len(trace) == n
        assert sum(column.nbytes for column in trace.columns.values()) < 80 * n
        assert len(trace.filter(rank=3)) == n / 8
        assert trace.filter(kind="F").kind.max() == SpanKind.FORWARD.code
        assert (trace.extent_ns, trace.world_size) == ((0, 100 * n - 40), 8)

    @pytest.mark.parametrize(
        "columns, message",
        [
            (
                {"rank": [0], "kind": [0], "start_ns": [5], "end_ns": [3]},
                "end_ns=3: a span ends before it starts at 5 (span 0, rank 0); swap the two",
            ),
            (
                {"rank": [0, 1], "kind": [0]},
                "kind=(1,): every column has 2 entries; give one value a span",
            ),
            (
                {"rank": [0], "colour": [1]},
                "column='colour': is not a column of a trace; use rank, kind, start_ns, end_ns, stage, microbatch, "
                "payload_bytes, peer, operation, name, group, algorithm, split_bytes",
            ),
            (
                {"rank": [2], "world_size": 2},
                "world_size=2: ranks run from 0 to 2; use world_size=3 or more",
            ),
            ({"rank": [0], "kind": [99]}, "kind=99: its table has 19 entries; give positions in that table"),
            (
                {"rank": [0], "name": [1], "tables": {"name": ["a"]}},
                "name=1: its table has 1 entries; give positions in that table",
            ),
        ],
    )
    def test_columns_that_do_not_fit_are_refused(self, columns: dict[str, Any], message: str):
        """The message says which, the rule and the remedy."""
        with pytest.raises(InvalidInputError) as error:
            Trace.from_columns(clock="ideal", **columns)
        assert str(error.value) == message

    def test_a_negative_rank_is_refused(self):
        """Ranks start at 0."""
        with pytest.raises(InvalidInputError, match="world_size"):
            Trace.from_columns(clock="ideal", rank=[-1])

    def test_an_unknown_clock_is_refused(self):
        """A time without a clock means nothing."""
        with pytest.raises(ValueError, match="'sundial' is not a valid Clock"):
            Trace.from_spans([], clock="sundial")

    def test_a_counter_counts_for_the_world_size(self):
        """A rank may have samples and no span."""
        counter = Counter("memory", 3, np.array([0]), np.array([1.0]))
        assert Trace.from_spans([], clock="wall", counters=[counter]).world_size == 4


class TestImmutability:
    """Nobody changes a trace under somebody else."""

    @pytest.mark.parametrize("column", COLUMNS)
    def test_columns_are_read_only(self, column: str):
        """Also after filter and shift."""
        for trace in (TRACE, TRACE.shift(1), TRACE.filter(rank=0), Trace.merge([TRACE, TRACE])):
            with pytest.raises(ValueError, match="read-only"):
                trace.columns[column][0] = 1

    def test_the_arrays_given_are_copied(self):
        """Changing them later changes nothing."""
        rank = np.array([0, 1])
        trace = Trace.from_columns(clock="ideal", rank=rank)
        rank[0] = 5
        assert trace.rank.tolist() == [0, 1]

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda trace: pickle.loads(pickle.dumps(trace))])
    def test_a_trace_can_be_copied_and_sent(self, duplicate: Callable[[Trace], Trace]):
        """Copies and pickles keep all."""
        again = duplicate(TRACE)
        assert list(again) == list(TRACE)
        assert (again.clock, again.world_size, again.notes) == (TRACE.clock, TRACE.world_size, TRACE.notes)

    def test_an_unknown_attribute_is_answered_with_the_columns(self):
        """A typo shows what there is."""
        with pytest.raises(
            AttributeError, match="Trace has no attribute 'ranks'; its columns are rank, kind, start_ns"
        ):
            TRACE.ranks  # noqa: B018


class TestFilter:
    """Filter keeps the order and everything beside the spans."""

    @given(traces(), st.data())
    def test_filter_keeps_exactly_the_spans_that_fit(self, trace: Trace, data: st.DataObject):
        """Conditions all have to hold; a single value is a list of one."""
        ranks = data.draw(st.lists(st.integers(0, 3), max_size=2))
        kinds = data.draw(st.lists(st.sampled_from(SpanKind), max_size=3))
        mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(trace), max_size=len(trace))), bool)
        kept = trace.filter(mask, rank=ranks, kind=kinds)
        expected = [s for s, m in zip(trace, mask, strict=True) if m and s.rank in ranks and s.kind in kinds]
        assert list(kept) == expected
        assert (kept.clock, kept.world_size, kept.notes) == (trace.clock, trace.world_size, trace.notes)
        assert all(counter.rank in ranks for counter in kept.counters)

    @given(traces())
    def test_filters_by_rank_share_out_the_trace(self, trace: Trace):
        """Every span is in the part of its rank."""
        assert sum(len(trace.filter(rank=rank)) for rank in range(trace.world_size)) == len(trace)

    def test_a_mask_of_the_wrong_length_is_refused(self):
        """One boolean a span."""
        with pytest.raises(InvalidInputError) as error:
            TRACE.filter(np.array([True]))
        assert str(error.value) == "mask=(1,): the trace has 2 spans; give one boolean a span"


class TestShift:
    """Shift moves all times by the same nanoseconds."""

    @given(traces(), st.integers(-(10**15), 10**15))
    def test_shift_moves_spans_and_counters(self, trace: Trace, offset_ns: int):
        """Durations and everything else stay."""
        moved = trace.shift(offset_ns)
        assert (moved.start_ns - trace.start_ns == offset_ns).all()
        assert (moved.end_ns - moved.start_ns == trace.end_ns - trace.start_ns).all()
        assert moved.duration_ns == trace.duration_ns
        for before, after in zip(trace.counters, moved.counters, strict=True):
            assert (after.times_ns - before.times_ns == offset_ns).all()

    @given(traces(), st.integers(-(10**15), 10**15))
    def test_shift_there_and_back_changes_nothing(self, trace: Trace, offset_ns: int):
        """Nanoseconds are whole numbers, so nothing rounds."""
        assert list(trace.shift(offset_ns).shift(-offset_ns)) == list(trace)


class TestMerge:
    """Merge puts runs side by side."""

    @given(st.lists(traces(clock=Clock.WALL), min_size=1, max_size=3))
    def test_merge_keeps_every_span_but_for_its_operation(self, parts: list[Trace]):
        """In order, with names and groups right though the tables differ."""
        merged = Trace.merge(parts)

        def without_operation(trace: Trace) -> list[tuple[Any, ...]]:
            return [tuple(getattr(s, c) for c in COLUMNS if c != "operation") for s in trace]

        assert without_operation(merged) == [row for part in parts for row in without_operation(part)]
        assert merged.world_size == max(part.world_size for part in parts)
        assert len(merged.counters) == sum(len(part.counters) for part in parts)

    @given(st.lists(traces(clock=Clock.WALL), min_size=1, max_size=3))
    def test_operations_of_different_runs_stay_apart(self, parts: list[Trace]):
        """Two spans share a number afterwards just where they are of one trace and shared it before."""
        before = [(i, op) if op != NONE else NONE for i, part in enumerate(parts) for op in part.operation.tolist()]
        after = Trace.merge(parts).operation.tolist()
        assert len(set(zip(before, after, strict=True))) == len(set(before)) == len(set(after))

    def test_notes_are_joined(self):
        """Facts of all parts; the later wins."""
        other = Trace.from_spans([], clock="virtual", notes={"backend": "nccl", "device": "cuda"})
        assert Trace.merge([TRACE, other]).notes == {"backend": "nccl", "device": "cuda"}

    @pytest.mark.parametrize(
        "clocks, found", [([], "[]"), (["wall", "ideal"], "['ideal', 'wall']")], ids=["none", "two clocks"]
    )
    def test_clocks_do_not_mix(self, clocks: list[str], found: str):
        """Wall time beside virtual time on one axis would be a lie."""
        with pytest.raises(InvalidInputError) as error:
            Trace.merge([Trace.from_spans([], clock=clock) for clock in clocks])
        assert str(error.value) == (
            f"traces={found}: must be one or more traces of one clock; replay or filter them to one clock first"
        )


class TestShowing:
    """What a reader sees."""

    def test_the_representation_has_the_clock(self):
        """Spans, ranks, milliseconds, clock."""
        assert repr(TRACE) == "Trace(2 spans, 2 ranks, 0.000 ms, clock='virtual')"

    @given(traces())
    def test_the_table_says_the_same_as_the_spans(self, trace: Trace):
        """One row a span, with kinds, names, groups and algorithms written out."""
        frame = trace.to_frame()
        assert list(frame.columns) == list(COLUMNS)
        assert list(frame.itertuples(index=False, name=None)) == [
            tuple(getattr(span, column) for column in COLUMNS) for span in trace
        ]

    def test_an_empty_trace_has_no_extent(self):
        """Not an error: a rank may have recorded nothing."""
        empty = Trace.from_spans([], clock="wall")
        assert (empty.extent_ns, empty.duration_ns, len(empty), list(empty)) == ((0, 0), 0, 0, [])
