"""What a pipeline schedule costs beyond the work itself: its bubble, and the hops that nothing hides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class PipelineCost(NamedTuple):
    """What a step pays for its pipeline.

    `bubble(idle, weights, v)`: `idle` are the seconds of one microbatch on all ranks but the slowest, (p−1)(F+B) where
    ranks are equal, and `weights` what of them are passes for the weights, (p−1)W. `hops(p, m, v)` and `waiting_hops`
    are how many messages' times add to a step, one after the other: where sends are asynchronous, and where a stage
    waits until its message has arrived. They equal `vk.simulate` for p | m and messages that take less than a stage.
    """

    bubble: Callable[[Any, Any, Any], Any]
    hops: Callable[[Any, Any, Any], Any]
    waiting_hops: Callable[[Any, Any, Any], Any]


def _in_turn(p: Any, m: Any, v: Any) -> Any:
    """1F1B where stages wait: of two ranks each sends one message a microbatch, of more those in the middle two."""
    return np.where(p > 2, 2 * m + 2 * p - 5, m + 2 * p - 3)


PIPELINE_COSTS: dict[str, PipelineCost] = {
    "GPipe": PipelineCost(
        lambda idle, weights, v: idle,
        lambda p, m, v: 2 * (p - 1),
        lambda p, m, v: 2 * m + 2 * p - 4,
    ),
    "1F1B": PipelineCost(
        lambda idle, weights, v: idle,
        lambda p, m, v: 2 * (p - 1) * m / p + 2 * (p - 2),
        _in_turn,
    ),
    "Interleaved1F1B": PipelineCost(
        lambda idle, weights, v: idle / v,
        lambda p, m, v: 2 * (p * v - 1),
        lambda p, m, v: (2 * v - 1) * m + 2 * p - 3,
    ),
    "ZB-H1": PipelineCost(
        lambda idle, weights, v: np.maximum(idle - 2 * weights, 0),
        lambda p, m, v: 4 * (p - 1),
        _in_turn,
    ),
}
"""GPipe: Huang et al., 2019; 1F1B and interleaved: Narayanan et al., SC'21, section 2.2; ZB-H1: Qi et al., 2023,
(p−1)(F+I−W)."""


def hidden(communication: Any, behind: Any, layers: Any) -> Any:
    """Seconds that stay exposed of communication that goes layer by layer behind so many seconds of computing them.

    The layer that is computed last, or needed first, has nothing to hide behind.
    """
    return np.maximum(communication / layers, communication - behind * (layers - 1) / layers)


def pipeline_hops(name: str, p: Any, m: Any, v: Any, hop_s: Any, stage_s: Any, asynchronous: bool) -> Any:
    """Seconds of hops that nothing hides, or those for which an edge, with v messages a microbatch, is the slowest."""
    cost = PIPELINE_COSTS[name]
    exposed = (cost.hops if asynchronous else cost.waiting_hops)(p, m, v) * hop_s
    return np.maximum(exposed, m * (v * hop_s - stage_s))
