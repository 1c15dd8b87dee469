"""Schedules by name: what they look like, the sizes that they have, and what their papers say of them."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import vizkit as vk
from vizkit.metrics.intervals import Intervals
from vizkit.schedules import Schedule, recipe
from vizkit.schedules.builders.phases import Phase, Turns, lay_out
from vizkit.trace import NS_PER_S, Role, Trace

NAMES = vk.schedule_names()
DURATIONS = [(1, 1, 1), (3, 3, 2), (3, 2, 1), (2, 3, 1), (2, 1, 2)]
"""Seconds of F, I, W on a stage."""


def build(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    return vk.schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)


def test_names_are_known_from_the_simplest_to_the_newest():
    assert NAMES[:3] == ["Sequential", "GPipe", "1F1B"]
    assert {"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"} < set(NAMES)
    assert {"Eager1F1B", "ZB-H1", "ZB-H2", "V-Half", "V-Min", "DualPipe", "ForwardOnly"} < set(NAMES)


def test_no_two_schedules_answer_to_one_name():
    keys = [key for name in NAMES for key in {written.lower() for written in (name, *recipe(name).aliases)}]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("gpipe", "GPipe"),
        ("interleaved1f1b", "Interleaved1F1B"),
        ("eager 1F1B", "Eager1F1B"),
        ("forward-only", "ForwardOnly"),
        ("SEQUENTIAL", "Sequential"),
        ("PipeDream-Flush", "1F1B"),
        ("zbv", "ZBVZeroBubble"),
    ],
)
def test_a_name_may_be_written_in_any_case_and_with_spaces_or_hyphens(written, name):
    assert build(written, 2, 4).name == name


PICTURES = {
    ("Sequential", 2, 2): "0F0 0B0 0F1 0B1|1F0 1B0 1F1 1B1",
    ("ForwardOnly", 2, 2): "0F0 0F1|1F0 1F1",
    ("GPipe", 2, 2): "0F0 0F1 0B0 0B1|1F0 1F1 1B0 1B1",
    ("1F1B", 3, 2): "0F0 0F1 0B0 0B1|1F0 1F1 1B0 1B1|2F0 2B0 2F1 2B1",
    ("Eager1F1B", 2, 4): "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3|1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ("LoopedBFS", 2, 2): "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0|1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0",
    ("DualPipeV", 1, 2): "0F0 1F0 0F1 1B0 1F1+0B0 1B1 0I1 0W1",
    ("DualPipe", 2, 4): (
        "0F0 3F2 0F1 3B2 3F3+0B0 3B3 0I1 0W1|2F2 1F0 2F3 1B0 1F1+2B2 1B1 2I3 2W3"  # each rank has both directions
    ),
}


@pytest.mark.parametrize("sizes", PICTURES, ids=lambda sizes: sizes[0])
def test_a_small_schedule_written_out(sizes):
    assert str(build(*sizes)) == PICTURES[sizes].replace("|", "\n")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(data=st.data())
def test_every_schedule_can_run(name, data):
    """Whatever sizes its rules admit, the checker finds nothing and the simulator does every action."""
    p = data.draw(st.integers(1, 8), "ranks")
    m = data.draw(st.integers(1, 24), "microbatches")
    v = data.draw(st.integers(1, 3), "stages a rank") if not recipe(name).fixed_stages else None
    try:
        schedule = build(name, p, m, v)
    except vk.InvalidInputError as error:
        event(str(error))
        return
    assert schedule.check() == []
    assert (schedule.num_ranks, schedule.num_microbatches) == (p, m)
    assert len(vk.simulate(schedule, {"F": 1, "I": 1, "W": 1})) == len(schedule)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_may_be_numpy_integers(name):
    assert build(name, np.int64(4), np.int32(8)) == build(name, 4, 8)


REFUSALS = [
    (
        ("GPipe", 0, 4),
        "num_ranks=0: must be a whole number, at least 1; use num_ranks=1",
    ),
    (
        ("GPipe", 4, -1),
        "num_microbatches=-1: must be a whole number, at least 1; use num_microbatches=1",
    ),
    (
        ("GPipe", 4, 8.0),
        "num_microbatches=8.0: must be a whole number, at least 1; use num_microbatches=8",
    ),
    (
        ("GPipe", True, 8),
        "num_ranks=True: must be a whole number, at least 1; use num_ranks=1",
    ),
    (
        ("GPipe", "4", 8),
        "num_ranks='4': must be a whole number, at least 1; use num_ranks=4",
    ),
    (
        ("GPipe", 4, float("nan")),
        "num_microbatches=nan: must be a whole number, at least 1; use num_microbatches=1",
    ),
    (
        ("LoopedBFS", 4, 8, 0),
        "stages_per_rank=0: must be a whole number, at least 1; use stages_per_rank=1",
    ),
    (
        ("1F1B", 4, 8, 2),
        "stages_per_rank=2: 1F1B has exactly 1 on each rank; "
        "leave it out, or use Interleaved1F1B, LoopedBFS or InterleavedZeroBubble",
    ),
    (
        ("Interleaved1F1B", 4, 9),
        "num_microbatches=9: Interleaved1F1B on 4 ranks has 2 rounds of equally many microbatches; "
        "use num_microbatches=8 or 10",
    ),
    (
        ("InterleavedZeroBubble", 4, 14),
        "num_microbatches=14: InterleavedZeroBubble on 4 ranks has 3 rounds of equally many microbatches; "
        "use num_microbatches=12 or 15",
    ),
    (
        ("DualPipeV", 4, 7),
        "num_microbatches=7: DualPipeV needs 2 microbatches or more for each of 4 ranks; use num_microbatches=8",
    ),
    (
        ("DualPipe", 4, 11),
        "num_microbatches=11: DualPipe sends one half of the microbatches from each end; use num_microbatches=10 or 12",
    ),
    (
        ("DualPipe", 4, 6),
        "num_microbatches=6: DualPipe needs 2 microbatches or more for each of 4 ranks; use num_microbatches=8",
    ),
    (
        ("DualPipe", 4096, 2),
        "num_microbatches=2: DualPipe needs 2 microbatches or more for each of 4096 ranks; use num_microbatches=8192",
    ),
    (
        ("GPipe", 1000, 10**6),
        "num_microbatches=1000000: pass 1,000 stages, together over 100,000,000 times; "
        "use num_microbatches=100000 or fewer",
    ),
    (
        ("GPipe", 10**20, 1),
        "num_microbatches=1: pass 100,000,000,000,000,000,000 stages, together over 100,000,000 times; use fewer ranks",
    ),
    (
        ("DualPipeV", 10**7, 4),  # found at once, far away
        "num_microbatches=4: DualPipeV needs 2 microbatches or more for each of 10000000 ranks; "
        "use num_microbatches=20000000",
    ),
    (
        ("Interleaved1F1B", 3, 10**7 + 1),
        "num_microbatches=10000001: Interleaved1F1B on 3 ranks has 3333333 rounds of equally many microbatches; "
        "use num_microbatches=9999999 or 10000002",
    ),
    (
        ("DualPipe", 5, 20),
        "num_ranks=5: DualPipe pairs each rank with the one at the mirrored place; use num_ranks=4 or 6",
    ),
    (
        ("DualPipe", 5, 10),  # 6 ranks would need 12 microbatches
        "num_ranks=5: DualPipe pairs each rank with the one at the mirrored place; use num_ranks=4",
    ),
    (
        ("DualPipe", 1, 1),  # no number of ranks has 1 microbatch
        "num_ranks=1: DualPipe pairs each rank with the one at the mirrored place; use num_ranks=2",
    ),
]


@pytest.mark.parametrize(("sizes", "message"), REFUSALS, ids=lambda part: str(part) if type(part) is tuple else "")
def test_sizes_that_a_schedule_does_not_have_are_refused_with_the_nearest_that_it_has(sizes, message):
    with pytest.raises(vk.InvalidInputError) as error:
        build(*sizes)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "hint"),
    [("Gpip", "did you mean GPipe? "), ("1f1bb", "did you mean 1F1B? "), ("", ""), (None, ""), (1, "")],
)
def test_an_unknown_name_is_refused_with_the_nearest_and_the_known_ones(name, hint):
    with pytest.raises(vk.InvalidInputError) as error:
        build(name, 2, 4)
    known = ", ".join(NAMES)
    assert str(error.value) == f"name={name!r}: is not a schedule that vizkit knows; {hint}use one of {known}"


def rounds(p: int, m: int) -> int:
    """Microbatches of a round of the interleaved schedules."""
    return m // max(1, m // p)


IDLE_S = {
    "Sequential": lambda p, m, v, f, i, w: (p - 1) * m * (f + i + w),
    "ForwardOnly": lambda p, m, v, f, i, w: (p - 1) * f,
    "GPipe": lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
    "1F1B": lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
    "Eager1F1B": lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
    "Interleaved1F1B": lambda p, m, v, f, i, w: (p - 1 + (v - 1) * max(p - m, 0)) * (f + i + w),
    "LoopedBFS": lambda p, m, v, f, i, w: (p - 1 + (v - 1) * max(p - m, 0)) * (f + i + w),
    "InterleavedZeroBubble": lambda p, m, v, f, i, w: (p - 1) * (f + i - w) if m >= p and w <= min(f, i) else None,
}
"""Idle seconds of every rank, F, I and W of one stage; None where the docstring promises nothing."""
PEAK = {
    "Sequential": lambda p, m, v, r: 1,
    "ForwardOnly": lambda p, m, v, r: 1,
    "GPipe": lambda p, m, v, r: m,
    "1F1B": lambda p, m, v, r: min(p - r, m),
    "Eager1F1B": lambda p, m, v, r: min(2 * (p - r) - 1, m),
    "Interleaved1F1B": lambda p, m, v, r: min((v - 1) * rounds(p, m) + 2 * (p - 1 - r) + 1, v * m) / v,
    "LoopedBFS": lambda p, m, v, r: m,
    "InterleavedZeroBubble": lambda p, m, v, r: min((v - 1) * rounds(p, m) + p, v * m) / v,
    "ZBVZeroBubble": lambda p, m, v, r: p if m >= 2 * p - 1 else None,
    "DualPipe": lambda p, m, v, r: p + 1,
    "DualPipeV": lambda p, m, v, r: p + 0.5,
}
"""Peak activation memory of rank r, in microbatches of its layers."""


@pytest.mark.parametrize("name", PEAK)
def test_bubble_and_peak_memory_are_what_the_docstring_says(name):
    """For 1 to 5 ranks, up to 12 microbatches, 1 to 3 stages a rank, several F, I and W."""
    compared = 0
    for schedule, v in sizes_of(name, range(1, 6), (1, 2, 3, 4, 6, 7, 8, 10, 12)):
        p, m = schedule.num_ranks, schedule.num_microbatches
        for seconds in DURATIONS:
            trace = vk.simulate(schedule, dict(zip("FIW", seconds, strict=True)))
            expected = IDLE_S[name](p, m, v, *seconds) if name in IDLE_S else None
            if expected is not None:
                assert idle_s(trace).tolist() == [expected] * p, (p, m, v, seconds)
            for counter in trace.counters:
                expected = PEAK[name](p, m, v, counter.rank)
                assert expected is None or counter.values.max() == pytest.approx(expected), (p, m, v, seconds)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize(("name", "length"), [("DualPipeV", lambda p: p), ("DualPipe", lambda p: p // 2)])
@pytest.mark.parametrize("overlapped", [sum, max], ids=["F&B = F + B", "F&B = max(F, B)"])
def test_bubble_of_dualpipe_is_the_one_of_its_repository(name, length, overlapped):
    """(PP/2−1)(F&B + B − 3W) on the rank that overlaps most, for F = I and W ≤ F; DualPipeV has PP/2 ranks."""
    for schedule, _ in sizes_of(name, range(1, 9), (2, 4, 8, 12, 17, 20)):
        for seconds, weight in [(1, 1), (3, 2), (5, 1), (4, 0)]:
            backward = seconds + weight
            pair = overlapped([seconds, backward])
            trace = vk.simulate(schedule, {"F": seconds, "I": seconds, "W": weight}, overlap_s=pair)
            assert max(idle_s(trace)) == (length(schedule.num_ranks) - 1) * (pair + backward - 3 * weight)


def test_zbv_leaves_no_bubble_for_equal_durations():
    """No rank idles between its own first and last action for F = I = W and m ≥ 2p − 1; for other durations some do."""
    for p, m in [(1, 1), (2, 3), (3, 5), (4, 7), (4, 8), (6, 20)]:
        assert own_idle_s(vk.simulate(build("ZBVZeroBubble", p, m), {"F": 1, "I": 1, "W": 1})).tolist() == [0] * p
    assert max(own_idle_s(vk.simulate(build("ZBVZeroBubble", 4, 8), {"F": 3, "I": 2, "W": 1}))) > 0


def test_sequential_keeps_one_device_busy_at_a_time():
    """Whatever the stages take, the run takes the sum of all actions."""
    trace = vk.simulate(build("Sequential", 3, 4), {"F": (1, 5, 2), "B": (4, 3, 7)})
    assert trace.duration_ns == int((trace.end_ns - trace.start_ns).sum()) == 4 * 22 * NS_PER_S


@pytest.mark.parametrize("latency_s", [0.1, 0.5, 1.0])
def test_eager_1f1b_hides_transfers_that_1f1b_waits_for(latency_s):
    eager, plain = (
        vk.simulate(build(name, 4, 16), {"F": 1, "B": 2}, vk.Link(latency_s=latency_s)).duration_ns
        for name in ("Eager1F1B", "1F1B")
    )
    assert eager < plain


def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank():
    """Over the ideal time (p−1)/(vm), as Megatron's paper has it, where a rank's layers take the same however cut."""
    for v in (1, 2, 4):
        trace = vk.simulate(build("Interleaved1F1B", 4, 8, v), {"F": 1 / v, "B": 2 / v})
        assert vk.metrics.bubble(trace).over_ideal == pytest.approx(3 / (v * 8))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 14), (6, 12), (8, 20)])
def test_dualpipe_is_two_folded_pipelines_face_to_face(p, m):
    """Each half of the ranks does what DualPipeV does on p/2 ranks with half of the microbatches."""
    both, folded = build("DualPipe", p, m).rows, build("DualPipeV", p // 2, m // 2).rows
    for rank in range(p):
        second = rank >= p // 2
        place = min(rank, p - 1 - rank)
        near, far = (2 * p - 1 - rank, rank) if second else (rank, 2 * p - 1 - rank)
        start = {near: second * (m // 2), far: (not second) * (m // 2)}
        expected = [
            tuple(
                vk.Action(stage, action.kind, action.microbatch + start[stage])
                for action in cell
                for stage in [near if action.stage == place else far]
            )
            for cell in folded[place]
        ]
        assert both[rank] == expected


def test_phases_repeat_as_often_as_each_rank_needs_them():
    """Passes on a slot count up; W without a slot follows the oldest I; "+" overlaps."""
    rank = np.arange(2)
    phases = [Phase("F0", 2 - rank), Phase("F0+I0 W", rank), Phase("I0", 2 - rank), Phase("W", 2 - rank)]
    assert str(lay_out("two", phases, rank[:, None], 2)) == "0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1F1+1I0 1W0 1I1 1W1"


def test_passes_without_a_slot_take_the_turns_of_the_schedule():
    turns = Turns(np.array([0, 1, 1, 0]), np.array([0, 0, 1, 1]))
    text = str(lay_out("turns", [Phase("F", 4)], np.array([[0, 1]]), 2, forwards=turns))
    assert text == "0F0 1F0 1F1 0F1"


def test_formulas_of_recipes_are_what_the_simulator_finds():
    """Idle time of the rank that idles most, between its own actions or in all; V-shapes may have one pass less."""
    for name, seconds in itertools.product(NAMES, [(1, 1, 1), (3, 3, 2), (4, 3, 1)]):
        said, compared = recipe(name), 0
        for schedule, v in sizes_of(name, range(1, 6), (4, 8, 12, 15)):
            p, m = schedule.num_ranks, schedule.num_microbatches
            stages = schedule.stages_per_pipeline / p  # of one rank that a microbatch passes
            trace = vk.simulate(schedule, {kind: s / stages for kind, s in zip("FIW", seconds, strict=True)})
            sizes = {"p": p, "m": m, "v": v, **dict(zip("FIW", seconds, strict=True))}
            if m < 2 * p:
                continue
            if holds(said.bubble, sizes):
                found, expected = (max(idle_s(trace)), max(own_idle_s(trace))), value_of(said.bubble, sizes)
                less = seconds[0] / stages if name in ("V-Half", "V-Min") else 0
                assert any(expected - less - 1e-6 <= idle <= expected + 1e-6 for idle in found), (name, sizes)
                compared += 1
            if holds(said.activations, sizes):
                peak = vk.metrics.peak_activations(trace).max()
                assert peak == pytest.approx(value_of(said.activations, sizes)), (name, sizes)
        assert compared > 3 or seconds != (1, 1, 1), name


CONDITIONS = {
    "p | m": lambda p, m, **_: m % p == 0,
    "F = I": lambda F, I, **_: F == I,  # noqa: E741, N803
    "F = I = W": lambda F, I, W, **_: F == I == W,  # noqa: E741, N803
}


def holds(formula: str, sizes: dict[str, int]) -> bool:
    """Whether a formula claims something for these sizes."""
    _, _, condition = formula.partition(" for ")
    return not condition or CONDITIONS[condition](**sizes)


def value_of(formula: str, sizes: dict[str, int]) -> float:
    """A formula in the words of recipes, computed."""
    backward = sizes["I"] + sizes["W"]
    names = {**sizes, "B": backward, "O": sizes["F"] + backward, "min": min, "floor": math.floor}
    code = formula.partition(" for ")[0].replace("F&B", "O").replace("⌊", "floor(").replace("⌋", ")").replace("−", "-")
    tokens = re.findall(r"min|floor|\d+|[A-Zpmv]|\S", code)
    times = [  # between two factors that stand side by side
        bool(re.fullmatch(r"\d+|[A-Zpmv]|\)", left) and re.fullmatch(r"min|floor|\d+|[A-Zpmv]|\(", right))
        for left, right in itertools.pairwise([*tokens, ""])
    ]
    return eval("".join(token + "*" * factor for token, factor in zip(tokens, times, strict=True)), names)


def test_recipes_say_paper_bubble_and_memory():
    for name in NAMES:
        said = recipe(name)
        assert all([said.summary, said.paper, said.bubble, said.activations, said.builder.__doc__]), name
    assert [name for name in NAMES if not recipe(name).torch_runs] == ["DualPipe"]


def sizes_of(name, ranks, microbatches) -> list[tuple[Schedule, int]]:
    """All schedules of this name that there are for these numbers, each with its stages a rank."""
    kept = []
    for p, m, v in itertools.product(ranks, microbatches, [None] if recipe(name).fixed_stages else [1, 2, 3]):
        try:
            kept.append((build(name, p, m, v), v or recipe(name).stages_per_rank))
        except vk.InvalidInputError:
            continue
    return kept


def idle_s(trace: Trace) -> np.ndarray:
    """Seconds that each rank idles, of the whole trace."""
    return (trace.duration_ns - Intervals.of(trace, trace.is_role(Role.COMPUTE)).lengths_ns()) / NS_PER_S


def own_idle_s(trace: Trace) -> np.ndarray:
    """Seconds that each rank idles between its own first and last action."""
    compute = Intervals.of(trace, trace.is_role(Role.COMPUTE))
    return (compute.extents_ns() - compute.lengths_ns()) / NS_PER_S
