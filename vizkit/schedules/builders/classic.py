"""One stage a rank, backward in one piece: from one device at a time to one forward, one backward in turn."""

from __future__ import annotations

import numpy as np

from vizkit.schedules.builders.phases import Phase, lay_out
from vizkit.schedules.recipe import Recipe
from vizkit.schedules.schedule import Schedule


def sequential(num_ranks: int, num_microbatches: int, _: int = 1) -> Schedule:
    """Naive layer-wise model parallelism: a microbatch is done on all ranks before the next one begins.

    One rank works at a time, whatever the durations (Huang et al., 2019, arXiv:1811.06965, figure 2b): bubble
    (p−1)m(F+B) a rank, of pm(F+B) in all, so that 1/p of the time is used. A rank keeps the activations of 1
    microbatch.
    """
    return _one_stage("Sequential", num_ranks, num_microbatches, [Phase("F0 B0", num_microbatches)])


def forward_only(num_ranks: int, num_microbatches: int, _: int = 1) -> Schedule:
    """All forwards and nothing else: inference (GPipe's forward half, Huang et al., 2019, arXiv:1811.06965).

    Bubble (p−1)F a rank; a rank holds 1 microbatch, while it works on it.
    """
    return _one_stage("ForwardOnly", num_ranks, num_microbatches, [Phase("F0", num_microbatches)])


def gpipe(num_ranks: int, num_microbatches: int, _: int = 1) -> Schedule:
    """All forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965).

    Bubble (p−1)(F+B) a rank; every rank keeps the activations of all m microbatches.
    """
    phases = [Phase("F0", num_microbatches), Phase("B0", num_microbatches)]
    return _one_stage("GPipe", num_ranks, num_microbatches, phases)


def one_forward_one_backward(num_ranks: int, num_microbatches: int, _: int = 1) -> Schedule:
    """Warm-up, then a forward and a backward in turn, then the backwards that are left (PipeDream-Flush).

    Bubble (p−1)(F+B) a rank; rank r keeps the activations of min(p−r, m) microbatches (Narayanan et al., 2021,
    arXiv:2006.09503).
    """
    return _in_turn("1F1B", num_ranks, num_microbatches, num_ranks - 1 - np.arange(num_ranks))


def eager_one_forward_one_backward(num_ranks: int, num_microbatches: int, _: int = 1) -> Schedule:
    """1F1B with 2(p−r)−1 forwards before the first backward, so that sends hide behind work (Zhuang et al., 2023).

    Bubble (p−1)(F+B) a rank with a free link, as 1F1B, and less than 1F1B with a slow one; rank r keeps the activations
    of min(2(p−r)−1, m) microbatches (arXiv:2211.05322).
    """
    return _in_turn("Eager1F1B", num_ranks, num_microbatches, 2 * (num_ranks - 1 - np.arange(num_ranks)))


def _in_turn(name: str, num_ranks: int, num_microbatches: int, warm_up: np.ndarray) -> Schedule:
    """`warm_up` forwards, at most all, then a forward and a backward in turn, then the backwards that are left."""
    warm_up = np.minimum(warm_up, num_microbatches)
    phases = [Phase("F0", warm_up), Phase("F0 B0", num_microbatches - warm_up), Phase("B0", warm_up)]
    return _one_stage(name, num_ranks, num_microbatches, phases)


def _one_stage(name: str, num_ranks: int, num_microbatches: int, phases: list[Phase]) -> Schedule:
    return lay_out(name, phases, np.arange(num_ranks)[:, None], num_microbatches)


RECIPES = (
    Recipe(
        "Sequential",
        sequential,
        "one device works at a time: naive layer-wise model parallelism",
        "Huang et al., 2019, arXiv:1811.06965, figure 2b",
        bubble="(p−1)m(F+B)",
        activations="1",
        aliases=("Naive", "Layer-wise"),
    ),
    Recipe(
        "GPipe",
        gpipe,
        "all forwards, then all backwards",
        "Huang et al., 2019, arXiv:1811.06965",
        bubble="(p−1)(F+B)",
        activations="m",
    ),
    Recipe(
        "1F1B",
        one_forward_one_backward,
        "one forward, one backward in turn",
        "Narayanan et al., 2021, arXiv:2006.09503",
        bubble="(p−1)(F+B)",
        activations="min(p, m)",
        aliases=("PipeDream-Flush",),
    ),
    Recipe(
        "Eager1F1B",
        eager_one_forward_one_backward,
        "1F1B with a longer warm-up, which hides transfers",
        "Zhuang et al., 2023, arXiv:2211.05322",
        bubble="(p−1)(F+B)",
        activations="min(2p−1, m)",
    ),
    Recipe(
        "ForwardOnly",
        forward_only,
        "all forwards and no backward: inference",
        "Huang et al., 2019, arXiv:1811.06965",
        bubble="(p−1)F",
        activations="1",
        aliases=("Inference",),
    ),
)
