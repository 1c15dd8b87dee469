"""One stage a rank, backward split in two: the passes for the weights fill what 1F1B leaves empty."""

from __future__ import annotations

import numpy as np

from vizkit.schedules.builders.phases import late_weights, lay_out
from vizkit.schedules.recipe import Recipe
from vizkit.schedules.schedule import Schedule


def zb_h1(num_ranks: int, num_microbatches: int, _: int = 1) -> Schedule:
    """1F1B with W as late as 1F1B's memory allows (Qi et al., 2023, arXiv:2401.10241, handcrafted schedule 1).

    Bubble (p−1)(F+I−W) between a rank's own first and last action (`Bubble.over_longest_rank`) for W ≤ F and m ≥ p, and
    of the whole step if W ≤ I too, where 1F1B has (p−1)(F+I+W); a latency c ≤ W/2 on each edge makes it (p−1)(F+I−W+4c)
    for m > p. Every rank keeps the activations of min(p, m) microbatches. The paper writes B for I.
    Torch's InterleavedZeroBubble with one stage a rank is this schedule.
    """
    rank = np.arange(num_ranks)
    phases = late_weights(num_ranks - 1 - rank, rank, num_microbatches)
    return lay_out("ZB-H1", phases, rank[:, None], num_microbatches)


def zb_h2(num_ranks: int, num_microbatches: int, _: int = 1) -> Schedule:
    """Twice as many forwards ahead as ZB-H1 (Qi et al., 2023, arXiv:2401.10241, handcrafted schedule 2).

    Bubble (p−1)(F+I−2W) for W ≤ F, W ≤ (F+I)/2 and m ≥ 2p−1, which is none for F = I = W; a latency c ≤ (F+I)/2 on
    each edge makes it (p−1)(F+I−2W+2c). That is idle time of a rank between its own first and last action
    (`Bubble.over_longest_rank`): later ranks begin and end later, which the paper's optimizer step for each rank makes
    harmless. Every rank keeps the activations of min(2p−1, m) microbatches. The paper writes B for I.
    """
    rank = np.arange(num_ranks)
    phases = late_weights(2 * (num_ranks - 1 - rank), 2 * rank, num_microbatches)
    return lay_out("ZB-H2", phases, rank[:, None], num_microbatches)


_PAPER = "Qi et al., 2023, arXiv:2401.10241"
RECIPES = (
    Recipe(
        "ZB-H1",
        zb_h1,
        "1F1B with the passes for the weights moved into its bubbles",
        _PAPER,
        bubble="(p−1)(F+I−W)",
        activations="p",
        aliases=("ZB1P",),
    ),
    Recipe(
        "ZB-H2",
        zb_h2,
        "no bubble but a skew between ranks, for twice the memory",
        _PAPER,
        bubble="(p−1)(F+I−2W)",
        activations="2p−1",
    ),
)
