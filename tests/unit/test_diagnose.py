"""What a diagnosis says about traces from everywhere: by hand, simulated, replayed, of a profiler, empty."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vizkit as vk
from tests import handmade
from tests.renumbered import renumbered
from tests.strategies import traces
from vizkit.errors import InvalidInputError
from vizkit.findings import RULES, Finding, FindingKind, diagnose
from vizkit.findings.evidence import Evidence, Machine
from vizkit.findings.imbalance import imbalance
from vizkit.findings.straggler import straggler
from vizkit.fingerprints import Fingerprint, Noted, counters_of
from vizkit.record import Record
from vizkit.replay import replay
from vizkit.trace import Clock, Span, Trace

K = FindingKind
MS = 1_000_000
KINETO = Path(__file__).parents[3] / "shared" / "data" / "kineto"


def test_nothing_found_is_false_and_says_so():
    diagnosis = diagnose(Trace.from_spans([], clock="wall"))
    assert not diagnosis
    assert str(diagnosis) == f"nothing found: {len(RULES)} rules, 0 ranks, 0 s on the wall clock"
    assert "✓" in diagnosis._repr_html_()


def test_a_finding_tells_cost_clock_evidence_and_remedy():
    late = [
        span
        for rank, computes in enumerate((10, 10, 40))
        for span in (
            Span(rank, "F", 0, computes * MS),
            Span(rank, "wait", computes * MS, 41 * MS, operation=0),
            Span(rank, "all_reduce", 40 * MS, 41 * MS, operation=0),
        )
    ]
    diagnosis = diagnose(Trace.from_spans(late, clock="virtual"))
    assert diagnosis
    assert len(diagnosis) == 1
    assert str(diagnosis) == "\n".join(
        [
            "1 finding, most costly first; 3 ranks, 41 ms on the virtual clock",
            "1. straggler (20 ms a rank, virtual clock): the other ranks wait for rank 2: 49% of the time",
            "  evidence: rank 2 was last in 1 of 1 collectives at which ranks waited; it computed 40 ms, the others "
            "10 ms on the mean",
            "  remedy: look at what rank 2 alone does (evaluation, checkpoints, logging), at its cores, clock and "
            "neighbours; move that work to all ranks, or the rank to another device",
        ]
    )
    assert diagnosis[0].ranks == (2,)
    assert "<ol><li><b>straggler (20 ms a rank, virtual clock)</b>: the other" in diagnosis._repr_html_()


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "bubble"),
    [("GPipe", 4, 8, 3 / 11), ("1F1B", 4, 8, 3 / 11), ("1F1B", 2, 4, 1 / 5), ("GPipe", 4, 64, None)],
)
def test_a_simulated_pipeline_has_the_bubble_of_the_formula(name, ranks, microbatches, bubble):
    """(p − 1)/(m + p − 1) of the makespan; 3/67 is under the 5 % from which a cost is told."""
    ideal = vk.simulate(vk.schedule(name, num_ranks=ranks, num_microbatches=microbatches), vk.Durations(F=1, B=2))
    diagnosis = diagnose(ideal)
    if bubble is None:
        assert not diagnosis
        return
    (finding,) = diagnosis
    assert finding.kind is K.BUBBLE
    assert finding.cost_s / (ideal.duration_ns / 1e9) == pytest.approx(bubble)
    assert f"{bubble:.1%} for GPipe and 1F1B with equal stages; here {bubble:.1%}" in finding.evidence


def test_enough_microbatches_are_enough():
    """The number that the remedy names brings the bubble to 5 %."""
    (finding,) = diagnose(vk.simulate(vk.schedule("1F1B", num_ranks=4, num_microbatches=8), vk.Durations(F=1, B=2)))
    assert finding.remedy.startswith("use 57 microbatches for 5%")
    assert 3 / (57 + 3) == 0.05


def test_unequal_stages_are_no_bubble():
    """One stage of three takes double, with many microbatches: all idle time is imbalance, 2 − 4/3 of each unit."""
    schedule = vk.schedule("1F1B", num_ranks=3, num_microbatches=128)
    ideal = vk.simulate(schedule, vk.Durations(F=[1, 2, 1], B=[2, 4, 2]))
    (finding,) = diagnose(ideal)
    assert (finding.kind, finding.ranks) == (K.IMBALANCE, (1,))
    assert finding.cost_s == pytest.approx(128 * (6 - 4))


def all_reduces(num: int, kilobytes: list[int], latency_ms: float, ms_a_kilobyte: float) -> Trace:
    spans, now = [], 0
    for i in range(num):
        payload = kilobytes[i % len(kilobytes)]
        end = now + round((latency_ms + ms_a_kilobyte * payload) * MS)
        spans += [Span(rank, "all_reduce", now, end, payload_bytes=payload * 1000, operation=i) for rank in (0, 1)]
        now = end
    return Trace.from_spans([Span(0, "B", 0, 1), Span(1, "B", 0, 1), *spans], clock="wall")


@pytest.mark.parametrize(
    ("num", "latency_ms", "ms_a_kilobyte", "kinds"),
    [
        (8, 1, 0.01, {K.SMALL_BUCKETS}),
        (8, 0.01, 1, {K.EXPOSED_COMMUNICATION}),
        (2, 1, 0.01, {K.EXPOSED_COMMUNICATION}),
    ],
    ids=["latency dominates", "transfer dominates", "too few to join"],
)
def test_small_buckets_are_told_by_a_line_through_measured_times(num, latency_ms, ms_a_kilobyte, kinds):
    """Without a known link: durations of different payloads give latency (where the line begins) and transfer."""
    diagnosis = diagnose(all_reduces(num, [1, 3], latency_ms, ms_a_kilobyte))
    assert set(diagnosis.kinds) == kinds
    if K.SMALL_BUCKETS in kinds:
        (finding,) = diagnosis.of(K.SMALL_BUCKETS)
        assert "2 kB on the mean; each takes 1 ms of latency and 20 µs of transfer; 8 a step" in finding.evidence
        assert finding.cost_s == pytest.approx(8e-3, rel=0.01)


def test_equal_payloads_without_a_link_tell_nothing_about_latency():
    assert diagnose(all_reduces(8, [1], 1, 0.01)).kinds == (K.EXPOSED_COMMUNICATION,)


def test_waiting_for_a_late_rank_is_no_communication():
    """On the wall clock a collective lasts from its posting on: until the last rank comes, that is waiting."""
    spans = [Span(0, "F", 0, 10), Span(0, "all_reduce", 10, 100, operation=0)]
    spans += [Span(1, "F", 0, 99), Span(1, "all_reduce", 99, 100, operation=0)]
    diagnosis = diagnose(Trace.from_spans(spans, clock="wall"))
    assert diagnosis.kinds == (K.STRAGGLER,)
    assert diagnosis[0].cost_s == pytest.approx(89e-9 / 2)


def noted(name: str, rows: list[list[int]], same: bool = True) -> Trace:
    """`rows[step][rank]` is the hash; step s is noted at second s + 1 of a run that lasts a second longer."""
    notes = [
        Noted(rank, (step + 1) * 1000 * MS, Fingerprint(name, step, value, same))
        for step, row in enumerate(rows)
        for rank, value in enumerate(row)
    ]
    ranks = range(len(rows[0]))
    spans = [Span(rank, "F", 0, (len(rows) + 1) * 1000 * MS) for rank in ranks]
    return Trace.from_spans(spans, clock="wall", counters=counters_of(notes))


@pytest.mark.parametrize(
    ("rows", "ranks", "cost_s", "what"),
    [
        ([[1, 1, 1], [2, 2, 2], [3, 3, 4]], (2,), 2, "weights of rank 2 differ from the others' from step 2 on"),
        ([[1, 1, 2], [1, 1, 1]], (2,), 3, "weights of rank 2 differ from the others' from step 0 on"),
        ([[1, 1], [1, 2]], (0, 1), 2, "weights of ranks 0 and 1 differ from each other from step 1 on"),
        ([[1, 2, 3]], (0, 1, 2), 2, "weights of ranks 0, 1 and 2 differ from each other from step 0 on"),
        ([[5, 5, 6, 6]], (0, 1, 2, 3), 2, "weights of ranks 0, 1, 2 and 3 differ from each other from step 0 on"),
    ],
)
def test_a_drift_names_the_minority_and_the_first_step(rows, ranks, cost_s, what):
    """It costs what was computed since the last step at which all agreed."""
    (finding,) = diagnose(noted("weights", rows))
    assert (finding.kind, finding.ranks, finding.cost_s, finding.what) == (K.DRIFTED_REPLICA, ranks, cost_s, what)


def test_repeated_data_counts_the_batches_that_another_rank_had():
    (finding,) = diagnose(noted("batch", [[1, 2, 3], [4, 4, 5], [6, 6, 6]], same=False))
    assert (finding.kind, finding.ranks) == (K.REPEATED_DATA, (0, 1, 2))
    assert finding.cost_s == pytest.approx(4 * 3 / 9)
    assert finding.evidence == "3 of 9 noted batches were another rank's too, at 2 of 3 steps (first: step 1)"


@pytest.mark.parametrize("same", [True, False])
def test_what_is_right_is_not_found(same):
    rows = [[1, 1, 1], [2, 2, 2]] if same else [[1, 2, 3], [2, 3, 1]]
    assert not diagnose(noted("x", rows, same))


class HandmadeRun:
    """What a diagnosis needs of a run."""

    device = "cpu"
    num_threads = 1

    def __init__(self, record: Record, cores: int) -> None:
        self.record, self.cores = record, cores

    @property
    def trace(self) -> Trace:
        from vizkit.record import wall_trace

        return wall_trace(self.record)

    def replay(self, link=None, durations=None) -> Trace:
        return replay(self.record, link=link, durations=durations)


def slowed(record: Record, factor: int) -> Record:
    """The same record, on a machine that gave each rank a core for one `factor`-th of the time."""

    def later(event):
        return replace(event, start_wall_ns=event.start_wall_ns * factor, end_wall_ns=event.end_wall_ns * factor)

    ranks = [
        replace(later(rank), events=tuple(map(later, rank.events))) if rank.events else later(rank)
        for rank in record.ranks
    ]
    return Record(tuple(ranks), record.notes)


@pytest.mark.parametrize(("cores", "is_found"), [(1, True), (2, False)])
def test_oversubscribed_cores_need_more_threads_than_cores(cores, is_found):
    """Two ranks that took 3 ms of wall time for each ms of CPU time: on one core, crowding explains at most half."""
    run = HandmadeRun(slowed(handmade.record([("work", 10 * MS)], [("work", 10 * MS)]), 3), cores)
    diagnosis = diagnose(run)
    assert (K.OVERSUBSCRIBED_CORES in diagnosis.kinds) == is_found
    if is_found:
        (finding,) = diagnosis
        assert finding.clock is Clock.WALL
        assert finding.cost_s == pytest.approx(15e-3, rel=0.01)
        assert finding.evidence.startswith("compute took 30 ms of wall time a rank for 10 ms of CPU time")


@pytest.mark.parametrize(("limit", "is_found"), [(1000, False), (100, True), (None, False)])
def test_memory_near_a_limit(limit, is_found):
    counter = vk.Counter("memory", 1, np.array([0, 5]), np.array([10, 95]))
    trace = Trace.from_spans([Span(0, "F", 0, 10), Span(1, "F", 0, 10)], clock="wall", counters=[counter])
    diagnosis = diagnose(trace, memory_limit_bytes=limit)
    assert [finding.ranks for finding in diagnosis] == ([(1,)] if is_found else [])


@pytest.mark.skipif(not KINETO.is_dir(), reason="other people's traces are not in this checkout")
@pytest.mark.parametrize("path", sorted(KINETO.glob("*.json.gz")), ids=lambda path: path.name.split(".")[0])
def test_a_profilers_file_is_diagnosed(path):
    """One rank of many: findings speak of that rank alone."""
    trace = vk.read_trace(path)
    diagnosis = diagnose(trace)
    held = set(trace.rank.tolist())
    assert all(set(finding.ranks) <= held for finding in diagnosis)
    for finding in diagnosis.of(K.EXPOSED_COMMUNICATION):
        exposed_ns = vk.metrics.breakdown(trace).exposed_communication[sorted(held)].mean()
        assert finding.cost_s == pytest.approx(exposed_ns / 1e9)
        assert "one rank's trace" in finding.evidence


def test_one_rank_alone_has_neither_stragglers_nor_bubbles():
    spans = [Span(0, "F", 0, 10, stage=0), Span(0, "all_reduce", 10, 11, operation=0), Span(0, "B", 11, 30, stage=0)]
    assert not diagnose(Trace.from_spans(spans, clock="virtual"))


@given(traces(), st.permutations(range(4)))
@settings(max_examples=60, deadline=None)
def test_any_trace_is_diagnosed(trace, order):
    """No trace breaks a rule; ranks exist; renumbering the ranks renumbers the findings."""
    diagnosis = diagnose(trace, memory_limit_bytes=1000)
    for finding in diagnosis:
        assert isinstance(finding, Finding)
        assert finding.cost_s >= 0
        assert set(finding.ranks) <= set(range(trace.world_size))
        assert finding.evidence
        assert finding.remedy
    assert str(diagnosis)
    new = np.array([*order, *range(4, trace.world_size)])
    other = diagnose(renumbered(trace, new), memory_limit_bytes=1000)
    told = [(f.kind, round(f.cost_s, 6), f.ranks) for f in other]
    expected = [(f.kind, round(f.cost_s, 6), tuple(sorted(new[list(f.ranks)].tolist()))) for f in diagnosis]
    assert sorted(told) == sorted(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run_or_trace": 3}, "run_or_trace='int': is neither a run nor a trace; give what vk.launch returned"),
        (
            {"run_or_trace": Trace.from_spans([], clock="wall"), "link": None},
            "link=None: a trace has its times already; give the run, or run.replay(link=…, durations=…)",
        ),
        (
            {"run_or_trace": Trace.from_spans([], clock="wall"), "durations": {"F": 1}},
            "durations={'F': 1}: a trace has its times already; give the run, or run.replay(link=…, durations=…)",
        ),
        (
            {"run_or_trace": Trace.from_spans([], clock="wall"), "memory_limit_bytes": 0},
            "memory_limit_bytes=0: is the memory of one rank; give bytes, such as 80e9",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(InvalidInputError) as caught:
        diagnose(**arguments)
    assert str(caught.value) == message


def data_parallel_steps(work_ms: np.ndarray) -> Trace:
    """Row `step` of `work_ms` is what each rank computes before the step's all-reduce, which takes no time."""
    spans, now = [], 0
    for step, by_rank in enumerate((work_ms * MS).astype(int).tolist()):
        end = now + max(by_rank)
        for rank, work in enumerate(by_rank):
            spans.append(Span(rank, "F", now, now + work))
            spans.append(Span(rank, "wait", now + work, end, operation=step))
            spans.append(Span(rank, "all_reduce", end, end, operation=step))
        now = end
    return Trace.from_spans(spans, clock="virtual")


