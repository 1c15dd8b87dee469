"""Numbers about a trace: exact, and by the published definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import drawn, traces
from vizkit import collectives
from vizkit.errors import InvalidInputError
from vizkit.metrics import breakdown, bubble, peak_activations, straggler, traffic, traffic_over_time, utilisation
from vizkit.trace import COMPUTE_KINDS, NONE, Clock, Counter, Role, Span, SpanKind, Trace

K = SpanKind
GPIPE = {
    (2, 1): ["F0 .  .  B0", ".  F0 B0 ."],
    (3, 2): ["F0 F1 .  .  .  .  B0 B1", ".  F0 F1 .  .  B0 B1 .", ".  .  F0 F1 B0 B1 .  ."],
    (2, 4): ["F0 F1 F2 F3 .  .  B0 B1 B2 B3", ".  F0 F1 F2 F3 B0 B1 B2 B3 ."],
}
ONE_F_ONE_B = {
    (2, 3): ["F0 F1 .  B0 F2 B1 .  B2", ".  F0 B0 F1 B1 F2 B2 ."],
    (3, 3): [
        "F0 F1 F2 .  .  B0 .  B1 .  B2",
        ".  F0 F1 .  B0 F2 B1 .  B2 .",
        ".  .  F0 B0 F1 B1 F2 B2 .  .",
    ],
}


def covered(trace: Trace, rank: int, *roles: Role) -> set[int]:
    """The nanoseconds in which the rank has a span of one of these roles, one by one."""
    return {at for s in trace if s.rank == rank and s.kind.role in roles for at in range(s.start_ns, s.end_ns)}


class TestBreakdown:
    """Where each rank's time went."""

    @given(traces(longest_ns=60))
    def test_it_counts_every_nanosecond_right(self, trace: Trace):
        """Against sets of single nanoseconds."""
        parts = breakdown(trace)
        for rank in range(trace.world_size):
            compute = covered(trace, rank, Role.COMPUTE)
            communication = covered(trace, rank, Role.COMMUNICATION)
            assert parts.compute[rank] == len(compute)
            assert parts.communication[rank] == len(communication)
            assert parts.overlapped[rank] == len(compute & communication)
            assert parts.exposed_communication[rank] == len(communication - compute)
            assert parts.idle[rank] == trace.duration_ns - len(compute | communication)

    @given(traces(longest_ns=10**15, max_spans=30), st.integers(-(10**15), 10**15))
    def test_the_parts_add_up_to_the_span_and_do_not_move_with_the_clock(self, trace: Trace, offset_ns: int):
        """compute + exposed + idle = span and overlapped + exposed = communication, to the nanosecond."""
        parts, later = breakdown(trace), breakdown(trace.shift(offset_ns))
        assert (parts.compute + parts.exposed_communication + parts.idle == parts.span).all()
        assert (parts.overlapped + parts.exposed_communication == parts.communication).all()
        assert (parts.span == trace.duration_ns).all()
        for name in ("compute", "communication", "overlapped", "exposed_communication", "idle"):
            assert (getattr(parts, name) >= 0).all()
            assert (getattr(parts, name) == getattr(later, name)).all()

    def test_a_rank_without_a_span_is_idle(self):
        """From the first start of the trace to its last end."""
        parts = breakdown(Trace.from_spans([Span(0, K.FORWARD, 5, 15)], clock="wall", world_size=2))
        assert (parts.idle.tolist(), parts.span.tolist()) == ([0, 10], [10, 10])

    def test_a_wait_is_idle_unless_something_else_happens(self):
        """A blocked thread neither computes nor communicates."""
        trace = Trace.from_spans([Span(0, K.WAIT, 0, 10), Span(0, K.ALL_REDUCE, 4, 10)], clock="virtual")
        parts = breakdown(trace)
        assert (parts.exposed_communication[0], parts.idle[0]) == (6, 4)

    def test_a_million_spans_add_up(self):
        """On 8 ranks with overlaps; the parts are known by construction."""
        n = 1_000_000
        start = np.arange(n) // 8 * 100
        kind = np.where(np.arange(n) // 8 % 2 == 0, K.FORWARD.code, K.ALL_REDUCE.code)
        trace = Trace.from_columns(clock="wall", rank=np.arange(n) % 8, kind=kind, start_ns=start, end_ns=start + 120)
        parts = breakdown(trace)
        turns = n // 8
        assert parts.compute.tolist() == [turns // 2 * 120] * 8
        assert parts.communication.tolist() == [turns // 2 * 120] * 8
        assert parts.overlapped.tolist() == [(turns - 1) * 20] * 8
        assert parts.idle.tolist() == [0] * 8

    def test_it_reads_as_a_table_with_unit_and_clock(self):
        """In a terminal, in a notebook, and as pandas in nanoseconds."""
        parts = breakdown(Trace.from_spans([Span(0, K.FORWARD, 0, 1_500_000)], clock="virtual"))
        assert str(parts).splitlines() == [
            "milliseconds, virtual clock",
            "rank  compute  communication  overlapped  exposed communication   idle   span",
            "   0    1.500          0.000       0.000                  0.000  0.000  1.500",
        ]
        assert "<caption>milliseconds, virtual clock</caption>" in parts._repr_html_()
        assert "<tr><th>0</th><td>1.500</td>" in parts._repr_html_()
        frame = parts.to_frame()
        assert frame.index.name == "rank"
        assert frame.loc[0].to_dict() == {
            "compute_ns": 1_500_000,
            "communication_ns": 0,
            "overlapped_ns": 0,
            "exposed_communication_ns": 0,
            "idle_ns": 0,
            "span_ns": 1_500_000,
        }

    def test_times_too_far_apart_are_refused(self):
        """Two centuries on many ranks do not fit in 64 bits."""
        trace = Trace.from_spans([Span(3, K.FORWARD, 0, 2**61)], clock="wall")
        with pytest.raises(
            InvalidInputError, match="extent in nanoseconds times its ranks is over 2\\*\\*62; analyse a"
        ):
            breakdown(trace)


class TestBubble:
    """All three definitions, on schedules drawn by hand with one unit for F and one for B."""

    @pytest.mark.parametrize("rows", [*GPIPE.items(), *ONE_F_ONE_B.items()], ids=str)
    def test_gpipe_and_1f1b_have_the_published_bubble(self, rows: tuple[tuple[int, int], list[str]]):
        """(p − 1) / (m + p − 1) over the total and over the first rank, (p − 1) / m over the ideal."""
        (p, m), grid = rows
        found = bubble(drawn(grid))
        assert found.over_longest_rank == found.over_total
        assert found.over_total == pytest.approx((p - 1) / (m + p - 1), rel=1e-15)
        assert found.over_ideal == pytest.approx((p - 1) / m, rel=1e-15)

    def test_without_compute_it_is_undefined(self):
        """Neither all of the time nor none of it."""
        found = bubble(Trace.from_spans([], clock="ideal", world_size=2))
        assert math.isnan(found.over_total)
        assert str(found) == "bubble: undefined, as no rank computes"

    @given(traces())
    def test_the_definitions_belong_together(self, trace: Trace):
        """over_total = over_ideal / (1 + over_ideal); the longest rank takes no longer than all."""
        found = bubble(trace)
        if math.isnan(found.over_total):
            assert breakdown(trace).compute.sum() == 0
            assert math.isnan(found.over_ideal)
            assert math.isnan(found.over_longest_rank)
        else:
            assert 0 <= found.over_longest_rank <= found.over_total < 1
            assert found.over_total == pytest.approx(found.over_ideal / (1 + found.over_ideal), abs=1e-12)

    @given(traces(longest_ns=60))
    def test_the_longest_rank_is_found_right(self, trace: Trace):
        """Against sets of single nanoseconds."""
        computing = [covered(trace, rank, Role.COMPUTE) for rank in range(trace.world_size)]
        longest = max((max(c) + 1 - min(c) for c in computing if c), default=0)
        if longest:
            ideal = sum(map(len, computing)) / trace.world_size
            assert bubble(trace).over_longest_rank == pytest.approx((longest - ideal) / longest, abs=1e-12)

    def test_what_takes_no_time_is_no_compute(self):
        """A rank is busy from 5 ns on, whatever it did for no time before."""
        trace = Trace.from_spans([Span(0, SpanKind.FORWARD, 0, 0), Span(0, SpanKind.FORWARD, 5, 10)], clock="ideal")
        assert bubble(trace).over_longest_rank == 0
        assert bubble(trace).over_total == 0.5

    def test_a_skew_between_ranks_is_no_bubble_of_the_longest_rank(self):
        """Each rank is busy from its first compute to its last, one later than the other."""
        found = bubble(drawn(["F0 B0 .", ".  F0 B0"]))
        assert (found.over_longest_rank, found.over_ideal) == (0, 0.5)

    def test_exposed_communication_counts_as_bubble(self):
        """The rank does not compute then."""
        trace = Trace.from_spans([Span(0, K.FORWARD, 0, 30), Span(0, K.ALL_REDUCE, 20, 40)], clock="ideal")
        assert bubble(trace).over_total == 0.25

    def test_it_names_both(self):
        """Never just "bubble"."""
        assert str(bubble(drawn(GPIPE[2, 1]))) == "bubble: 50.0% of the total time, 100.0% of the ideal time"


class TestPeakActivations:
    """The most that each rank holds."""

    def test_it_reads_the_counters_of_activations_only(self):
        """A rank without one holds nothing."""
        times = np.array([0, 5, 9])
        counters = [
            Counter("activations", 0, times, np.array([1.0, 2.5, 0.0])),
            Counter("memory", 0, times, np.array([9.0, 9.0, 9.0])),
        ]
        trace = Trace.from_spans([Span(0, K.FORWARD, 0, 10)], clock="ideal", world_size=2, counters=counters)
        assert peak_activations(trace).tolist() == [2.5, 0.0]

    def test_a_trace_without_counters_is_refused(self):
        """Zero would be a lie."""
        with pytest.raises(InvalidInputError, match="has no counter named activations, and no passes with stage and"):
            peak_activations(drawn(GPIPE[2, 1]))


class TestUtilisation:
    """The share of ranks that compute, over time."""

    def test_gpipe_fills_and_drains(self):
        """One rank after the other starts, one after the other ends."""
        trace = drawn(GPIPE[3, 2], cell_ns=10)
        assert utilisation(trace, np.arange(9) * 10) * 3 == pytest.approx([1, 2, 2, 1, 1, 2, 2, 1])

    @given(traces(longest_ns=60), st.sets(st.integers(-10, 80), min_size=2))
    def test_it_averages_over_each_bin(self, trace: Trace, edges: set[int]):
        """Against sets of single nanoseconds, also outside the trace."""
        times = sorted(edges)
        computing = [covered(trace, rank, Role.COMPUTE) for rank in range(trace.world_size)]
        expected = [
            sum(len(c & set(range(a, b))) for c in computing) / ((b - a) * trace.world_size)
            for a, b in itertools.pairwise(times)
        ]
        assert utilisation(trace, np.array(times)).tolist() == pytest.approx(expected)

    @given(traces(longest_ns=10**15))
    def test_over_the_whole_trace_it_is_the_share_of_compute(self, trace: Trace):
        """One bin: what the breakdown says."""
        if trace.duration_ns:
            (share,) = utilisation(trace, trace.extent_ns)
            total = trace.duration_ns * trace.world_size
            assert share == pytest.approx(breakdown(trace).compute.sum() / total, rel=1e-12)

    @pytest.mark.parametrize(
        "times", [[], [5], [3, 3], [4, 2], [0.0, math.nan], [0.0, math.inf], [0.0, 1e30], ["a", "b"]]
    )
    def test_edges_that_do_not_increase_are_refused(self, times: list[int]):
        """A bin has a width."""
        with pytest.raises(InvalidInputError) as error:
            utilisation(drawn(GPIPE[2, 1]), times)
        assert str(error.value) == (
            f"times_ns={times}: bin edges are two or more and increase; use numpy.linspace over the extent"
        )


def collective(kind: SpanKind, n: int = 4, at: int = 0, **fields) -> list[Span]:
    """One collective as all of its ranks record it."""
    return [Span(rank, kind, at, at + 10, **fields) for rank in range(n)]


class TestTraffic:
    """Bytes from rank to rank."""

    @pytest.mark.parametrize("backend", ["gloo", "nccl", ""])
    @pytest.mark.parametrize("kind", [k for k in collectives.DEFAULT_ALGORITHMS if k is not K.BARRIER])
    def test_a_collective_costs_what_its_algorithm_says(self, kind: SpanKind, backend: str):
        """By the algorithm that the backend uses, for any root, counted once."""
        trace = Trace.from_spans(
            collective(kind, payload_bytes=1001, operation=7, peer=2), clock="wall", notes={"backend": backend}
        )
        expected = collectives.wire_bytes(kind, collectives.algorithm_for(kind, backend), 4, 1001, root=2)
        found = traffic(trace)
        np.testing.assert_array_equal(found.wire_bytes, expected)
        assert (found.payload_bytes, found.operations) == (1001, 1)

    def test_the_algorithm_of_the_span_comes_first(self):
        """A span that says how it went is believed."""
        spans = collective(K.ALL_REDUCE, payload_bytes=100, operation=0, algorithm="tree")
        expected = collectives.wire_bytes("all_reduce", "tree", 4, 100)
        np.testing.assert_array_equal(traffic(Trace.from_spans(spans, clock="wall")).wire_bytes, expected)

    def test_ddps_bytes_are_two_times_n_minus_one_over_n_of_the_parameters(self):
        """Three buckets, four ranks."""
        spans = [
            s
            for i, size in enumerate((4000, 2000, 400))
            for s in collective(K.ALL_REDUCE, payload_bytes=size, operation=i, at=i)
        ]
        found = traffic(Trace.from_spans(spans, clock="wall"))
        assert found.wire_bytes.sum(axis=1).tolist() == [2 * 3 / 4 * 6400] * 4
        assert (found.payload_bytes, found.operations) == (6400, 3)

    def test_a_subgroup_talks_among_itself(self):
        """Root and edges are global ranks, in the group's order."""
        spans = [Span(rank, K.BROADCAST, 0, 1, payload_bytes=8, peer=3, group=(3, 1), operation=0) for rank in (1, 3)]
        found = traffic(Trace.from_spans(spans, clock="wall")).wire_bytes
        assert found[3, 1] == found.sum() == 8

    def test_a_message_counts_once_at_its_sender(self):
        """The receive adds nothing; a receive alone shows no bytes."""
        send = Span(0, K.SEND, 0, 5, payload_bytes=64, peer=1, operation=0)
        receive = Span(1, K.RECEIVE, 0, 6, payload_bytes=64, peer=0, operation=0)
        both = traffic(Trace.from_spans([send, receive], clock="wall"))
        assert both.wire_bytes.tolist() == [[0, 64], [0, 0]]
        assert (both.payload_bytes, both.operations) == (64, 1)
        assert traffic(Trace.from_spans([receive], clock="wall")).total_wire_bytes == 0

    def test_an_uneven_all_to_all_sends_its_splits(self):
        """Each rank's own row; what it keeps stays off the wire."""
        spans = [
            Span(rank, K.ALL_TO_ALL, 0, 1, payload_bytes=sum(row), operation=0, split_bytes=row)
            for rank, row in enumerate([(1, 2), (30, 40)])
        ]
        found = traffic(Trace.from_spans(spans, clock="wall"))
        assert found.wire_bytes.tolist() == [[0, 2], [30, 0]]
        assert found.payload_bytes == 70

    def test_spans_without_a_number_count_once_for_each_group(self):
        """As in files that no recorder numbered: on the lowest rank that is there."""
        spans = [*collective(K.ALL_REDUCE, payload_bytes=100), *collective(K.ALL_REDUCE, payload_bytes=100, at=50)]
        trace = Trace.from_spans(spans, clock="wall")
        for part in (trace, trace.filter(rank=[2, 3])):
            assert (traffic(part).operations, traffic(part).payload_bytes) == (2, 200)
        assert all(span.operation == NONE for span in trace)

    @given(
        st.lists(st.tuples(st.sampled_from(list(collectives.DEFAULT_ALGORITHMS)), st.integers(0, 10**9)), max_size=8)
    )
    def test_the_ranks_parts_add_up_to_the_whole(self, operations: list[tuple[SpanKind, int]]):
        """A rank's row comes from its own spans, so that a trace of one rank tells what that rank sent."""
        spans = [
            s
            for i, (kind, size) in enumerate(operations)
            for s in collective(kind, payload_bytes=size, operation=i, peer=i % 4)
        ]
        trace = Trace.from_spans(spans, clock="wall", world_size=4, notes={"backend": "gloo"})
        whole = traffic(trace)
        parts = [traffic(trace.filter(rank=rank)).wire_bytes for rank in range(4)]
        np.testing.assert_array_equal(sum(parts), whole.wire_bytes)
        for rank, part in enumerate(parts):
            assert np.delete(part, rank, axis=0).sum() == 0
        assert sum(p.wire_bytes.sum() for p in whole.by_kind.values()) == whole.total_wire_bytes
        assert whole.payload_bytes == sum(p.payload_bytes for p in whole.by_kind.values())
        assert whole.operations == len(operations)

    @given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 10**6)), max_size=8), st.lists(st.integers(0, 120)))
    def test_over_time_the_bytes_add_up(self, messages: list[tuple[int, int]], times: list[int]):
        """Whatever has ended by then; at the end, all; in any order of times."""
        spans = [
            Span(0, K.SEND, 0, end, payload_bytes=size, peer=1, operation=i) for i, (end, size) in enumerate(messages)
        ]
        trace = Trace.from_spans(spans, clock="ideal", world_size=2)
        found = traffic_over_time(trace, np.array([*times, 100]))
        assert found.shape == (len(times) + 1, 2, 2)
        assert found[:, 0, 1].tolist() == [sum(s for e, s in messages if e <= t) for t in (*times, 100)]
        np.testing.assert_array_equal(found[-1], traffic(trace).wire_bytes)

    def test_it_reads_as_a_table_by_kind(self):
        """As text and as pandas."""
        found = traffic(
            Trace.from_spans(
                [
                    *collective(K.ALL_REDUCE, payload_bytes=1000, operation=0),
                    Span(0, K.SEND, 0, 1, payload_bytes=24, peer=1, operation=1),
                ],
                clock="wall",
            )
        )
        assert str(found).splitlines() == [
            "all_reduce: 1 operations, 1,000 payload bytes, 6,000 bytes on the wire",
            "send: 1 operations, 24 payload bytes, 24 bytes on the wire",
            "total: 2 operations, 1,024 payload bytes, 6,024 bytes on the wire",
        ]
        assert found.to_frame().loc["all_reduce"].to_dict() == {
            "operations": 1,
            "payload_bytes": 1000,
            "wire_bytes": 6000,
        }

    def test_a_trace_without_communication_has_no_traffic(self):
        """Zeros of the right shape."""
        empty = traffic(Trace.from_spans([], clock="wall", world_size=3))
        assert (empty.wire_bytes.tolist(), empty.payload_bytes, empty.by_kind) == ([[0] * 3] * 3, 0, {})

    @pytest.mark.parametrize(
        "span, message",
        [
            (
                Span(1, K.SEND, 0, 1),
                "peer=-1: a send of rank 1 goes to a rank from 0 to 1; give the receiver's global rank",
            ),
            (
                Span(1, K.ALL_REDUCE, 0, 1, group=(0, 2)),
                "group=(0, 2): must hold rank 1, whose span it is, and ranks below 2 only; "
                "give the global ranks that took part",
            ),
        ],
    )
    def test_spans_that_cannot_be_are_refused(self, span: Span, message: str):
        """A send needs a receiver, a collective its own rank."""
        with pytest.raises(InvalidInputError) as error:
            traffic(Trace.from_spans([span], clock="wall"))
        assert str(error.value) == message


