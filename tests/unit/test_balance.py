"""Who gets how much: samples in proportion to speed, layers so that the slowest stage is fast."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vizkit as vk
from vizkit.balance import balanced_stages, proportional_shares

SPEEDS = st.lists(st.one_of(st.integers(1, 9), st.floats(0.1, 9)), min_size=1, max_size=4)


def all_shares(total: int, num_ranks: int, minimum: int) -> Iterator[tuple[int, ...]]:
    return (s for s in itertools.product(range(minimum, total + 1), repeat=num_ranks) if sum(s) == total)


def slowest(shares: Sequence[int], speeds: Sequence[float]) -> Fraction:
    return max(Fraction(share) / Fraction(speed) for share, speed in zip(shares, speeds, strict=True))


@pytest.mark.parametrize(
    ("total", "speeds", "expected"),
    [
        (120, [1, 1, 1, 1], [30, 30, 30, 30]),
        (120, [3, 3, 3, 1], [36, 36, 36, 12]),
        (120, [0.3, 0.3, 0.3, 0.1], [36, 36, 36, 12]),
        (10, [1, 1, 1], [4, 3, 3]),
        (12, [3, 3, 1], [5, 5, 2]),  # 6, 5, 1 would take as long; this leaves nobody idle
        (3, [7, 2, 1], [3, 0, 0]),  # the largest remainder says 2, 1, 0, which takes 1/2 and not 3/7
        (1, [1, 5], [0, 1]),
        (7, [2.5], [7]),
        (10**12, [3, 1], [75 * 10**10, 25 * 10**10]),
    ],
)
def test_shares_are_proportional_to_speeds(total: int, speeds: list[float], expected: list[int]) -> None:
    assert proportional_shares(total, speeds) == expected


@given(SPEEDS, st.integers(1, 7), st.data())
def test_no_other_shares_are_done_earlier(speeds: list[float], total: int, data: st.DataObject) -> None:
    """Against all ways to divide so many samples, exactly: also where each rank has to have a minimum."""
    minimum = data.draw(st.integers(0, total // len(speeds)))
    shares = proportional_shares(total, speeds, minimum=minimum)
    assert sum(shares) == total
    assert min(shares) >= minimum
    best = min(slowest(other, speeds) for other in all_shares(total, len(speeds), minimum))
    assert slowest(shares, speeds) == best


@given(SPEEDS, st.integers(1, 1000))
def test_nobody_gets_less_than_a_proportional_share_rounded_down(speeds: list[float], total: int) -> None:
    whole = sum(map(Fraction, speeds))
    for share, speed in zip(proportional_shares(total, speeds), speeds, strict=True):
        assert share >= total * Fraction(speed) // whole


@given(SPEEDS, st.integers(1, 100), st.integers(1, 8))
def test_the_unit_of_speed_does_not_matter(speeds: list[float], total: int, power: int) -> None:
    """Twice as fast everywhere is the same division; a power of two is exact in floats."""
    assert proportional_shares(total, speeds) == proportional_shares(total, [s * 2**power for s in speeds])


@pytest.mark.parametrize(
    ("costs", "num_stages", "speeds", "expected"),
    [
        ([1] * 8, 2, None, [4, 4]),
        ([1] * 8, 2, [3, 1], [6, 2]),
        ([1] * 8, 2, [1, 3], [2, 6]),
        ([1] * 9, 4, [1, 1, 1, 1], [3, 2, 2, 2]),
        ([1] * 10, 4, [3, 3, 3, 1], [3, 3, 3, 1]),
        ([4, 1, 1, 1, 1], 2, [2, 1], [3, 2]),
        ([0, 0, 0, 0], 2, [1, 9], [3, 1]),
        ([5, 1], 2, [1, 9], [1, 1]),
    ],
)
def test_the_slowest_stage_is_as_fast_as_can_be(
    costs: list[float], num_stages: int, speeds: list[float] | None, expected: list[int]
) -> None:
    """A stage takes its costs / its speed; of equally good cuts the most even."""
    assert [len(stage) for stage in balanced_stages(costs, num_stages, speeds)] == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.data())
def test_no_other_cut_has_a_faster_slowest_stage(costs: list[int], data: st.DataObject) -> None:
    """Against all cuts; stages are contiguous, have all layers, and none is empty."""
    num_stages = data.draw(st.integers(1, len(costs)))
    speeds = data.draw(st.lists(st.integers(1, 5), min_size=num_stages, max_size=num_stages))

    def bottleneck(stages: Sequence[Sequence[int]]) -> Fraction:
        return max(Fraction(sum(costs[i] for i in s), speed) for s, speed in zip(stages, speeds, strict=True))

    found = balanced_stages(costs, num_stages, speeds)
    assert [layer for stage in found for layer in stage] == list(range(len(costs)))
    assert all(found)
    others = itertools.combinations(range(1, len(costs)), num_stages - 1)
    cuts = ([range(a, b) for a, b in itertools.pairwise([0, *cut, len(costs)])] for cut in others)
    assert bottleneck(found) == min(map(bottleneck, cuts))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: proportional_shares(0, [1]), "total=0: must be a whole number, at least 1; use total=1"),
        (lambda: proportional_shares(2.5, [1]), "total=2.5: must be a whole number, at least 1; use total=2"),  # type: ignore[arg-type]
        (lambda: proportional_shares(4, []), "speeds=[]: has no number; give one for each"),
        (
            lambda: proportional_shares(4, [1, 0]),
            "speeds[1]=0: must be positive and finite; leave out a rank that does not work",
        ),
        (lambda: proportional_shares(4, [float("inf")]), "speeds[0]=inf: must be positive and finite; leave out a"),
        (lambda: proportional_shares(4, ["fast"]), "speeds[0]='fast': must be positive and finite"),  # type: ignore[list-item]
        (lambda: proportional_shares(4, [1], minimum=-1), "minimum=-1: must be a whole number, at least 0; use minimu"),
        (
            lambda: proportional_shares(4, [1, 1, 1], minimum=2),
            "minimum=2: 3 ranks with so many need 6 samples, and there are 4; use minimum=1 or a larger batch",
        ),
        (
            lambda: balanced_stages([1, 2], 3),
            "num_stages=3: there are only 2 layers, and each stage needs one; use num_stages=2 or fewer, or a model",
        ),
        (lambda: balanced_stages([1, -2], 1), "costs[1]=-2: must be finite and not negative; use 0 for a layer that c"),
        (
            lambda: balanced_stages([1, 2], 2, [1]),
            "speeds=[1.0]: must be 2 numbers, one for each stage; leave it out for equal devices",
        ),
        (lambda: balanced_stages([1, 2], 2, [1, -1]), "speeds[1]=-1: must be positive and finite; leave out a rank th"),
    ],
)
def test_what_cannot_be_divided_is_refused(call, message: str) -> None:
    """Value, rule, remedy."""
    with pytest.raises(vk.InvalidInputError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_layers_are_split_by_the_same_rule() -> None:
    """`vk.split_layers` takes speeds too."""
    from torch import nn

    stages = vk.split_layers([nn.Linear(2, 2) for _ in range(8)], 2, speeds=[3, 1])
    assert [len(stage) for stage in stages] == [6, 2]