def jittered(size: int, seed: int, factors: dict[int, float]) -> np.ndarray:
    """30 steps of 20 ms, give or take a tenth; some ranks take longer by their factor."""
    work_ms = 20 * np.random.default_rng(seed).normal(1, 0.1, (30, size))
    for rank, factor in factors.items():
        work_ms[:, rank] *= factor
    return work_ms


def late_in(trace: Trace, measured: bool) -> list[tuple[FindingKind, tuple[int, ...]]]:
    machine = Machine(Record(()), 2, 1, trace) if measured else None
    evidence = Evidence(trace, machine=machine)
    return [(f.kind, f.ranks) for rule in (straggler, imbalance) for f in rule(evidence)]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_equal_ranks_of_a_crowded_machine_are_not_accused(size: int):
    """Jitter of 10 % makes equal ranks wait over 5 % of the time: chance where it was measured, else the work."""
    traces = [data_parallel_steps(jittered(size, seed, {})) for seed in range(10)]
    assert [late_in(trace, measured=True) for trace in traces] == [[]] * 10
    assert any(late_in(trace, measured=False) for trace in traces)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_slow_rank_is_found_in_spite_of_jitter(size: int):
    """Half as much again in each step, or four times once: both are more than chance."""
    for seed in range(10):
        assert late_in(data_parallel_steps(jittered(size, seed, {1: 1.5})), measured=True) == [(K.STRAGGLER, (1,))]
    once = np.full((3, size), 20.0)
    once[1, 1] *= 4
    assert late_in(data_parallel_steps(once), measured=True) == [(K.STRAGGLER, (1,))]


def test_unequal_shares_are_found_in_spite_of_jitter():
    """1, 1.2, 1.4 and 1.6 times the work: 0.3 of 1.6 is waited."""
    for seed in range(10):
        work_ms = jittered(4, seed, {1: 1.2, 2: 1.4, 3: 1.6})
        assert late_in(data_parallel_steps(work_ms), measured=True) == [(K.IMBALANCE, (3,))]
