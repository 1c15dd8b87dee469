"""Asynchronous training: rank 0 holds the parameters, the others send gradients, and nobody waits for anybody else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist

from vizkit.errors import InvalidInputError
from vizkit.sizes import is_number, whole_number

SERVER = 0
"""The rank that holds the parameters."""


@dataclass(frozen=True)
class Arrival:
    """A gradient that came to the server: from whom, and how many updates older its parameters were than those held."""

    rank: int
    staleness: int
    is_applied: bool


def arrival_order(seconds: Mapping[int, float], num_gradients: int) -> list[int]:
    """The ranks of the first gradients to arrive: each rank computes one after the other, and nothing else takes time.

    `seconds` is what one gradient takes on each rank, in any unit. Of those that arrive together, the lowest rank comes
    first. Raises `InvalidInputError` for no rank, and for times that are not positive and finite.

    >>> arrival_order({1: 1, 2: 3}, 5)
    [1, 1, 1, 2, 1]
    """
    count = whole_number("num_gradients", num_gradients)
    if not seconds:
        raise InvalidInputError.because("seconds", dict(seconds), "has no rank", "give {1: 1.0, 2: 3.0}")
    for rank, each in seconds.items():
        if not (is_number(each) and 0 < each < float("inf")):
            raise InvalidInputError.because(
                f"seconds[{rank}]", each, "must be positive and finite", "leave out a rank that does not work"
            )
    exact = {rank: Fraction(str(each)) for rank, each in seconds.items()}  # 3 × 0.1 is 0.3, as it is written
    times = sorted((turn * each, rank) for rank, each in exact.items() for turn in range(1, count + 1))
    return [rank for _, rank in times[:count]]


def serve(
    weights: torch.Tensor,
    num_gradients: int,
    rate_of: Callable[[int], float],
    order: Sequence[int] | None = None,
) -> tuple[torch.Tensor, list[Arrival]]:
    """Runs on rank 0, a parameter server: the weights after `num_gradients`, and what arrived. Others `contribute`.

    `weights` is a vector. Each gradient is applied as it comes, at the learning rate `rate_of(staleness)`, or thrown
    away where that is 0; the new weights go back to the rank that sent it, and to no other. `order` says from which
    rank each gradient is taken, which makes a run repeatable (`arrival_order`); without it, from whoever comes first.

    Raises `InvalidInputError` for weights that are no vector of floating-point numbers, for an order of another length,
    one with a rank that cannot contribute, and, without an order, for fewer gradients than ranks.

    >>> import vizkit as vk
    >>> def train():
    ...     weights = torch.zeros(1)
    ...     if dist.get_rank() == SERVER:
    ...         return serve(weights, 3, lambda staleness: 0.5, order=[1, 2, 1])
    ...     return contribute(weights, lambda weights, count: weights - 1)
    >>> (weights, arrivals), *counts = vk.launch(train, world_size=3, device="cpu").results
    >>> weights.item(), [arrival.staleness for arrival in arrivals], counts
    (1.25, [0, 1, 1], [2, 1])
    """
    num_gradients = whole_number("num_gradients", num_gradients)
    weights = _vector(weights)
    order = None if order is None else list(order)
    ranks = range(SERVER + 1, dist.get_world_size())
    _check(ranks, num_gradients, order)
    left = None if order is None else Counter(order)
    handed_out, version, fetched = 0, 0, dict.fromkeys(ranks, 0)
    arrived, arrivals = torch.empty_like(weights), []

    def answer(rank: int) -> None:
        nonlocal handed_out
        goes_on = handed_out < num_gradients if left is None else left[rank] > 0
        handed_out += goes_on
        fetched[rank] = version
        dist.send(torch.cat([weights, weights.new_tensor([float(goes_on)])]), rank)

    for rank in ranks:
        answer(rank)
    for turn in range(num_gradients):
        source = dist.recv(arrived, None if order is None else order[turn])
        if left is not None:
            left[source] -= 1
        staleness = version - fetched[source]
        rate = rate_of(staleness)
        if rate:
            weights, version = weights - rate * arrived, version + 1
        arrivals.append(Arrival(source, staleness, bool(rate)))
        answer(source)
    return weights, arrivals


def contribute(weights: torch.Tensor, gradient_of: Callable[[torch.Tensor, int], torch.Tensor]) -> int:
    """Runs on each rank but 0: fetches weights and sends a gradient until `serve` has enough; how many it sent.

    `weights` is a vector that looks like the server's. `gradient_of(weights, count)` is a vector too; `count` is how
    many gradients this rank has sent before. Raises `InvalidInputError` for weights that are none, and for a gradient
    that is not of their length and dtype.
    """
    weights = _vector(weights)
    message, count = torch.cat([weights, weights.new_zeros(1)]), 0
    while True:
        dist.recv(message, SERVER)
        if not message[-1]:
            return count
        dist.send(_gradient_for(weights, gradient_of(message[:-1].clone(), count)), SERVER)
        count += 1


def _vector(weights: torch.Tensor) -> torch.Tensor:
    if weights.dim() != 1 or not weights.numel() or not weights.is_floating_point():
        raise InvalidInputError.because(
            "weights",
            f"{weights.dtype} of shape {tuple(weights.shape)}",
            "must be a vector of floating-point numbers",
            "use torch.nn.utils.parameters_to_vector(model.parameters())",
        )
    return weights.detach()


def _gradient_for(weights: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """What the server can read: it takes as many bytes as its weights have, whatever comes."""
    if not isinstance(gradient, torch.Tensor):
        raise InvalidInputError.because("gradient", type(gradient).__name__, "must be a tensor", "return a vector")
    if (gradient.shape, gradient.dtype) != (weights.shape, weights.dtype):
        raise InvalidInputError.because(
            "gradient",
            f"{gradient.dtype} of shape {tuple(gradient.shape)}",
            f"the weights are {weights.dtype} of shape {tuple(weights.shape)}",
            "return a gradient like them",
        )
    return gradient.detach().contiguous()


def _check(ranks: range, num_gradients: int, order: Sequence[int] | None) -> None:
    if not ranks:
        raise InvalidInputError.because("world_size", 1, "rank 0 only serves", "use world_size=2 or more")
    if order is None and num_gradients < len(ranks):
        raise InvalidInputError.because(
            "num_gradients", num_gradients, f"each of {len(ranks)} ranks begins with one", f"use {len(ranks)} or more"
        )
    if order is not None and len(order) != num_gradients:
        raise InvalidInputError.because(
            "order", len(order), f"has to name the rank of each of {num_gradients} gradients", "use arrival_order"
        )
    if foreign := sorted(set(order or ()) - set(ranks)):
        raise InvalidInputError.because(
            "order", foreign[0], "is no rank that sends gradients", f"use ranks {ranks[0]} to {ranks[-1]}"
        )
