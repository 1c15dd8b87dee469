"""Peak memory by category: the moment of the largest sum, each category's own peak, and nothing lost on the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vizkit as vk
from tests.unit.test_chrome import assert_same
from vizkit.lanes import Label
from vizkit.memory_samples import CATEGORIES, MemorySamples, rows_to_keep
from vizkit.metrics import peak_memory
from vizkit.record import RankRecord, Record, SpanClosed, SpanOpened, wall_trace
from vizkit.replay import replay
from vizkit.trace import Counter, Span, SpanKind, Trace

ROWS = [  # parameters, gradients, optimizer, activations
    (100, 0, 0, 0),
    (100, 0, 0, 70),
    (100, 30, 0, 60),
    (100, 80, 0, 0),
    (100, 80, 5, 0),
]

NO_MODEL = "is neither a module, nor a pipeline, nor a list of modules; give the nn.Module that trains"
NO_OPTIMIZER = "is neither an optimizer nor a list of them; give the torch.optim.Optimizer that steps, or None"


def traced(*rows_by_rank: list[tuple[int, ...]], times: list[int] | None = None) -> Trace:
    counters = []
    for rank, rows in enumerate(rows_by_rank):
        when = np.array(times if times is not None else range(0, 10 * len(rows), 10), np.int64)
        counters += MemorySamples(when, np.array(rows, np.int64)).counters(rank, when)
    return Trace.from_spans([Span(0, "F", 0, 100)], clock="virtual", world_size=len(rows_by_rank), counters=counters)


samples = st.lists(st.tuples(*[st.integers(0, 1_000)] * 4), min_size=1, max_size=80)


class TestPeak:
    def test_the_moment_of_the_largest_sum(self):
        """190 bytes at 20 ns; each category's own peak at its own moment."""
        found = peak_memory(traced(ROWS))
        assert (found.total_bytes.tolist(), found.times_ns.tolist()) == ([190], [20])
        assert found.of(0) == {"parameters": 100, "gradients": 30, "optimizer": 0, "activations": 60}
        assert found.highest_of(0) == {"parameters": 100, "gradients": 80, "optimizer": 5, "activations": 70}

    def test_samples_at_one_moment_all_count(self):
        """Given durations may put many samples on one virtual nanosecond."""
        assert peak_memory(traced(ROWS, times=[7] * len(ROWS))).total_bytes.tolist() == [190]

    def test_counters_with_times_of_their_own_hold_between_samples(self):
        """As those of another program's file: 5 + 40 at 3 ns."""
        counters = [
            Counter("parameters", 0, np.array([0, 9]), np.array([5, 1])),
            Counter("activations", 0, np.array([3, 4]), np.array([40, 2])),
        ]
        found = peak_memory(Trace.from_spans([], clock="wall", counters=counters))
        assert (found.of(0)["parameters"], found.of(0)["activations"], int(found.times_ns[0])) == (5, 40, 3)

    def test_ranks_that_nobody_tracked_have_zeros(self):
        """Also where there is a counter in another unit, as simulated pipelines have."""
        microbatches = Counter("activations", 2, np.array([0]), np.array([3.0]), unit="microbatches")
        trace = Trace.from_spans([], clock="ideal", world_size=3, counters=[*traced(ROWS).counters, microbatches])
        assert peak_memory(trace).total_bytes.tolist() == [190, 0, 0]

    def test_in_words_and_as_a_table(self):
        found = peak_memory(traced(ROWS, [(0, 0, 0, 2_500)]))
        assert str(found).splitlines() == [
            "peak memory of tensors by rank, at the moment of each rank's largest sum",
            "rank  parameters  gradients  optimizer  activations     sum",
            "   0       100 B       30 B        0 B         60 B   190 B",
            "   1         0 B        0 B        0 B       2.5 kB  2.5 kB",
        ]
        frame = found.to_frame()
        assert frame.loc[0].to_dict() == {
            "parameters_bytes": 100, "gradients_bytes": 30, "optimizer_bytes": 0, "activations_bytes": 60,
            "total_bytes": 190, "highest_parameters_bytes": 100, "highest_gradients_bytes": 80,
            "highest_optimizer_bytes": 5, "highest_activations_bytes": 70,
        }  # fmt: skip
        assert "<td>2.5 kB</td>" in found._repr_html_()
        assert repr(found) == str(found)

    @given(samples)
    def test_the_largest_sum_is_at_most_the_sum_of_the_peaks(self, rows: list[tuple[int, ...]]):
        found = peak_memory(traced(rows))
        assert int(found.total_bytes[0]) == max(map(sum, rows)) <= int(found.highest[0].sum())


