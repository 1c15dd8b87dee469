"""Several stages a rank, dealt out in rounds: rank r has stages r, p+r, 2p+r, ..."""

from __future__ import annotations

import numpy as np

from vizkit.schedules.builders.phases import Phase, Turns, late_weights, lay_out
from vizkit.schedules.recipe import Recipe
from vizkit.schedules.schedule import Schedule


def interleaved_1f1b(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """1F1B over several stages a rank, depth first (Narayanan et al., 2021, arXiv:2104.04473).

    Microbatches go in rounds of R = m / max(1, m // p), which is p where p divides m: a rank takes a round through each
    of its v stages in turn. With F and B of a rank's v stages together, bubble (p−1)(F+B)/v a rank, and
    (v−1)(p−m)(F+B)/v more for m < p. Rank r keeps the activations of min((v−1)R + 2(p−1−r) + 1, vm)/v microbatches,
    which is p + (p−1)/v on the first rank for R = p.
    """
    total, round_size, forwards, backwards = _rounds(num_ranks, num_microbatches, stages_per_rank)
    rank = np.arange(num_ranks)
    warm_up = np.minimum((stages_per_rank - 1) * round_size + 2 * (num_ranks - 1 - rank), total)
    return lay_out(
        "Interleaved1F1B",
        [Phase("F", warm_up), Phase("F B", total - warm_up), Phase("B", warm_up)],
        _looped_stages(num_ranks, stages_per_rank),
        num_microbatches,
        forwards=forwards,
        backwards=backwards,
    )


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Interleaved 1F1B with the backward split: W fills what would be bubble (Qi et al., 2023, arXiv:2401.10241).

    ZB-H1 over v stages a rank, in the rounds of Interleaved1F1B. With F, I and W of a rank's v stages together, bubble
    (p−1)(F+I−W)/v a rank for W ≤ F, W ≤ I and m ≥ p; every rank keeps the activations of min((v−1)R + p, vm)/v
    microbatches, which is p for R = p.
    """
    total, round_size, forwards, backwards = _rounds(num_ranks, num_microbatches, stages_per_rank)
    rank = np.arange(num_ranks)
    warm_up = (stages_per_rank - 1) * round_size + num_ranks - 1 - rank
    return lay_out(
        "InterleavedZeroBubble",
        late_weights(warm_up, rank, total),
        _looped_stages(num_ranks, stages_per_rank),
        num_microbatches,
        forwards=forwards,
        backwards=backwards,
    )


def looped_bfs(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """All microbatches through a rank's first stage, then all through its next (Lamy-Poirier, 2022, arXiv:2211.05953).

    Backwards go from the last stage to the first, newest microbatch first, as torch has it. With F and B of a rank's v
    stages together, bubble (p−1)(F+B)/v a rank, and (v−1)(p−m)(F+B)/v more for m < p; every rank keeps the activations
    of all m microbatches.
    """
    microbatch = np.tile(np.arange(num_microbatches), stages_per_rank)
    slot = np.repeat(np.arange(stages_per_rank), num_microbatches)
    total = num_microbatches * stages_per_rank
    return lay_out(
        "LoopedBFS",
        [Phase("F", total), Phase("B", total)],
        _looped_stages(num_ranks, stages_per_rank),
        num_microbatches,
        forwards=Turns(slot, microbatch),
        backwards=Turns(slot[::-1], microbatch[::-1]),
    )


def _looped_stages(num_ranks: int, stages_per_rank: int) -> np.ndarray:
    return np.arange(num_ranks)[:, None] + num_ranks * np.arange(stages_per_rank)


def _rounds(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, int, Turns, Turns]:
    """Passes of a rank in each direction, microbatches of a round, and the order of forwards and of backwards."""
    total = num_microbatches * stages_per_rank
    round_size = num_microbatches // _num_rounds(num_ranks, num_microbatches)
    turn, within = np.divmod(np.arange(total), round_size)
    past_rounds, slot = np.divmod(turn, stages_per_rank)
    microbatch = past_rounds * round_size + within
    return total, round_size, Turns(slot, microbatch), Turns(stages_per_rank - 1 - slot, microbatch)


def _num_rounds(num_ranks: int, num_microbatches: int) -> int:
    return max(1, num_microbatches // num_ranks)


def _equal_rounds(num_ranks: int, num_microbatches: int, _: int) -> str | None:
    rounds = _num_rounds(num_ranks, num_microbatches)
    if num_microbatches % rounds:
        return f"on {num_ranks} ranks has {rounds} rounds of equally many microbatches"
    return None


RECIPES = (
    Recipe(
        "Interleaved1F1B",
        interleaved_1f1b,
        "1F1B over several stages a rank",
        "Narayanan et al., 2021, arXiv:2104.04473",
        bubble="(p−1)(F+B)/v",
        activations="p + (p−1)/v for p | m",
        stages_per_rank=2,
        fixed_stages=False,
        rule=_equal_rounds,
    ),
    Recipe(
        "LoopedBFS",
        looped_bfs,
        "GPipe over several stages a rank, breadth first",
        "Lamy-Poirier, 2022, arXiv:2211.05953",
        bubble="(p−1)(F+B)/v",
        activations="m",
        stages_per_rank=2,
        fixed_stages=False,
    ),
    Recipe(
        "InterleavedZeroBubble",
        interleaved_zero_bubble,
        "Interleaved1F1B with the backward for the weights in its bubbles",
        "Qi et al., 2023, arXiv:2401.10241",
        bubble="(p−1)(F+I−W)/v",
        activations="p for p | m",
        stages_per_rank=2,
        fixed_stages=False,
        rule=_equal_rounds,
    ),
)
