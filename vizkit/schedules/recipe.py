"""How a named schedule is built, and the sizes that it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vizkit.errors import InvalidInputError
from vizkit.schedules.schedule import Schedule

Builder = Callable[[int, int, int], Schedule]
"""Takes num_ranks, num_microbatches, stages_per_rank, which keep the recipe's rules."""
Rule = Callable[[int, int, int], str | None]
"""Takes the same; says what rule they break, or None."""
LARGEST_TRIED = 4096


@dataclass(frozen=True)
class Recipe:
    """A named schedule: how it is built, what sizes it has, and what its paper says of it.

    `stages_per_rank` is the default; with `fixed_stages` it is the only one. `bubble` and `activations` are formulas in
    words: idle time of a rank, and peak activation memory of a rank in microbatches of one rank's layers.
    """

    name: str
    builder: Builder
    summary: str
    paper: str
    bubble: str
    activations: str
    stages_per_rank: int = 1
    fixed_stages: bool = True
    aliases: tuple[str, ...] = ()
    rule: Rule | None = None
    torch_runs: bool = True
    """Whether torch 2.13's pipeline runtime can execute it."""

    def build(self, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Schedule:
        """The schedule; raises `InvalidInputError` for sizes that it does not have, with the nearest that it has."""
        local = self.stages_per_rank if stages_per_rank is None else stages_per_rank
        for name, value in (
            ("num_ranks", num_ranks),
            ("num_microbatches", num_microbatches),
            ("stages_per_rank", local),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInputError.because(name, value, "must be a whole number, at least 1", f"use {name}=1")
        if self.fixed_stages and local != self.stages_per_rank:
            raise InvalidInputError.because(
                "stages_per_rank",
                local,
                f"{self.name} has exactly {self.stages_per_rank} on each rank",
                "leave it out, or use Interleaved1F1B, LoopedBFS or InterleavedZeroBubble",
            )
        if self.rule and (broken := self.rule(num_ranks, num_microbatches, local)):
            raise InvalidInputError.because(
                "num_microbatches",
                num_microbatches,
                f"{self.name} {broken}",
                self._remedy(num_ranks, num_microbatches, local),
            )
        return self.builder(num_ranks, num_microbatches, local)

    def _remedy(self, num_ranks: int, num_microbatches: int, local: int) -> str:
        """The nearest numbers of microbatches that work, below and above."""
        rule = self.rule
        assert rule
        below = next((m for m in range(num_microbatches, 0, -1) if not rule(num_ranks, m, local)), None)
        largest = max(LARGEST_TRIED, 4 * num_microbatches)
        above = next((m for m in range(num_microbatches, largest) if not rule(num_ranks, m, local)), None)
        valid = [str(m) for m in (below, above) if m is not None]
        return f"use num_microbatches={' or '.join(valid)}" if valid else "change the number of ranks"
