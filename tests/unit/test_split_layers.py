"""Which layers go to which stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import vizkit as vk


def sizes(stages: Sequence[nn.Sequential]) -> list[int]:
    return [len(stage) for stage in stages]


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 1, 1], 2, [3, 2]),
        ([1, 1, 1, 1, 1], 4, [2, 1, 1, 1]),
        ([4, 1, 1, 1, 1], 2, [1, 4]),
        ([1, 1, 1, 1, 4], 2, [4, 1]),
        ([5, 1, 1], 3, [1, 1, 1]),
        ([2, 0, 2, 0], 2, [2, 2]),
        ([0, 0, 0, 9], 2, [3, 1]),
        ([9, 1, 1, 1, 1, 1], 3, [1, 3, 2]),
    ],
)
def test_the_most_expensive_stage_is_as_cheap_as_can_be(
    costs: list[float], num_stages: int, expected: list[int]
) -> None:
    """Contiguous, none empty; of equally good splits the most even; what costs nothing stays with what is before."""
    layers = [nn.Identity() for _ in costs]
    stages = vk.split_layers(layers, num_stages, costs)
    assert sizes(stages) == expected
    assert [layer for stage in stages for layer in stage] == layers


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.data())
def test_no_other_split_has_a_cheaper_bottleneck(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    found = vk.split_layers([nn.Identity() for _ in costs], num_stages, costs)
    ends = list(itertools.accumulate(sizes(found)))

    def bottleneck(cuts: Sequence[int]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs)]))

    assert len(ends) == num_stages
    assert ends[-1] == len(costs)
    others = itertools.combinations(range(1, len(costs)), num_stages - 1)
    assert bottleneck(ends[:-1]) == min(map(bottleneck, others))


def test_parameters_are_the_default_cost() -> None:
    """A wide layer weighs more than two narrow ones; layers without any parameter count alike."""
    layers = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    assert sizes(vk.split_layers(layers, 2)) == [1, 3]
    assert sizes(vk.split_layers([nn.ReLU() for _ in range(4)], 2)) == [2, 2]


@pytest.mark.parametrize(
    ("num_stages", "costs", "message"),
    [
        (3, None, "num_stages=3: there are only 2 layers, and each stage needs one; use num_stages=2 or fewer, or a"),
        (0, None, "num_stages=0: must be a whole number, at least 1; use num_stages=1"),
        (2, [1], "costs=[1]: must be 2 numbers, finite and not negative: one for each layer; leave it out to balance"),
        (2, [1, -1], "costs=[1, -1]: must be 2 numbers, finite and not negative: one for each layer"),
        (2, [1, float("nan")], "costs=[1, nan]: must be 2 numbers, finite and not negative: one for each layer"),
    ],
)
def test_a_split_that_cannot_be_is_refused(num_stages: int, costs: list[float] | None, message: str) -> None:
    with pytest.raises(vk.InvalidInputError) as caught:
        vk.split_layers([nn.ReLU(), nn.ReLU()], num_stages, costs)
    assert str(caught.value).startswith(message)