class TestStraggler:
    """The rank that the others wait for."""

    @staticmethod
    def steps(compute_ns: list[list[int]], clock: str) -> Trace:
        """Steps of compute, each with an all-reduce of 10 ns that starts with its last rank."""
        spans, now = [], 0
        for operation, durations in enumerate(compute_ns):
            begin = now + max(durations)
            for rank, duration in enumerate(durations):
                arrived = now + duration
                started = begin if clock == "virtual" else arrived
                spans += [
                    Span(rank, K.FORWARD, now, arrived),
                    Span(rank, K.WAIT, arrived, begin + 10, operation=operation),
                    Span(rank, K.ALL_REDUCE, started, begin + 10, operation=operation),
                ]
            now = begin + 10
        return Trace.from_spans(spans, clock=clock)

    @pytest.mark.parametrize("clock", ["wall", "virtual"])
    def test_the_slow_rank_is_found_with_what_it_cost(self, clock: str):
        """Rank 2 is last twice, rank 0 once."""
        found = straggler(self.steps([[50, 50, 90, 50], [60, 50, 50, 50], [50, 50, 90, 50]], clock))
        assert found is not None
        assert (found.rank, found.last_in, found.operations, found.clock) == (2, 2, 3, Clock(clock))
        assert found.lost_by_rank_s == pytest.approx((80e-9, 80e-9, 0, 80e-9))
        assert (found.lost_s, found.waits_s) == pytest.approx((240e-9, 10e-9))
        assert found.share == pytest.approx(230 / (3 * 270))
        assert str(found) == (
            f"rank 2: the others lost 240 ns waiting for it ({clock} clock), "
            "which was last at 2 of 3 operations that ranks waited for"
        )

    @pytest.mark.parametrize("clock", ["wall", "virtual"])
    @pytest.mark.parametrize(
        "compute_ns",
        [
            [[50, 50, 50]] * 3,
            [[500, 501, 500]],
            [[90, 50], [50, 90]],
            [[90, 50, 50], [50, 90, 50], [50, 50, 90]],
        ],
        ids=["equal", "too little", "in turns", "in turns of three"],
    )
    def test_where_nobody_is_slow_there_is_none(self, compute_ns: list[list[int]], clock: str):
        """Equal ranks, a difference below one percent, or everybody's turn."""
        assert straggler(self.steps(compute_ns, clock)) is None

    def test_waiting_that_overlaps_with_work_is_no_loss(self):
        """An asynchronous all-reduce that nobody waited for blames nobody."""
        spans = [
            Span(0, K.FORWARD, 0, 100),
            Span(0, K.ALL_REDUCE, 80, 90, operation=0),
            Span(0, K.WAIT, 100, 100, operation=0),
            Span(1, K.FORWARD, 0, 80),
            Span(1, K.ALL_REDUCE, 80, 90, operation=0),
            Span(1, K.WAIT, 80, 90, operation=0),
        ]
        assert straggler(Trace.from_spans(spans, clock="virtual")) is None

    def test_waiting_for_a_busy_link_blames_nobody(self):
        """Two all-reduces in flight: both ranks wait until the first lets the second start."""
        spans = [
            span
            for rank in (0, 1)
            for span in (
                Span(rank, K.FORWARD, 0, 50),
                Span(rank, K.ALL_REDUCE, 50, 90, operation=0),
                Span(rank, K.WAIT, 50, 130, operation=1),
                Span(rank, K.ALL_REDUCE, 90, 130, operation=1),
            )
        ]
        assert straggler(Trace.from_spans(spans, clock="virtual")) is None

    def test_behind_a_busy_link_only_the_difference_counts(self):
        """Rank 1 begins to wait 10 ns after rank 0; the link is busy for longer than that."""
        spans = [
            span
            for rank, arrival in enumerate((50, 60))
            for span in (
                Span(rank, K.FORWARD, 0, arrival),
                Span(rank, K.WAIT, arrival, 130, operation=1),
                Span(rank, K.ALL_REDUCE, 90, 130, operation=1),
            )
        ]
        found = straggler(Trace.from_spans(spans, clock="virtual"))
        assert found is not None
        assert (found.rank, found.lost_by_rank_s) == (1, (10e-9, 0))

    def test_a_receiver_waits_for_its_sender(self):
        """A message is an operation like any other."""
        spans = [
            Span(0, K.FORWARD, 0, 100),
            Span(0, K.SEND, 100, 110, peer=1, operation=0),
            Span(1, K.WAIT, 0, 110, operation=0),
            Span(1, K.RECEIVE, 100, 110, peer=0, operation=0),
        ]
        found = straggler(Trace.from_spans(spans, clock="virtual"))
        assert found is not None
        assert (found.rank, found.lost_by_rank_s) == (0, (0, 100e-9))

    def test_without_wait_spans_the_starts_tell(self):
        """As in a profiler's file."""
        trace = self.steps([[50, 90]], "wall")
        found = straggler(trace.filter(~trace.is_kind("wait")))
        assert found is not None
        assert (found.rank, found.lost_by_rank_s) == (1, (40e-9, 0))

    @given(traces())
    def test_any_trace_has_an_answer(self, trace: Trace):
        """Also one that makes no sense; what is found waited less than the others did for it."""
        found = straggler(trace)
        assert found is None or (found.lost_s > found.waits_s and 0 <= found.rank < trace.world_size)


def test_every_compute_kind_counts_as_compute():
    """Optimizer and data too."""
    for kind in COMPUTE_KINDS:
        assert breakdown(Trace.from_spans([Span(0, kind, 0, 7)], clock="ideal")).compute.tolist() == [7]
