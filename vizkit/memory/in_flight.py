"""What each rank of a pipeline holds and passes on: counted in the schedule's own order of actions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.schedules.catalogue import recipe
from vizkit.schedules.catalogue import schedule as build
from vizkit.schedules.schedule import Schedule
from vizkit.sizes import is_whole
from vizkit.trace import SpanKind


@dataclass(frozen=True, slots=True)
class PipelineRank:
    """One rank of a pipeline at its fullest.

    `passes` are microbatches on stages that wait for their backward (the pass for the weights, where that is apart);
    `first` and `last` those among them on a chain's first and last stage, each at its own peak, 0 where that stage is
    elsewhere. In a step the rank sends `forwards` outputs to next stages and `backwards` gradients to previous ones; it
    receives as many of each the other way round.
    """

    rank: int
    passes: int
    first: int
    last: int
    forwards: int
    backwards: int

    @property
    def hops(self) -> int:
        """Messages that the rank sends in a step; it receives as many."""
        return self.forwards + self.backwards


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`local_stages` on each rank, `num_pipelines` chains of stages; `distinct` are the first rank, the last, and the
    fullest in between, which stands for the others.
    """

    ranks: tuple[PipelineRank, ...]
    local_stages: int
    num_pipelines: int
    distinct: tuple[PipelineRank, ...]

    @property
    def in_flight(self) -> float:
        """Microbatches of one rank's share of a model that the fullest rank holds.

        >>> pipeline("1F1B", 4, 8, 1).in_flight, pipeline("Interleaved1F1B", 4, 8, 2).in_flight
        (4.0, 5.5)
        """
        return max(rank.passes for rank in self.ranks) * self.num_pipelines / self.local_stages

    def at(self, stage: int) -> PipelineRank:
        """The rank at this place along the pp axis; raises `InvalidInputError` outside."""
        if not is_whole(stage) or not 0 <= stage < len(self.ranks):
            last = len(self.ranks) - 1
            raise InvalidInputError.because(
                "stage", stage, f"the pp axis has places 0 to {last}", f"use stage={last}, or None for the fullest"
            )
        return self.ranks[stage]


def pipeline(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Pipeline:
    """What the ranks of this schedule hold and send; without `stages_per_rank` as many as the schedule is made for.

    Raises `InvalidInputError` for a schedule that is not known, or not in these sizes.
    """
    plan = recipe(schedule, "schedule")
    return known_pipeline(plan.name, *plan.check(num_ranks, num_microbatches, stages_per_rank))


@functools.lru_cache(maxsize=4096)
def known_pipeline(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Pipeline:
    """The same of sizes that are known to be right; kept, as a planner asks for the same again and again.

    By formula for the schedules that have one here and for their usual sizes, else counted.
    """
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    peaks = _PEAKS.get(schedule)
    if peaks is None or (v > 1 and m % p):
        return count(build(schedule, num_ranks=p, num_microbatches=m, stages_per_rank=v))
    ranks = []
    for rank in range(p):
        passes, first, last = peaks(p, m, v, rank)
        is_first, is_last = rank == 0, rank == p - 1
        sends = p > 1
        ranks.append(
            PipelineRank(
                rank, passes, first * is_first, last * is_last, m * (v - is_last) * sends, m * (v - is_first) * sends
            )
        )
    return _gathered(ranks, v, 1)


def count(schedule: Schedule) -> Pipeline:
    """The same by walking through each rank's actions."""
    stage_ranks = schedule.stage_ranks
    chain = len(stage_ranks) // schedule.num_pipelines
    microbatches = schedule.num_microbatches // schedule.num_pipelines
    ranks = []
    for rank in range(schedule.num_ranks):
        mine = [stage for stage, holder in enumerate(stage_ranks) if holder == rank]
        held = _held(schedule, rank)
        onward = sum(stage % chain != chain - 1 and stage_ranks[stage + 1] != rank for stage in mine)
        back = sum(stage % chain != 0 and stage_ranks[stage - 1] != rank for stage in mine)
        firsts, lasts = ([stage for stage in mine if stage % chain == end] for end in (0, chain - 1))
        ranks.append(
            PipelineRank(rank, held(mine), held(firsts), held(lasts), onward * microbatches, back * microbatches)
        )
    return _gathered(ranks, len(stage_ranks) // schedule.num_ranks, schedule.num_pipelines)


def _held(schedule: Schedule, rank: int) -> Callable[[list[int]], int]:
    """The most microbatches that a rank holds of some of its stages: from a forward to the last pass of its backward.

    An action that is joined to the one before begins before that one ends.
    """
    here = slice(schedule.offsets[rank], schedule.offsets[rank + 1])
    kind, stage, microbatch = schedule.kind[here], schedule.stage[here], schedule.microbatch[here]
    forward = kind == SpanKind.FORWARD.code
    joins_next = np.append(schedule.joined[here][1:], False)
    key = stage.astype(np.int64) * schedule.num_microbatches + microbatch
    last_pass = np.zeros(len(key), bool)
    last_pass[len(key) - 1 - np.unique(key[::-1], return_index=True)[1]] = True

    def peak(stages: list[int]) -> int:
        counted = np.isin(stage, stages)
        change = np.zeros(len(key) + 2, np.int64)
        np.add.at(change, np.flatnonzero(forward & counted), 1)
        ends = np.flatnonzero(last_pass & counted)
        np.add.at(change, ends + 1 + joins_next[ends], -1)
        return int(np.cumsum(change).max(initial=0))

    return peak


def _gathered(ranks: list[PipelineRank], local_stages: int, num_pipelines: int) -> Pipeline:
    inner = [max(ranks[1:-1], key=lambda rank: rank.passes)] if len(ranks) > 2 else []
    distinct = (ranks[0], *inner, *ranks[1:][-1:])
    return Pipeline(tuple(ranks), local_stages, num_pipelines, distinct)


def _interleaved(p: int, m: int, v: int, rank: int) -> tuple[int, int, int]:
    """Narayanan et al., SC'21, §2.2: 2(p−r−1) + (v−1)p forwards before the first backward, and one more."""
    return min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v), min(2 * p if v > 1 else 2 * p - 1, m), 1


_PEAKS: dict[str, Callable[[int, int, int, int], tuple[int, int, int]]] = {
    "GPipe": lambda p, m, v, rank: (m, m, m),
    "LoopedBFS": lambda p, m, v, rank: (m * v, m, m),
    "1F1B": lambda p, m, v, rank: (min(p - rank, m), min(p, m), 1),
    "Eager1F1B": lambda p, m, v, rank: (min(2 * (p - rank) - 1, m), min(2 * p - 1, m), 1),
    "Interleaved1F1B": _interleaved,
}
"""By schedule, for p ranks, m microbatches, v stages a rank: `passes`, `first` and `last` of a rank."""
