"""How a named schedule is built, and the sizes that it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from vizkit.errors import InvalidInputError
from vizkit.schedules.schedule import Schedule
from vizkit.sizes import whole_number

Builder = Callable[[int, int, int], Schedule]
"""Takes num_ranks, num_microbatches, stages_per_rank, which keep the recipe's rules."""
Rule = Callable[[int, int, int], str | None]
"""Takes the same; says what rule their number of microbatches breaks, or None."""
RankRule = Callable[[int], str | None]
"""Takes num_ranks; says what rule it breaks, or None."""
MOST_PASSES = 100_000_000
"""Microbatches times stages of a schedule; more would take tens of gigabytes."""
_REACH = 4096
"""The nearest sizes that work are looked for so far away, and among multiples of the number of ranks."""


@dataclass(frozen=True)
class Recipe:
    """A named schedule: how it is built, what sizes it has, and what its paper says of it.

    `stages_per_rank` is the default; with `fixed_stages` it is the only one. `bubble` and `activations` are formulas in
    words: idle time of the rank that idles most, and peak activation memory of the rank that holds most, in
    microbatches of one rank's layers. p, m and v are ranks, microbatches and stages of a rank; F, B, I and W are what
    one microbatch takes on one rank, on all the stages there that it passes; F&B a forward and a backward that overlap.
    Links are free, W ≤ F, W ≤ I and m ≥ 2p; the builder's docstring says what holds beyond that.
    """

    name: str
    builder: Builder
    summary: str
    paper: str
    bubble: str
    activations: str
    stages_per_rank: int = 1
    fixed_stages: bool = True
    num_pipelines: int = 1
    """Chains of stages that each hold the whole model: 2 where microbatches come from both ends."""
    aliases: tuple[str, ...] = ()
    rule: Rule | None = None
    rank_rule: RankRule | None = None
    torch_runs: bool = True
    """Whether torch 2.13's pipeline runtime can execute it."""

    def build(self, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Schedule:
        """The schedule; raises `InvalidInputError` for sizes that it does not have, with the nearest that it has."""
        return self.builder(*self.check(num_ranks, num_microbatches, stages_per_rank))

    def check(
        self, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None, ranks_name: str = "num_ranks"
    ) -> tuple[int, int, int]:
        """Ranks, microbatches and stages of a rank, where the schedule has them; raises `InvalidInputError` as `build`.

        `ranks_name` is what the caller calls the number of ranks.
        """
        ranks, microbatches = whole_number(ranks_name, num_ranks), whole_number("num_microbatches", num_microbatches)
        local = self.stages_per_rank if stages_per_rank is None else whole_number("stages_per_rank", stages_per_rank)
        if self.fixed_stages and local != self.stages_per_rank:
            raise InvalidInputError.because(
                "stages_per_rank",
                local,
                f"{self.name} has exactly {self.stages_per_rank} on each rank",
                "leave it out, or use Interleaved1F1B, LoopedBFS or InterleavedZeroBubble",
            )
        if ranks * microbatches * local > MOST_PASSES:
            most = MOST_PASSES // (ranks * local)
            raise InvalidInputError.because(
                "num_microbatches",
                microbatches,
                f"pass {ranks * local:,} stages, together over {MOST_PASSES:,} times",
                f"use num_microbatches={most} or fewer" if most else "use fewer ranks",
            )
        if self.rank_rule and (broken := self.rank_rule(ranks)):
            nearest = _nearest(ranks, lambda p: not self._broken(p, microbatches, local)) or _nearest(
                ranks, lambda p: not (self.rank_rule and self.rank_rule(p))
            )
            raise InvalidInputError.because(ranks_name, ranks, f"{self.name} {broken}", f"use {ranks_name}={nearest}")
        if self.rule and (broken := self.rule(ranks, microbatches, local)):
            raise InvalidInputError.because(
                "num_microbatches",
                microbatches,
                f"{self.name} {broken}",
                f"use num_microbatches={_nearest(microbatches, lambda m: not self._broken(ranks, m, local), ranks)}",
            )
        return ranks, microbatches, local

    def _broken(self, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> str | None:
        """The first rule that these sizes break, or None."""
        broken = self.rank_rule(num_ranks) if self.rank_rule else None
        return broken or (self.rule(num_ranks, num_microbatches, stages_per_rank) if self.rule else None)


def _nearest(value: int, works: Callable[[int], bool], scale: int = 1) -> str:
    """The nearest numbers that work, below and above, as "8 or 10"; "" if none is near value or twice the scale."""
    multiple = value - value % scale
    below = chain(range(value - 1, max(value - _REACH, 0), -1), range(multiple, 0, -scale)[:2])
    above = chain(range(value + 1, value + _REACH), range(multiple + scale, multiple + 4 * scale, scale))
    found = (next((str(n) for n in numbers if works(n)), None) for numbers in (below, above))
    return " or ".join(filter(None, found))
