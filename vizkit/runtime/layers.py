"""Divides the layers of a model among the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from vizkit.balance import balanced_stages
from vizkit.errors import InvalidInputError


def split_layers(
    layers: nn.Sequential | nn.ModuleList | Sequence[nn.Module],
    num_stages: int,
    costs: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
) -> list[nn.Sequential]:
    """The layers as `num_stages` contiguous stages whose greatest cost is as small as it can be.

    `costs` has one number for each layer, in any unit (seconds from `vk.fit_durations`, FLOPs); it defaults to the
    layer's number of parameters. `speeds` has one for each stage, where devices differ. Among the equally good, the one
    with the most even stages; a layer that costs nothing stays with the one before it: `vizkit.balance.balanced_stages`
    decides. Raises `InvalidInputError` for more stages than layers and for costs or speeds that do not fit.

    >>> stages = split_layers([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)], 2)
    >>> [[type(layer).__name__ for layer in stage] for stage in stages]
    [['Linear', 'ReLU'], ['Linear', 'ReLU', 'Linear']]
    """
    modules = list(layers)
    stages = balanced_stages(_costs(modules, costs), num_stages, speeds)
    return [nn.Sequential(*(modules[layer] for layer in stage)) for stage in stages]


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
