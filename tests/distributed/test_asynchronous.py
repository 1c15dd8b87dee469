"""A parameter server on real ranks: what arrives is applied, in order or first come, first served."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn

import vizkit as vk
from vizkit.runtime.asynchronous import Arrival, arrival_order, contribute, serve

START, GOALS = torch.zeros(2), torch.tensor([[0.0, 0.0], [1.0, 2.0], [-1.0, 4.0], [3.0, 1.0]])


def gradient(rank: int, weights: torch.Tensor) -> torch.Tensor:
    """Each rank pulls towards a goal of its own."""
    return weights - GOALS[rank]


def trained(num: int, rate_of: Callable[[int], float], order: Sequence[int] | None):
    if dist.get_rank() == 0:
        return serve(START, num, rate_of, order)
    return contribute(START, lambda weights, _: gradient(dist.get_rank(), weights))


def launched(num: int, rate_of: Callable[[int], float], order: Sequence[int] | None, world_size: int = 4) -> vk.Run:
    return vk.launch(trained, num, rate_of, order, world_size=world_size, device="cpu")


def in_one_process(order: Sequence[int], rate_of: Callable[[int], float]) -> tuple[torch.Tensor, list[Arrival]]:
    """The same arithmetic: each rank computes on the weights that it fetched last."""
    weights, version, arrivals = START, 0, []
    fetched = dict.fromkeys((1, 2, 3), (START, 0))
    for rank in order:
        old, its_version = fetched[rank]
        staleness = version - its_version
        rate = rate_of(staleness)
        if rate:
            weights, version = weights - rate * gradient(rank, old), version + 1
        arrivals.append(Arrival(rank, staleness, bool(rate)))
        fetched[rank] = weights, version
    return weights, arrivals


@pytest.mark.parametrize(
    ("seconds", "num", "expected"),
    [
        ({1: 1}, 3, [1, 1, 1]),
        ({1: 1, 2: 1}, 4, [1, 2, 1, 2]),
        ({2: 1, 1: 1}, 4, [1, 2, 1, 2]),
        ({1: 1, 2: 1, 3: 3}, 7, [1, 2, 1, 2, 1, 2, 3]),
        ({1: 10, 2: 0.5}, 3, [2, 2, 2]),
        ({1: 0.1, 2: 0.3}, 4, [1, 1, 1, 2]),
    ],
)
def test_gradients_arrive_as_fast_as_their_ranks_are(seconds: Mapping[int, float], num: int, expected: list[int]):
    assert arrival_order(seconds, num) == expected


@pytest.mark.parametrize(
    "rate_of",
    [lambda staleness: 0.25, lambda staleness: 0.5 / (1 + staleness), lambda staleness: 0.25 * (staleness <= 2)],
    ids=["one rate", "damped", "stale ones thrown away"],
)
def test_an_ordered_run_is_what_one_process_computes(rate_of: Callable[[int], float]) -> None:
    """Weights to the last bit, staleness of each arrival, and how many gradients each rank computed."""
    order = arrival_order({1: 1, 2: 1, 3: 3}, 21)
    (weights, arrivals), *counts = launched(21, rate_of, order).results
    expected, expected_arrivals = in_one_process(order, rate_of)
    assert torch.equal(weights, expected)
    assert arrivals == expected_arrivals
    assert counts == [9, 9, 3]


def test_staleness_is_the_other_ranks_in_the_mean() -> None:
    """Each update makes what each of the others is computing one older: n − 1, but for the beginning and the end."""
    order = arrival_order({1: 1, 2: 2, 3: 5}, 170)
    _, arrivals = launched(170, lambda staleness: 0.01, order).results[0]
    assert sum(arrival.staleness for arrival in arrivals) / 170 == pytest.approx(2, abs=0.05)


def test_without_an_order_whoever_comes_first_is_served() -> None:
    """As many as asked for arrive, none is lost, all ranks end, and the run can be replayed."""
    run = launched(30, lambda staleness: 0.1, None)
    (weights, arrivals), *counts = run.results
    assert len(arrivals) == sum(counts) == 30
    assert Counter(arrival.rank for arrival in arrivals) == dict(enumerate(counts, start=1))
    assert torch.equal(weights, in_one_process([arrival.rank for arrival in arrivals], lambda _: 0.1)[0])
    assert vk.metrics.traffic(run.replay()).wire_bytes[1:, 0].tolist() == [8 * count for count in counts]


def test_a_rank_that_the_order_leaves_out_ends_at_once() -> None:
    _, *counts = launched(3, lambda staleness: 0.1, [1, 3, 1]).results
    assert counts == [2, 0, 1]


def test_training_that_diverges_ends_too() -> None:
    """Weights that are not a number are no signal."""
    (weights, arrivals), *counts = launched(6, lambda staleness: math.inf, None).results
    assert weights.isnan().any()
    assert len(arrivals) == sum(counts) == 6


@pytest.mark.parametrize(
    ("num", "order", "world_size", "message"),
    [
        (2, None, 4, "num_gradients=2: each of 3 ranks begins with one; use 3 or more"),
        (0, None, 2, "num_gradients=0: must be a whole number, at least 1; use num_gradients=1"),
        (3, [1, 2], 4, "order=2: has to name the rank of each of 3 gradients; use arrival_order"),
        (2, [1, 4], 4, "order=4: is no rank that sends gradients; use ranks 1 to 3"),
        (2, [0, 1], 4, "order=0: is no rank that sends gradients; use ranks 1 to 3"),
        (2, None, 1, "world_size=1: rank 0 only serves; use world_size=2 or more"),
    ],
)
def test_what_would_hang_is_refused(num: int, order: list[int] | None, world_size: int, message: str) -> None:
    with pytest.raises(vk.RankFailedError) as caught:
        launched(num, lambda staleness: 0.1, order, world_size)
    assert caught.value.rank == 0
    assert message in caught.value.remote_traceback


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ({}, "seconds={}: has no rank; give {1: 1.0, 2: 3.0}"),
        ({1: 0}, "seconds[1]=0: must be positive and finite; leave out a rank that does not work"),
        ({1: 1, 2: math.nan}, "seconds[2]=nan: must be positive and finite; leave out a rank that does not work"),
    ],
)
def test_times_that_cannot_be_are_refused(seconds: Mapping[int, float], message: str) -> None:
    with pytest.raises(vk.InvalidInputError) as caught:
        arrival_order(seconds, 3)
    assert str(caught.value) == message


GRADIENTS = {
    "short": lambda weights: weights[:1],
    "half": lambda weights: weights.half(),
    "long": lambda weights: torch.cat([weights, weights]),
    "list": lambda weights: weights.tolist(),
}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "gradient='torch.float32 of shape (1,)': the weights are torch.float32 of shape (2,)"),
        ("half", "gradient='torch.float16 of shape (2,)': the weights are torch.float32 of shape (2,)"),
        ("long", "gradient='torch.float32 of shape (4,)': the weights are torch.float32 of shape (2,)"),
        ("list", "gradient='list': must be a tensor; return a vector"),
    ],
)
def test_a_gradient_unlike_the_weights_is_refused(name: str, message: str) -> None:
    """Gloo would take one with fewer bytes, and the rest of the buffer for numbers."""

    def train():
        if dist.get_rank() == 0:
            return serve(START, 2, lambda staleness: 0.1)
        return contribute(START, lambda weights, _: GRADIENTS[name](weights))

    with pytest.raises(vk.RankFailedError) as caught:
        vk.launch(train, world_size=2, device="cpu")
    assert caught.value.rank == 1
    assert message in caught.value.remote_traceback


@pytest.mark.parametrize("weights", [torch.zeros(2, 2), torch.zeros(0), torch.zeros(2, dtype=torch.int64)], ids=str)
def test_weights_that_are_no_vector_are_refused(weights: torch.Tensor) -> None:
    with pytest.raises(vk.InvalidInputError) as caught:
        contribute(weights, lambda weights, _: weights)
    assert str(caught.value) == (
        f"weights='{weights.dtype} of shape {tuple(weights.shape)}': must be a vector of floating-point numbers; "
        "use torch.nn.utils.parameters_to_vector(model.parameters())"
    )


def test_any_sequence_is_an_order_and_any_vector_a_gradient() -> None:
    """An array of numpy; weights and gradients that autograd follows, and a gradient with gaps in memory."""

    def train():
        weights = nn.utils.parameters_to_vector([nn.Parameter(START)])
        if dist.get_rank() == 0:
            return serve(weights, 2, lambda staleness: 0.5, np.array([1, 2]))
        goal = nn.Parameter(torch.ones(2))
        return contribute(weights, lambda weights, _: torch.stack([weights - goal, weights], dim=1)[:, 0])

    (weights, _), *counts = vk.launch(train, world_size=3, device="cpu").results
    assert (weights.tolist(), weights.requires_grad, counts) == ([1.0, 1.0], False, [1, 1])
