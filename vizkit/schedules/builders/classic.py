"""One stage a rank: all forwards first, one forward one backward."""

from __future__ import annotations

import numpy as np

from vizkit.schedules.builders.merging import Passes, merge
from vizkit.schedules.recipe import Recipe
from vizkit.schedules.schedule import Schedule
from vizkit.trace import SpanKind


def gpipe(num_ranks: int, num_microbatches: int, _: int = 1) -> Schedule:
    """All forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965).

    Bubble (p−1)(F+B) a rank; every rank keeps the activations of all m microbatches.
    """
    rank, k = _ranks_and_microbatches(num_ranks, num_microbatches)
    return merge(
        "GPipe",
        [
            Passes(SpanKind.FORWARD, k, rank, k),
            Passes(SpanKind.BACKWARD, k + num_microbatches, rank, k),
        ],
        num_microbatches=num_microbatches,
        stage_ranks=range(num_ranks),
    )


def one_forward_one_backward(num_ranks: int, num_microbatches: int, _: int = 1) -> Schedule:
    """Warm-up, then a forward and a backward in turn, then the backwards that are left (PipeDream-Flush, 2021).

    Bubble (p−1)(F+B) a rank; rank r keeps the activations of min(p−r, m) microbatches (Narayanan et al.,
    arXiv:2006.09503).
    """
    rank, k = _ranks_and_microbatches(num_ranks, num_microbatches)
    warm_up = np.minimum(num_ranks - 1 - rank, num_microbatches)
    return merge(
        "1F1B",
        [
            Passes(SpanKind.FORWARD, np.where(k < warm_up, k - warm_up, 2 * (k - warm_up)), rank, k),
            Passes(SpanKind.BACKWARD, 2 * k + 1, rank, k),
        ],
        num_microbatches=num_microbatches,
        stage_ranks=range(num_ranks),
    )


def _ranks_and_microbatches(num_ranks: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(num_ranks)[:, None], np.arange(num_microbatches)[None, :]


RECIPES = (
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
        activations="p",
        aliases=("PipeDream-Flush",),
    ),
)
