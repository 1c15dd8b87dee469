"""A slow rank is named from the times of its steps; jitter names nobody."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vizkit.errors import InvalidInputError
from vizkit.metrics import SlowRank, slow_ranks

STEPS = 20


def jittered(seed: int, ranks: int, sigma: float, steps: int = STEPS) -> np.ndarray:
    """20 ms steps with log-normal jitter: σ = 0.1 is a quiet machine, σ = 1 one where ranks fight for cores."""
    return 0.020 * np.random.default_rng(seed).lognormal(0, sigma, (ranks, steps))


@given(st.integers(0, 2**32 - 1), st.integers(2, 16), st.floats(1.6, 20), st.floats(0, 0.1), st.data())
def test_a_planted_slow_rank_is_named_alone(seed: int, ranks: int, factor: float, sigma: float, data: st.DataObject):
    """1.6 times the others' work under 10 % of jitter: that rank is named, and no other."""
    times, planted = jittered(seed, ranks, sigma), data.draw(st.integers(0, ranks - 1))
    times[planted] *= factor
    (found,) = slow_ranks(times)
    assert found.rank == planted
    assert found.ratio == pytest.approx(factor, rel=0.25)
    assert found.excess_s == pytest.approx(0.020 * (factor - 1), rel=0.4)
    assert found.steps == STEPS


@pytest.mark.parametrize("sigma", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_jitter_alone_names_nobody(ranks: int, sigma: float):
    """Of 300 runs of ranks that are alike, at most one names anybody, however wild the jitter."""
    alarms = sum(bool(slow_ranks(jittered(seed, ranks, sigma))) for seed in range(300))
    assert alarms <= 1


def test_the_two_conditions_are_both_needed():
    """A rank that is always slower by 20 % is not worth a word; three times slower now and then is jitter."""
    always = np.full((4, STEPS), 0.020)
    always[1] *= 1.2
    assert slow_ranks(always) == ()
    now_and_then = np.full((4, STEPS), 0.020)
    now_and_then[1, ::3] *= 3
    assert slow_ranks(now_and_then) == ()


@pytest.mark.parametrize(("ranks", "needed"), [(2, 12), (4, 7), (16, 5)])
def test_so_many_steps_are_needed(ranks: int, needed: int):
    """As many as the docstring says, where all of them agree."""
    times = np.full((ranks, needed), 0.020)
    times[0] = 0.1
    assert [slow.rank for slow in slow_ranks(times)] == [0]
    assert slow_ranks(times[:, :-1]) == ()


def test_two_slow_ranks_are_both_named_slowest_first():
    """Half of the ranks may be slow."""
    times = jittered(1, 4, 0.05)
    times[0] *= 2
    times[3] *= 3
    assert [slow.rank for slow in slow_ranks(times)] == [3, 0]


@given(st.integers(0, 2**32 - 1), st.permutations(range(5)), st.floats(1e-6, 1e6))
def test_numbering_and_unit_do_not_matter(seed: int, order: list[int], scale: float):
    """Ranks numbered otherwise are named by their new numbers; seconds or hours give the same ratios."""
    times = jittered(seed, 5, 0.3)
    times[2] *= 2
    found = {order[slow.rank]: pytest.approx(slow.ratio) for slow in slow_ranks(times)}
    moved = np.empty_like(times)
    moved[order] = times
    assert {slow.rank: slow.ratio for slow in slow_ranks(moved * scale)} == found


@given(st.integers(0, 2**32 - 1), st.floats(1, 10))
def test_a_slower_straggler_stays_named(seed: int, more: float):
    """Evidence only grows with the delay."""
    times = jittered(seed, 4, 0.1)
    times[1] *= 2
    before = slow_ranks(times)
    times[1] *= more
    (after,) = slow_ranks(times)
    assert after.rank == before[0].rank == 1
    assert after.ratio >= before[0].ratio * 0.999


@pytest.mark.parametrize(
    "times",
    [[], [[]], [[0.1] * STEPS], [[0.1] * STEPS, []], [[0.0] * STEPS] * 3, [[0.1] * 4, [0.9] * 4]],
    ids=["no ranks", "no steps", "one rank", "a rank without steps", "nothing to do", "too few steps"],
)
def test_nothing_to_compare_names_nobody(times: list[list[float]]):
    """Odd sizes are no error: a view that just began has them."""
    assert slow_ranks(times) == ()


def test_steps_count_as_far_as_all_have_them():
    """The rank that is behind by three steps is compared on those that it has done."""
    times = [[0.02] * 20, [0.02] * 20, [0.06] * 17]
    assert [(slow.rank, slow.steps) for slow in slow_ranks(times)] == [(2, 17)]


def test_one_that_works_while_the_others_do_nothing_is_named():
    """No division by zero."""
    (found,) = slow_ranks([[0.0] * STEPS, [0.0] * STEPS, [0.02] * STEPS])
    assert found.ratio == float("inf")
    assert str(found) == (
        "rank 2 takes 20 ms a step, the others 0 s (over 1000×); slower than most of them in 20 of 20 steps"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"times_s": [[0.1], [-0.1]]}, "times_s=-0.1: is no duration; give seconds, 0 or more, for each step"),
        ({"times_s": [[float("nan")]]}, "times_s=nan: is no duration; give seconds, 0 or more, for each step"),
        ({"times_s": [], "min_ratio": 1}, "min_ratio=1: is how much slower than the others; use 1.3"),
        ({"times_s": [], "false_alarm": 0}, "false_alarm=0: is a probability; use false_alarm=0.001"),
    ],
)
def test_what_is_no_time_is_refused(arguments: dict[str, object], message: str):
    """Value, rule and remedy."""
    with pytest.raises(InvalidInputError) as refused:
        slow_ranks(**arguments)
    assert str(refused.value) == message


def test_the_evidence_is_plain_data():
    """What a finding quotes."""
    (found,) = slow_ranks([[0.02] * STEPS, [0.02] * STEPS, [0.05] * STEPS, [0.02] * STEPS])
    assert isinstance(found, SlowRank)
    assert (found.rank, found.median_s, found.others_median_s, found.slower_in, found.steps) == (2, 0.05, 0.02, 20, 20)
    assert found.chance < 1e-6
