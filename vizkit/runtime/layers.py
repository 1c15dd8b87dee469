"""Divides the layers of a model among the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from torch import nn

from vizkit.errors import InvalidInputError
from vizkit.sizes import whole_number


def split_layers(
    layers: nn.Sequential | nn.ModuleList | Sequence[nn.Module],
    num_stages: int,
    costs: Sequence[float] | None = None,
) -> list[nn.Sequential]:
    """The layers as `num_stages` contiguous stages whose greatest cost is as small as it can be.

    `costs` has one number for each layer, in any unit (seconds from `vk.fit_durations`, FLOPs); it defaults to the
    layer's number of parameters. Among the equally good, the one with the most even stages; a layer that costs nothing
    stays with the one before it. Raises `InvalidInputError` for more stages than layers and for costs that do not fit.

    >>> stages = split_layers([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)], 2)
    >>> [[type(layer).__name__ for layer in stage] for stage in stages]
    [['Linear', 'ReLU'], ['Linear', 'ReLU', 'Linear']]
    """
    modules = list(layers)
    num_stages = whole_number("num_stages", num_stages)
    if num_stages > len(modules):
        raise InvalidInputError.because(
            "num_stages",
            num_stages,
            f"there are only {len(modules)} layers, and each stage needs one",
            f"use num_stages={len(modules)} or fewer, or a model with more layers",
        )
    weights = _costs(modules, costs)
    bounds = _partition(weights, num_stages)
    return [nn.Sequential(*modules[start:end]) for start, end in pairwise(bounds)]


def _costs(modules: Sequence[nn.Module], costs: Sequence[float] | None) -> list[float]:
    if costs is None:
        counted = [float(sum(p.numel() for p in module.parameters())) for module in modules]
        return counted if any(counted) else [1.0] * len(modules)
    given = [float(cost) for cost in costs]
    if len(given) != len(modules) or not all(math.isfinite(cost) and cost >= 0 for cost in given):
        raise InvalidInputError.because(
            "costs",
            list(costs),
            f"must be {len(modules)} numbers, finite and not negative: one for each layer",
            "leave it out to balance by parameters",
        )
    return given


def _partition(costs: Sequence[float], num_stages: int) -> list[int]:
    """Bounds of the stages: first the smallest possible maximum, then the most even among those that have it."""
    total = [0.0, *accumulate(costs)]
    layers = range(len(costs) + 1)

    def best(
        value: list[float], combine: Callable[[float, float], float], limit: float
    ) -> tuple[list[float], list[int]]:
        """For each number of layers left, the best value with one stage more, and where that stage ends."""
        found, ends = [math.inf] * len(value), [0] * len(value)
        for start in layers:
            for end in range(start + 1, len(value)):
                cost = total[end] - total[start]
                if cost > limit:
                    break
                candidate = combine(cost, value[end])
                if candidate <= found[start]:  # of equals the longest: what costs nothing stays with what is before it
                    found[start], ends[start] = candidate, end
        return found, ends

    nothing_left = [math.inf] * len(costs) + [0.0]
    value = nothing_left
    for _ in range(num_stages):
        value, _ends = best(value, max, math.inf)
    limit = value[0] * (1 + 1e-12)
    value, choices = nothing_left, []
    for _ in range(num_stages):
        value, ends = best(value, lambda cost, rest: cost * cost + rest, limit)
        choices.append(ends)
    bounds = [0]
    for ends in reversed(choices):
        bounds.append(ends[bounds[-1]])
    return bounds
