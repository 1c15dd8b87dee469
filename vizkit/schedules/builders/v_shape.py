"""Two stages a rank on a V, with a half or a third of 1F1B's activation memory."""

from __future__ import annotations

import numpy as np

from vizkit.schedules.builders.zbv import v_stages
from vizkit.schedules.recipe import Recipe
from vizkit.schedules.schedule import Schedule
from vizkit.trace import SpanKind

PERIOD = 6
"""Passes of one microbatch on one rank: F, I and W on both of its stages; each takes one unit of time in a block."""
FORWARD_DOWN, FORWARD_UP, INPUT_DOWN, INPUT_UP = range(4)
"""A microbatch goes down the ranks and up again, and so does its gradient: rows of a block, in order of time."""
_ROW_KINDS = np.array([SpanKind(letter).code for letter in "FFIIWW"], np.uint8)
_ROW_SLOTS = np.array([0, 1, 1, 0, 1, 0])
"""What the four rows of a block are, and the two of its weights: the lower stage of a rank is in slot 0."""


def v_half(num_ranks: int, num_microbatches: int, _: int = 2) -> Schedule:
    """Half of 1F1B's activation memory (Qi et al., 2024, arXiv:2405.15362).

    Rank r has stages r and 2p−1−r. For F = I = W on every stage and m ≥ p the bubble is half of 1F1B's,
    (p−1)(F+B)/2 with F and B of a rank, for even p; for odd p > 1 it is one pass of a stage less. With W + 2I ≥ 2F and
    W + 2F ≥ 2I it does not grow with m. A rank keeps the activations of ⌊(p+2)/2⌋ microbatches at most.

    This is the paper's block; in place of the paper's search for a better order at both ends, on every second rank the
    W of the upper stage lets one pass go first. Without it the bubble is (p+2)/2 passes longer for even p.
    """
    block = _block(num_ranks, down=2, up=1, turns=(1, 4, 2) if num_ranks % 2 == 0 else (1, 1, 2))
    weights = _as_early_as_possible(block)
    weights[0, (num_ranks - 1) % 2 :: 2] += 1.5
    return _repeated("V-Half", block, weights, num_microbatches)


def v_min(num_ranks: int, num_microbatches: int, _: int = 2) -> Schedule:
    """The least activation memory that a V of stages has, a third of 1F1B's (Qi et al., 2024, arXiv:2405.15362).

    Rank r has stages r and 2p−1−r. For F = I = W on every stage the bubble is two thirds of 1F1B's, 2(p−1)(F+B)/3 with
    F and B of a rank, if 3 divides p; else, for p > 1, it is one pass of a stage less. For other durations it can grow
    with m. A rank keeps the activations of ⌊(p+4)/3⌋ microbatches at most.
    """
    block = _block(num_ranks, down=1, up=1, turns=(3, 1, 3) if num_ranks % 3 == 0 else (1, 1, 1))
    return _repeated("V-Min", block, _as_early_as_possible(block), num_microbatches)


def _block(num_ranks: int, *, down: int, up: int, turns: tuple[int, int, int]) -> np.ndarray:
    """When one microbatch passes each rank, in units of one pass; shape (4, ranks).

    From a rank to the next it takes `down` units on the way down and `up` on the way up; `turns` are those at the last
    rank, at the first and at the last again, chosen so that no rank has two passes at once when a microbatch starts
    every `PERIOD` units.
    """
    rank = np.arange(num_ranks)
    to_end = num_ranks - 1 - rank
    block = np.empty((4, num_ranks), np.int64)
    block[FORWARD_DOWN] = down * rank
    block[FORWARD_UP] = block[FORWARD_DOWN, -1] + turns[0] + up * to_end
    block[INPUT_DOWN] = block[FORWARD_UP, 0] + turns[1] + down * rank
    block[INPUT_UP] = block[INPUT_DOWN, -1] + turns[2] + up * to_end
    return block


def _as_early_as_possible(block: np.ndarray) -> np.ndarray:
    """When the W of the upper and of the lower stage fit in first, in units of one pass; shape (2, ranks)."""
    taken = (block[:, :, None] % PERIOD == np.arange(PERIOD)).any(axis=0)
    free = np.argsort(taken, axis=1, kind="stable")[:, :2].T
    upper, lower = block[INPUT_DOWN], block[INPUT_UP]
    wait_upper, wait_lower = ((free - after - 1) % PERIOD + 1 for after in (upper, lower))
    straight = wait_upper[0] + wait_lower[1] <= wait_upper[1] + wait_lower[0]
    return np.where(
        straight, [upper + wait_upper[0], lower + wait_lower[1]], [upper + wait_upper[1], lower + wait_lower[0]]
    ).astype(float)


def _repeated(name: str, block: np.ndarray, weights: np.ndarray, num_microbatches: int) -> Schedule:
    """The order in which the passes follow when every microbatch repeats the block; what is idle in it goes."""
    num_ranks = block.shape[1]
    stages = v_stages(num_ranks)
    starts = np.concatenate([block, weights])[:, :, None] + PERIOD * np.arange(num_microbatches)
    by_rank = starts.transpose(1, 0, 2).reshape(num_ranks, -1)
    row, microbatch = np.divmod(np.argsort(by_rank, axis=1, kind="stable"), num_microbatches)
    return Schedule.from_columns(
        name,
        num_microbatches=num_microbatches,
        stage_ranks=[*range(num_ranks), *reversed(range(num_ranks))],
        offsets=np.arange(num_ranks + 1) * by_rank.shape[1],
        kind=_ROW_KINDS[row].ravel(),
        stage=np.take_along_axis(stages, _ROW_SLOTS[row], axis=1).ravel(),
        microbatch=microbatch.ravel(),
    )


_PAPER = "Qi et al., 2024, arXiv:2405.15362"
RECIPES = (
    Recipe(
        "V-Half",
        v_half,
        "a V of stages in half the memory, and half the bubble if F = I = W",
        _PAPER,
        bubble="(p−1)(F+B)/2 for F = I = W",
        activations="⌊(p+2)/2⌋",
        stages_per_rank=2,
    ),
    Recipe(
        "V-Min",
        v_min,
        "a V of stages in the least memory, with two thirds of the bubble if F = I = W",
        _PAPER,
        bubble="2(p−1)(F+B)/3 for F = I = W",
        activations="⌊(p+4)/3⌋",
        stages_per_rank=2,
    ),
)
