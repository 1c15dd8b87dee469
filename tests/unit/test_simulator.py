"""The simulator: known schedules cell by cell, laws that hold for every schedule, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vizkit as vk
from tests import handmade
from tests.strategies import schedules
from vizkit import timing
from vizkit.activations import ACTIVATIONS
from vizkit.metrics import bubble, traffic
from vizkit.replay import replay
from vizkit.schedules import Schedule
from vizkit.schedules.dependencies import Dependencies
from vizkit.simulator import directed_edges, simulate
from vizkit.trace import NS_PER_S, Role, SpanKind, Trace

UNIT = vk.Durations(F=1, B=2)
milliseconds = st.integers(0, 50).map(lambda ms: ms / 1000)
links = st.one_of(st.none(), st.builds(vk.Link, milliseconds, st.sampled_from([1e3, 1e6, math.inf])))


@st.composite
def durations_for(draw: st.DrawFn, schedule: Schedule) -> vk.Durations:
    """Seconds of F, I and W, each one for all stages or one for each."""
    stages = schedule.num_stages
    values = st.one_of(milliseconds, st.lists(milliseconds, min_size=stages, max_size=stages))
    return vk.Durations(F=draw(values), I=draw(values), W=draw(values))


def compute(trace: Trace) -> dict[tuple[int, str, int], tuple[int, int, int]]:
    """Rank, start and end of each action."""
    return {
        (span.stage, span.kind.value, span.microbatch): (span.rank, span.start_ns, span.end_ns)
        for span in trace
        if span.kind.role is Role.COMPUTE
    }


def test_one_forward_one_backward_cell_by_cell() -> None:
    """The picture of 1F1B in Narayanan et al. (2021), with a backward twice as long as a forward."""
    assert vk.as_grid(simulate(vk.schedule("1F1B", num_ranks=4, num_microbatches=4), UNIT)) == [
        "F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3",
        ".  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3 .  .",
        ".  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .  .  .",
        ".  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .  .  .",
    ]


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize("num_ranks, num_microbatches", [(1, 1), (1, 7), (2, 2), (4, 8), (8, 32), (5, 3)])
def test_the_bubble_is_p_minus_1_over_m(name: str, num_ranks: int, num_microbatches: int) -> None:
    """(p−1)/m of the ideal time and (p−1)/(m+p−1) of the total time (Narayanan et al., SC'21)."""
    p, m = num_ranks, num_microbatches
    found = bubble(simulate(vk.schedule(name, num_ranks=p, num_microbatches=m), UNIT))
    assert found.over_ideal == pytest.approx((p - 1) / m, abs=1e-12)
    assert found.over_total == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_simulation_is_a_replay_of_ranks_that_do_the_schedule(data: st.DataObject) -> None:
    """Two programs that share no code give the same start and end of each action, on any link."""
    schedule = data.draw(schedules())
    durations, link = data.draw(durations_for(schedule)), data.draw(links)
    payload = data.draw(st.sampled_from([0, 8, 1000]))
    ideal = simulate(schedule, durations, link, payload_bytes=payload)
    virtual = replay(handmade.pipeline(schedule, payload), link=link, durations=durations)
    assert compute(ideal) == compute(virtual)
    if link is not None:
        assert np.array_equal(traffic(ideal).wire_bytes, traffic(virtual).wire_bytes), (
            "bytes between each pair of ranks"
        )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_schedule_beats_the_lower_bounds(data: st.DataObject) -> None:
    """The makespan is at least the busiest rank's work, and at least one microbatch's way through all stages."""
    schedule = data.draw(schedules())
    durations, link = data.draw(durations_for(schedule)), data.draw(links)
    trace = simulate(schedule, durations, link)
    work = np.zeros(schedule.num_ranks, np.int64)
    for action, rank in zip(schedule, schedule.rank.tolist(), strict=True):
        work[rank] += durations.of_ns(action.kind, action.stage)
    through = [SpanKind.FORWARD] + [kind for kind in ("B", "I") if (schedule.kind == SpanKind(kind).code).any()]
    one_microbatch = sum(durations.of_ns(kind, stage) for kind in through for stage in range(schedule.num_stages))
    hops = sum(a != b for a, b in pairwise(schedule.stage_ranks)) * len(through)
    latency_ns = round(link.latency_s * NS_PER_S) if link else 0
    assert trace.extent_ns[1] >= max(int(work.max()), one_microbatch + hops * latency_ns)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_work_is_conserved_and_memory_never_negative(data: st.DataObject) -> None:
    """Every action once and for its whole time, one at a time on a rank; activations come back to none."""
    schedule = data.draw(schedules())
    durations, link = data.draw(durations_for(schedule)), data.draw(links)
    kept = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    trace = simulate(schedule, durations, link, kept_for_weights=kept)
    actions = trace.filter(trace.is_role(Role.COMPUTE))
    assert sorted(compute(trace)) == sorted((a.stage, a.kind.value, a.microbatch) for a in schedule)
    for span in actions:
        assert span.duration_ns == durations.of_ns(span.kind, span.stage)
    for rank in range(schedule.num_ranks):
        mine = actions.filter(rank=rank)
        assert (mine.start_ns[1:] >= mine.end_ns[:-1]).all()
    for counter in trace.counters:
        assert counter.name == ACTIVATIONS
        assert counter.values.min() >= 0
        assert counter.values[-1] == 0
        assert (np.diff(counter.times_ns) >= 0).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_both_engines_agree(data: st.DataObject) -> None:
    """Fronts of all ranks and ranks one by one give the same times, also for blocking sends and where ranks wait."""
    schedule = data.draw(schedules(overlaps=False, max_ranks=6))
    if data.draw(st.booleans()):  # an order in which some may wait for ever
        order = [
            data.draw(st.permutations(range(a, b)))
            for a, b in zip(schedule.offsets, schedule.offsets[1:], strict=False)
        ]
        shuffled = np.concatenate(order).astype(int)
        schedule = replace(
            schedule, **{name: getattr(schedule, name)[shuffled] for name in ("kind", "stage", "microbatch")}
        )
    costs = data.draw(costs_for(schedule))
    one_by_one, fronts = timing.run_ranks(schedule, costs), timing.run_fronts(schedule, costs)
    assert one_by_one.finished == fronts.finished
    for name in ("start", "end", "ready"):
        assert np.array_equal(getattr(one_by_one, name), getattr(fronts, name)), name


@st.composite
def costs_for(draw: st.DrawFn, schedule: Schedule) -> timing.Costs:
    """Any costs of the actions of a schedule."""
    needs = Dependencies.of(schedule)
    edge = directed_edges(schedule, needs)
    numbers = st.lists(st.integers(0, 9), min_size=len(schedule), max_size=len(schedule)).map(np.array)
    wire = draw(numbers)
    return timing.Costs(
        input=needs.input,
        edge=edge,
        duration_ns=draw(numbers),
        wire_ns=np.where(edge >= 0, wire, 0),
        latency_ns=draw(st.integers(0, 9)),
        blocking_sends=draw(st.booleans()),
        overlap_ns=-1,
    )


def test_a_link_costs_between_ranks_and_nothing_inside_one() -> None:
    """Two stages on one rank hand over at no cost; over an edge a message takes α + bytes/β."""
    link = vk.Link(latency_s=0.5, bandwidth_bytes_per_s=100)
    one = Schedule.from_rows([["0F0", "1F0"]])
    two = Schedule.from_rows([["0F0"], ["1F0"]])
    assert simulate(one, UNIT, link, payload_bytes=50).duration_ns == 2 * NS_PER_S
    assert simulate(two, UNIT, link, payload_bytes=50).duration_ns == 3 * NS_PER_S


def test_an_edge_carries_one_message_at_a_time() -> None:
    """Two messages of 2 s each leave one after the other, and the second arrives at 1 + 2 + 2 s."""
    two = Schedule.from_rows([["0F0", "0F1"], ["1F0", "1F1"]])
    trace = simulate(two, vk.Durations(F=1), vk.Link(0, 50), payload_bytes=100)
    receives = trace.filter(kind="receive")
    assert (receives.end_ns / NS_PER_S).tolist() == [3.0, 5.0]
    assert [span.payload_bytes for span in receives] == [100, 100]


def test_blocking_sends_keep_the_sender_until_its_message_has_arrived() -> None:
    """Rank 0 begins its second forward at once with asynchronous sends, and after the message with blocking ones."""
    two = Schedule.from_rows([["0F0", "0F1"], ["1F0", "1F1"]])
    link = vk.Link(3, math.inf)
    starts = [
        simulate(two, vk.Durations(F=1), link, blocking_sends=blocking).filter(rank=0, kind="F").start_ns / NS_PER_S
        for blocking in (False, True)
    ]
    assert [s.tolist() for s in starts] == [[0.0, 1.0], [0.0, 4.0]]


@pytest.mark.parametrize("name", vk.schedule_names())
@pytest.mark.parametrize("latency_s, payload", [(0.3, 0), (0, 10), (0.7, 25)])
def test_blocking_sends_only_add_time(name: str, latency_s: float, payload: int) -> None:
    """Each action starts no earlier than with asynchronous sends, and with a free link at the same time."""
    schedule = vk.schedule(name, num_ranks=4, num_microbatches=8)
    link = vk.Link(latency_s, 100)
    blocking, eager = (
        simulate(schedule, UNIT, link, payload_bytes=payload, blocking_sends=blocking) for blocking in (True, False)
    )
    actions = len(schedule)
    assert (blocking.start_ns[:actions] >= eager.start_ns[:actions]).all()
    assert blocking.duration_ns > eager.duration_ns or name == "Sequential"
    free = [simulate(schedule, UNIT, blocking_sends=blocking).start_ns for blocking in (True, False)]
    assert np.array_equal(*free)


def test_ranks_that_take_turns_are_run_one_by_one() -> None:
    """Fronts of one action each are slow: the engine for many ranks gives them up, and wide ones not."""
    narrow = vk.schedule("Sequential", num_ranks=32, num_microbatches=64)
    wide = vk.schedule("1F1B", num_ranks=32, num_microbatches=64)
    assert timing.run_fronts(narrow, free_costs(narrow), narrow=8) is None
    assert timing.run_fronts(wide, free_costs(wide), narrow=8) is not None
    assert simulate(narrow, UNIT).duration_ns == 32 * 64 * 3 * NS_PER_S


def free_costs(schedule: Schedule) -> timing.Costs:
    """A second for each action, nothing for messages."""
    needs = Dependencies.of(schedule)
    second = np.full(len(schedule), NS_PER_S)
    return timing.Costs(needs.input, directed_edges(schedule, needs), second, 0 * second, 0, False, -1)


def test_payloads_of_each_boundary() -> None:
    """One number for what leaves each stage; the gradient that comes back over a boundary is as large."""
    rows = [["0F0", "0B0"], ["1F0", "1B0"], ["2F0", "2B0"]]
    trace = simulate(Schedule.from_rows(rows), UNIT, payload_bytes=[10, 20, 0])
    assert traffic(trace).wire_bytes.tolist() == [[0, 10, 0], [10, 0, 20], [0, 20, 0]]


def test_overlapped_cells() -> None:
    """Turn by turn by default, as torch's runtime does them; sharing the rank with `overlap_s`."""
    cell = Schedule.from_rows([["0F0", ("0F1", "0B0"), "0B1"]])
    assert vk.as_grid(simulate(cell, UNIT)) == ["F0 F1 B0 B0 B1 B1"]
    together = simulate(cell, UNIT, overlap_s=2.5)
    assert compute(together)[0, "F", 1] == compute(together)[0, "B", 0] == (0, NS_PER_S, int(3.5 * NS_PER_S))


def test_activation_memory_over_time() -> None:
    """A forward holds from its start, I frees what W does not need, W the rest."""
    one = Schedule.from_rows([["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]])
    trace = simulate(one, vk.Durations(F=1, I=1, W=1), activation_bytes=100, kept_for_weights=0.4)
    (counter,) = trace.counters
    assert counter.unit == "bytes"
    assert (counter.times_ns / NS_PER_S).tolist() == [0, 1, 3, 4, 5, 6]
    assert counter.values.tolist() == [100, 200, 140, 100, 40, 0]


def test_inference_keeps_nothing() -> None:
    """Without a backward, activations live as long as their forward."""
    trace = simulate(Schedule.from_rows([["0F0", "0F1"], ["1F0", "1F1"]]), UNIT)
    assert [counter.values.max() for counter in trace.counters] == [1, 1]
    assert [counter.values[-1] for counter in trace.counters] == [0, 0]


REFUSED = [
    (
        {"durations": {"F": [1, 2, 3], "B": 2}},
        "F=(1.0, 2.0, 3.0): 1F1B has 2 stages, and these are durations for 3; "
        "give one duration for each stage, or one for all",
    ),
    ({"durations": {"F": -1}}, "F=-1: a duration is finite and not negative; give seconds, such as 1e-3"),
    ({"durations": {"F": math.nan}}, "F=nan: a duration is finite and not negative; give seconds, such as 1e-3"),
    (
        {"durations": {"F": [1, 2], "I": [1, 1], "W": [1, 2, 3]}},
        "durations=[2, 3]: differ in their number of stages; give one value for each stage",
    ),
    (
        {"payload_bytes": -1},
        "payload_bytes=-1: must be finite, not negative, and one number or one for each of 2 stages; "
        "give bytes of one microbatch",
    ),
    (
        {"activation_bytes": [1, 2, 3]},
        "activation_bytes=[1, 2, 3]: must be finite, not negative, and one number or one for each of 2 stages; "
        "give bytes of one microbatch",
    ),
    (
        {"kept_for_weights": 1.5},
        "kept_for_weights=1.5: is the share of activations that W needs; give a number from 0 to 1",
    ),
    (
        {"kept_for_weights": None},
        "kept_for_weights=None: is the share of activations that W needs; give a number from 0 to 1",
    ),
    (
        {"payload_bytes": "12"},
        "payload_bytes='12': must be finite, not negative, and one number or one for each of 2 stages; "
        "give bytes of one microbatch",
    ),
    ({"payload_bytes": 1e19}, "payload_bytes=1e+19: is over an exabyte; give bytes of one microbatch"),
    (
        {"durations": {"F": 2e9, "B": 0}},
        "durations='8e+09 s': is what everything together takes, and 146 years are the most; "
        "give seconds, such as 1e-3",
    ),
    (
        {"link": vk.Link(3e9)},
        "link='1.2e+10 s': is what everything together takes, and 146 years are the most; "
        "give seconds, bytes and bytes a second",
    ),
    (
        {"link": vk.Link(0, 1e-9), "payload_bytes": 1e3},
        "link='4e+12 s': is what everything together takes, and 146 years are the most; "
        "give seconds, bytes and bytes a second",
    ),
    ({"link": 0.1}, "link=0.1: is not a Link; give vk.Link(latency_s=1e-6), or None"),
    ({"schedule": "1F1B"}, "schedule='1F1B': is not a Schedule; get one from vk.schedule or vk.Schedule.from_rows"),
    ({"overlap_s": "1"}, "overlap_s='1': is finite and not negative; give the seconds of one overlapped cell"),
    ({"overlap_s": -1}, "overlap_s=-1: is finite and not negative; give the seconds of one overlapped cell"),
]


@pytest.mark.parametrize("arguments, message", REFUSED)
def test_what_it_refuses(arguments: dict[str, object], message: str) -> None:
    """Each error says the value, the rule and the remedy."""
    schedule = vk.schedule("1F1B", num_ranks=2, num_microbatches=2)
    with pytest.raises(vk.InvalidInputError) as caught:
        simulate(**{"schedule": schedule, "durations": UNIT, **arguments})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "rows",
    [
        [["0F0", "0B0"], ["1B0", "1F0"]],  # a backward before its forward
        [["0F0", "0B0"], ["1F0"]],  # a backward is missing
        [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]],  # a circle of waits
        [["0F0", "0F0", "0B0"]],  # an action twice
        [["0F0", "0F1", "0B0"]],  # a microbatch without its backward
        [["0F0", "0I0"]],  # gradients of the inputs without those of the weights
        [["0F0", "0B0", "0W0"]],  # gradients of the weights twice
        [["0F0", "0B0", "0F1"], ["0B1"]],  # a stage on two ranks
        [["0F0", "0B0"], []],  # a rank without a stage
        [["0F1", "0B1"]],  # a gap in the numbers of microbatches
    ],
)
def test_a_schedule_that_cannot_run_is_refused_with_the_first_finding(rows: list[list[str]]) -> None:
    """The error quotes what `Schedule.check` says first, and where to see the rest."""
    refused_with_its_first_finding(Schedule.from_rows(rows))


@pytest.mark.parametrize("changes", [{"num_pipelines": 0}, {"num_pipelines": 3}, {"stage_ranks": (0,)}])
def test_numbers_that_do_not_fit_each_other_are_refused_too(changes: dict[str, object]) -> None:
    """Pipelines of unequal length, and more stages than there are."""
    refused_with_its_first_finding(replace(Schedule.from_rows([["0F0"], ["1F0"]]), **changes))


def refused_with_its_first_finding(schedule: Schedule) -> None:
    with pytest.raises(vk.InvalidInputError) as caught:
        simulate(schedule, UNIT)
    assert str(schedule.check()[0]) in str(caught.value)
    assert str(caught.value).endswith("; see all findings with schedule.check()")
