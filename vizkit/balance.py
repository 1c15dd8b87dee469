"""Divides work among ranks that are not equally fast: samples of a batch, layers of a pipeline."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

from vizkit.errors import InvalidInputError
from vizkit.sizes import is_finite, is_whole, whole_number


def proportional_shares(total: int, speeds: Sequence[float], *, minimum: int = 0) -> list[int]:
    """How many of `total` samples each rank gets so that the slowest is done as early as it can be.

    `speeds` has one number for each rank, in any unit (samples per second from a measurement), and a share of n samples
    takes n / speed. Shares are proportional to speeds, rounded down; what is left goes, one by one, to the rank that
    would be done with one more first (D'Hondt's rule, which minimises max n / speed; the largest remainder does not).
    Of equals, the one that has least to do gets it. `minimum` is what each rank gets at least: 1 where a mean over no
    sample would be NaN.

    Raises `InvalidInputError` for a total that is not a whole number of at least 1, speeds that are not positive and
    finite, and a minimum that the total does not allow.

    >>> proportional_shares(120, [3, 3, 3, 1])
    [36, 36, 36, 12]
    >>> proportional_shares(3, [7, 2, 1]), proportional_shares(3, [7, 2, 1], minimum=1)
    ([3, 0, 0], [1, 1, 1])
    """
    total = whole_number("total", total)
    exact = [Fraction(speed) for speed in _positive("speeds", speeds)]
    _refuse_minimum(minimum, total, len(exact))
    fixed: set[int] = set()  # ranks so slow that they get the minimum, and the others share the rest
    while True:
        rest = total - minimum * len(fixed)
        free = [rank for rank in range(len(exact)) if rank not in fixed]
        shares = dict(zip(free, _shares(rest, [exact[rank] for rank in free]), strict=True))
        if not (short := {rank for rank, share in shares.items() if share < minimum}):
            return [shares.get(rank, minimum) for rank in range(len(exact))]
        fixed |= short


def balanced_stages(costs: Sequence[float], num_stages: int, speeds: Sequence[float] | None = None) -> list[range]:
    """Which layers each stage of a pipeline gets, so that the slowest stage is as fast as it can be.

    `costs` has one number for each layer, in any unit (seconds from `vk.fit_durations`, FLOPs); `speeds` one for each
    stage, alike if left out. A stage takes the sum of its layers' costs / its speed. Stages are contiguous and none is
    empty; among the equally good, the most even; a layer that costs nothing stays with the one before it. Exact, by
    dynamic programming over stages and cuts: num_stages × layers² steps.

    Raises `InvalidInputError` for more stages than layers, costs that are negative or not finite, and speeds that are
    not positive and finite or not one for each stage.

    >>> balanced_stages([1, 1, 1, 1, 1, 1, 1, 1], 2)
    [range(0, 4), range(4, 8)]
    >>> balanced_stages([1, 1, 1, 1, 1, 1, 1, 1], 2, speeds=[3, 1])
    [range(0, 6), range(6, 8)]
    """
    num_stages = whole_number("num_stages", num_stages)
    weights = _not_negative("costs", costs)
    if num_stages > len(weights):
        raise InvalidInputError.because(
            "num_stages",
            num_stages,
            f"there are only {len(weights)} layers, and each stage needs one",
            f"use num_stages={len(weights)} or fewer, or a model with more layers",
        )
    rates = [1.0] * num_stages if speeds is None else _positive("speeds", speeds)
    if len(rates) != num_stages:
        raise InvalidInputError.because(
            "speeds", list(rates), f"must be {num_stages} numbers, one for each stage", "leave it out for equal devices"
        )
    return [range(start, end) for start, end in pairwise(_bounds(weights, rates))]


def _shares(total: int, speeds: Sequence[Fraction]) -> list[int]:
    whole = sum(speeds)
    shares = [math.floor(total * speed / whole) for speed in speeds]

    def turn(rank: int) -> tuple[Fraction, Fraction, int]:
        return (shares[rank] + 1) / speeds[rank], shares[rank] / speeds[rank], rank

    turns = [turn(rank) for rank in range(len(speeds))]
    heapq.heapify(turns)
    for _ in range(total - sum(shares)):
        *_, first = turns[0]
        shares[first] += 1
        heapq.heapreplace(turns, turn(first))
    return shares


def _bounds(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Bounds of the stages: first the smallest possible maximum, then the most even among those that have it."""
    total = [0.0, *accumulate(costs)]
    layers = range(len(total))

    def best(
        value: list[float], speed: float, combine: Callable[[float, float], float], limit: float
    ) -> tuple[list[float], list[int]]:
        """For each first layer, the best value with one stage more in front, and where that stage ends."""
        found, ends = [math.inf] * len(value), [0] * len(value)
        for start in layers:
            for end in range(start + 1, len(value)):
                time = (total[end] - total[start]) / speed
                if time > limit:
                    break
                candidate = combine(time, value[end])
                if candidate <= found[start]:  # of equals the longest: what costs nothing stays with what is before it
                    found[start], ends[start] = candidate, end
        return found, ends

    nothing_left = [math.inf] * len(costs) + [0.0]
    value = nothing_left
    for speed in reversed(speeds):
        value, _ = best(value, speed, max, math.inf)
    limit = value[0] * (1 + 1e-12)
    if not limit * limit * len(speeds) < math.inf:
        raise InvalidInputError.because(
            "costs", max(costs), "is more for one stage than can be counted with", "use a larger unit"
        )
    value, choices = nothing_left, []
    for speed in reversed(speeds):
        value, ends = best(value, speed, lambda time, rest: time * time + rest, limit)
        choices.append(ends)
    bounds = [0]
    for ends in reversed(choices):
        bounds.append(ends[bounds[-1]])
    return bounds


def _refuse_minimum(minimum: Any, total: int, num_ranks: int) -> None:
    if not is_whole(minimum) or minimum < 0:
        raise InvalidInputError.because("minimum", minimum, "must be a whole number, at least 0", "use minimum=1")
    if minimum * num_ranks > total:
        raise InvalidInputError.because(
            "minimum",
            minimum,
            f"{num_ranks} ranks with so many need {minimum * num_ranks} samples, and there are {total}",
            f"use minimum={total // num_ranks} or a larger batch",
        )


def _positive(name: str, values: Iterable[float]) -> list[float]:
    return _numbers(
        name, values, lambda value: value > 0, "must be positive and finite", "leave out a rank that does not work"
    )


def _not_negative(name: str, values: Iterable[float]) -> list[float]:
    return _numbers(
        name,
        values,
        lambda value: value >= 0,
        "must be finite and not negative",
        "use 0 for a layer that costs nothing",
    )


def _numbers(
    name: str, values: Iterable[float], allowed: Callable[[float], bool], rule: str, remedy: str
) -> list[float]:
    try:
        given = list(() if isinstance(values, Mapping) else values)
    except TypeError:
        given = []
    if not given:
        raise InvalidInputError.because(name, values, "has no number", "give one for each")
    for index, value in enumerate(given):
        if not (is_finite(value) and allowed(value)):
            raise InvalidInputError.because(f"{name}[{index}]", value, rule, remedy)
    return [float(value) for value in given]
