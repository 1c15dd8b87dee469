"""DeepSeek's schedules, which overlap a forward with a backward: DualPipe from both ends, DualPipeV on a V."""

from __future__ import annotations

import numpy as np

from vizkit.schedules.builders.phases import Phase, lay_out
from vizkit.schedules.builders.zbv import v_stages
from vizkit.schedules.recipe import Recipe
from vizkit.schedules.schedule import Schedule


def dualpipe_v(num_ranks: int, num_microbatches: int, _: int = 2) -> Schedule:
    """DualPipe folded onto half the ranks: rank r has stages r and 2p−1−r (DeepSeek's DualPipe repository, 2025).

    With F, I, W and B = I + W of one stage and F&B the time of an overlapped pair, bubble (p−1)(F&B + B − 3W) on the
    rank that overlaps most, for F = I and W ≤ F; every rank keeps the activations of p + 1/2 microbatches. The
    repository counts 2p + 1 of one stage.
    """
    phases = _eight_steps(np.arange(num_ranks), num_ranks, num_microbatches)
    return lay_out("DualPipeV", phases, v_stages(num_ranks), num_microbatches)


def dualpipe(num_ranks: int, num_microbatches: int, _: int = 2) -> Schedule:
    """Half of the microbatches enter at each end of the ranks (DeepSeek-V3, 2024, arXiv:2412.19437).

    Each rank has a stage of both directions, so parameters twice: stage r of chain 0, which the first half of the
    microbatches goes through, and stage p−1−r of chain 1. With F, I, W and B = I + W of one stage and F&B the time of
    an overlapped pair, bubble (p/2−1)(F&B + B − 3W) on the rank that overlaps most, for F = I and W ≤ F; every rank
    keeps the activations of p + 1 microbatches.
    """
    rank = np.arange(num_ranks)
    to_end = num_ranks - 1 - rank
    chains = np.stack([rank, num_ranks + to_end], axis=1)
    first = np.array([[0, num_microbatches // 2]])
    swapped = np.where(rank[:, None] < num_ranks // 2, [[0, 1]], [[1, 0]])
    return lay_out(
        "DualPipe",
        _eight_steps(np.minimum(rank, to_end), num_ranks // 2, num_microbatches // 2),
        np.take_along_axis(chains, swapped, axis=1),
        num_microbatches,
        first_microbatch=np.take_along_axis(np.broadcast_to(first, chains.shape), swapped, axis=1),
        num_pipelines=2,
    )


def _eight_steps(rank: np.ndarray, length: int, microbatches: int) -> list[Phase]:
    """What the rank in this place of a V does: the eight steps of DeepSeek's repository; `length` ranks to the turn."""
    to_turn = length - 1 - rank
    main = microbatches - 2 * length + rank + 1
    at_turn = rank == length - 1  # whose first pair does not overlap, since that makes the bubble smaller
    half, odd = np.divmod(rank + 1, 2)
    return [
        Phase("F0", 2 * to_turn),
        Phase("F0 F1", rank + 1),
        Phase("I1 W F1", to_turn),
        Phase("F0 B1 F1+B0", at_turn),
        Phase("F0+B1 F1+B0", main - at_turn),
        Phase("B1 F1+B0", to_turn),
        Phase("B1 B0", half),
        Phase("B1 I0", odd),
        Phase("I1 I0", half),
        Phase("W I0", to_turn),
        Phase("W", rank + 1),
    ]


def _twice_the_ranks(num_ranks: int, num_microbatches: int, _: int) -> str | None:
    if num_microbatches < 2 * num_ranks:
        return f"needs 2 microbatches or more for each of {num_ranks} ranks"
    return None


def _both_ways(num_ranks: int, num_microbatches: int, local: int) -> str | None:
    if num_microbatches % 2:
        return "sends one half of the microbatches from each end"
    return _twice_the_ranks(num_ranks, num_microbatches, local)


def _in_pairs(num_ranks: int) -> str | None:
    return "pairs each rank with the one at the mirrored place" if num_ranks % 2 else None


RECIPES = (
    Recipe(
        "DualPipe",
        dualpipe,
        "from both ends at once, forward and backward overlapped",
        "DeepSeek-AI, 2024, arXiv:2412.19437",
        bubble="(p/2−1)(F&B+B−3W) for F = I",
        activations="p+1",
        stages_per_rank=2,
        num_pipelines=2,
        rule=_both_ways,
        rank_rule=_in_pairs,
        torch_runs=False,
    ),
    Recipe(
        "DualPipeV",
        dualpipe_v,
        "DualPipe cut in half, on a V",
        "DeepSeek-AI, 2025, github.com/deepseek-ai/DualPipe",
        bubble="(p−1)(F&B+B−3W)/2 for F = I",
        activations="p+1/2",
        stages_per_rank=2,
        rule=_twice_the_ranks,
    ),
)
