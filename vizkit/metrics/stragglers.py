"""Which ranks are slow, from what their steps took, with a rule that jitter does not trip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.units import seconds_text

MIN_RATIO = 1.3
"""Below this a slow rank costs less than the usual remedies; jitter of ±10 % stays well below it."""
MIN_STEPS = 5
"""A first step pays for warm-up and a second for caches: a median over fewer than five steps follows those."""
FALSE_ALARM = 1e-3
TESTS = 2
"""Slower than most of the others, and slowest of all: two chances to be wrong about each rank."""


@dataclass(frozen=True)
class SlowRank:
    """A rank whose own work takes longer than that of the others, with the evidence; seconds are on the data's clock.

    `median_s` is its median over `steps` steps, `others_median_s` the median of the other ranks' medians, `ratio` the
    first over the second; in `slower_in` of the steps it was slower than most of the others. `chance` bounds the
    probability of as much evidence against any rank if all ranks were alike.
    """

    rank: int
    median_s: float
    others_median_s: float
    slower_in: int
    steps: int
    chance: float

    @property
    def ratio(self) -> float:
        return self.median_s / self.others_median_s if self.others_median_s else float("inf")

    @property
    def excess_s(self) -> float:
        """What each step of the others waits for this rank, where every step ends together."""
        return self.median_s - self.others_median_s

    def __str__(self) -> str:
        ratio = f"{self.ratio:.1f}×" if self.others_median_s else "over 1000×"
        others = seconds_text(self.others_median_s)
        return (
            f"rank {self.rank} takes {seconds_text(self.median_s)} a step, the others {others}"
            f" ({ratio}); slower than most of them in {self.slower_in} of {self.steps} steps"
        )


def slow_ranks(
    times_s: Sequence[Sequence[float]], min_ratio: float = MIN_RATIO, false_alarm: float = FALSE_ALARM
) -> tuple[SlowRank, ...]:
    """The stragglers among ranks, slowest first, from the seconds that each rank's own work took in each step.

    `times_s[rank][step]`: time of the rank without its waits for others, since a step that ends with a collective
    takes all ranks the same. Steps are compared as far as all ranks have them. A rank is named where its median is at
    least `min_ratio` times the median of the others' medians, and chance does not explain it: if ranks were alike, each
    order of their times in a step would be as probable as any other, so that a rank is slowest in a step with
    probability 1/N, and slower than most others with about 1/2, whatever the jitter looks like. The binomial tail of
    what was seen, times the 2 N ways to be wrong (Bonferroni), has to stay below `false_alarm`: with 0.001 that takes
    12 steps of 2 ranks that agree, 7 of 4, and 5 at the least. (Dixon & Mood's sign test, 1946, by ranks.)
    Raises `InvalidInputError` for times that are negative or not finite, `min_ratio` of at most 1, and `false_alarm`
    outside 0 to 1.

    >>> steps = [[0.020, 0.021, 0.019, 0.020, 0.022, 0.020, 0.021]] * 3
    >>> print(*slow_ranks([*steps, [0.060] * 7]))
    rank 3 takes 60 ms a step, the others 20 ms (3.0×); slower than most of them in 7 of 7 steps
    >>> slow_ranks([*steps, [0.021] * 7])
    ()
    """
    times = _checked(times_s, min_ratio, false_alarm)
    size, steps = times.shape
    if size < 2 or steps < MIN_STEPS:
        return ()
    medians = np.median(times, axis=1)
    found = []
    for rank in range(size):
        others = np.sort(np.delete(times, rank, axis=0), axis=0)
        middle = len(others) // 2
        slower_in = int((times[rank] > others[middle]).sum())
        slowest_in = int((times[rank] > others[-1]).sum())
        chance = min(
            binomial_tail(steps, slower_in, (len(others) - middle) / size),
            binomial_tail(steps, slowest_in, 1 / size),
        )
        median, others_median = float(medians[rank]), float(np.median(np.delete(medians, rank)))
        chance = min(1.0, chance * TESTS * size)
        if chance <= false_alarm and median > 0 and median >= min_ratio * others_median:
            found.append(SlowRank(rank, median, others_median, slower_in, steps, chance))
    return tuple(sorted(found, key=lambda slow: (-slow.median_s, slow.rank)))


def binomial_tail(trials: int, hits: int, probability: float) -> float:
    """Chance of at least `hits` of `trials`.

    >>> binomial_tail(2, 1, 0.5)
    0.75
    """
    return float(
        sum(comb(trials, k) * probability**k * (1 - probability) ** (trials - k) for k in range(hits, trials + 1))
    )


def _checked(times_s: Sequence[Sequence[float]], min_ratio: float, false_alarm: float) -> np.ndarray:
    if not min_ratio > 1:
        raise InvalidInputError.because("min_ratio", min_ratio, "is how much slower than the others", "use 1.3")
    if not 0 < false_alarm < 1:
        raise InvalidInputError.because("false_alarm", false_alarm, "is a probability", "use false_alarm=0.001")
    steps = min((len(steps) for steps in times_s), default=0)
    times = np.array([list(row)[:steps] for row in times_s], dtype=float).reshape(len(times_s), steps)
    if not np.isfinite(times).all() or (times < 0).any():
        odd = float(times[~(np.isfinite(times) & (times >= 0))][0])
        raise InvalidInputError.because("times_s", odd, "is no duration", "give seconds, 0 or more, for each step")
    return times