class TestSamples:
    @given(samples, st.integers(6, 40))
    def test_thinning_keeps_every_peak(self, rows: list[tuple[int, ...]], limit: int):
        """Of each category and of the sum; in order, the last row too, and never more than the limit."""
        table = np.array(rows)
        kept = rows_to_keep(table, limit)
        assert len(kept) <= limit
        assert (np.diff(kept) > 0).all()
        assert kept[-1] == len(rows) - 1
        assert (table[kept].max(0) == table.max(0)).all()
        assert table[kept].sum(1).max() == table.sum(1).max()

    def record(self) -> Record:
        """A span from 1,000 to 3,000 ns on the wall clock that took 100 ns of CPU; samples half way and at its end."""
        stamps = [
            {"before_ns": work, "after_ns": work, "start_wall_ns": wall, "end_wall_ns": wall}
            for wall, work in ((1_000, 0), (3_000, 100))
        ]
        events = (SpanOpened(label=Label(SpanKind.FORWARD, "forward"), **stamps[0]), SpanClosed(**stamps[1]))
        tensors = MemorySamples(np.array([2_000, 3_000]), np.array([[1, 2, 3, 4], [5, 6, 7, 8]]))
        return Record((
            RankRecord(rank=0, events=events, start_ns=0, end_ns=100, start_wall_ns=1_000, end_wall_ns=3_000,
                       tensors=tensors),
        ))  # fmt: skip

    def test_both_clocks_have_the_counters(self, tmp_path: Path):
        """At the same place between the same events; and a file brings them back."""
        wall, virtual = wall_trace(self.record()), replay(self.record())
        for trace, times in ((wall, [1_000, 2_000]), (virtual, [50, 100])):
            assert [counter.name for counter in trace.counters] == list(CATEGORIES)
            assert [counter.values.tolist() for counter in trace.counters] == [[1, 5], [2, 6], [3, 7], [4, 8]]
            assert all(counter.times_ns.tolist() == times for counter in trace.counters)
            assert_same(vk.read_trace(vk.write_chrome_trace(trace, tmp_path / "run.json")), trace)


class TestTrackMemory:
    def test_it_does_nothing_outside_a_rank(self):
        """The same cell runs in the notebook itself."""
        import torch

        layer = torch.nn.Linear(2, 2)
        with vk.track_memory(layer, torch.optim.SGD(layer.parameters())):
            layer(torch.ones(1, 2)).sum().backward()
        assert not layer._forward_pre_hooks

    @pytest.mark.parametrize(
        "model, optimizer, message",
        [
            ("a model", None, f"model='str': {NO_MODEL}"),
            (None, None, f"model='NoneType': {NO_MODEL}"),
            ([3], None, f"model='int': {NO_MODEL}"),
            ([], 0.1, f"optimizer='float': {NO_OPTIMIZER}"),
        ],
    )
    def test_something_else_is_refused(self, model: object, optimizer: object, message: str):
        with pytest.raises(vk.InvalidInputError) as error:
            vk.track_memory(model, optimizer)
        assert str(error.value) == message

    def test_time_that_is_left_out_is_no_work(self):
        """The tracker's own CPU time does not pass on the work clock, which still never runs back."""
        from vizkit.runtime.clocks import CpuClock

        clock = CpuClock()
        first = clock.read()
        while clock.read() < first + 2_000_000:
            pass
        clock.leave_out(1_500_000)
        assert first < clock.read() < first + 2_000_000
