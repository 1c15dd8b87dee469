"""Zero bubble on a V: rank r has stages r and 2p−1−r, so that a microbatch turns round on the last rank."""

from __future__ import annotations

import numpy as np

from vizkit.schedules.builders.phases import Phase, lay_out
from vizkit.schedules.recipe import Recipe
from vizkit.schedules.schedule import Schedule


def v_stages(num_ranks: int) -> np.ndarray:
    """The two stages of each rank."""
    rank = np.arange(num_ranks)
    return np.stack([rank, 2 * num_ranks - 1 - rank], axis=1)


def zbv_zero_bubble(num_ranks: int, num_microbatches: int, _: int = 2) -> Schedule:
    """ZB-V as torch lays it out for F = I = W (Qi et al., 2023, arXiv:2401.10241, section 6).

    A rank idles not at all between its own first and last action if F = I = W, m ≥ 2p−1 and links are free, and then
    the last rank begins p−1 forwards of a stage after the first; for other durations there is some bubble. Every rank
    keeps the activations of p microbatches. For m < 2p−1 it is the schedule for 2p−1 microbatches without the rest.
    """
    rank = np.arange(num_ranks)
    rest = num_ranks - rank
    full = max(num_microbatches, 2 * num_ranks - 1)
    schedule = lay_out(
        "ZBVZeroBubble",
        [
            Phase("F0", 2 * rest - 1),
            Phase("F1 F0", rank),
            Phase("F1 I1 W1", rest),
            Phase("F0 I0 W0 F1 I1 W1", full - (2 * num_ranks - 1) + rank),
            Phase("I0 W0 F1 I1 W1", rest - 1),
            Phase("I0 I1", rank),
            Phase("I0 W0", rest),
            Phase("W1", rank),
            Phase("W0", rank),
        ],
        v_stages(num_ranks),
        full,
    )
    return schedule if full == num_microbatches else _first_microbatches(schedule, num_microbatches)


def _first_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The schedule without the microbatches from this number on."""
    kept = schedule.microbatch < num_microbatches
    return Schedule.from_columns(
        schedule.name,
        num_microbatches=num_microbatches,
        stage_ranks=schedule.stage_ranks,
        offsets=np.concatenate(([0], np.cumsum(kept)))[schedule.offsets],
        kind=schedule.kind[kept],
        stage=schedule.stage[kept],
        microbatch=schedule.microbatch[kept],
    )


RECIPES = (
    Recipe(
        "ZBVZeroBubble",
        zbv_zero_bubble,
        "zero bubble on a V of two stages a rank",
        "Qi et al., 2023, arXiv:2401.10241",
        bubble="0 for F = I = W",
        activations="p",
        stages_per_rank=2,
        aliases=("ZBV", "ZB-V"),
    ),
)
