"""What a check of a schedule finds, as sentences."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
LISTED = 20
"""Findings of one rule that are listed; one more says how many are left."""


class FindingKind(enum.StrEnum):
    """What rule a schedule breaks; causes come before their consequences."""

    NUMBERING = "numbering"
    """Stages or microbatches are not numbered from 0 without a gap, or do not fit the number of pipelines."""
    MISPLACED = "misplaced"
    """A rank without a stage, a stage on two ranks, or a microbatch in the other pipeline's stage."""
    MISSING = "missing"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    """A full and a split backward of one microbatch on one stage."""
    ORDER = "order"
    """An action before the one of its own stage that it builds on."""
    DEADLOCK = "deadlock"
    """Ranks that wait for each other, or a rank that waits for itself."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that keeps a schedule from running; `str` is a sentence: where, the rule, the remedy.

    `cell` is the position in the rank's row, from 0, idle cells not counted; None where there is no such cell.

    >>> from vizkit.schedules import Schedule
    >>> print(*Schedule.from_rows([["0F0", "0B0"], ["1B0", "1F0"]]).check())
    rank 1, cell 0 (1B0): comes before 1F0, which it builds on; move it after 1F0 (cell 1)
    """

    kind: FindingKind
    reason: str
    rank: int | None = None
    cell: int | None = None
    action: str = ""

    def __str__(self) -> str:
        place = "" if self.rank is None else f"rank {self.rank}"
        place += "" if self.cell is None else f", cell {self.cell}"
        place += f" ({self.action})" if self.action else ""
        return f"{place}: {self.reason}" if place else self.reason


def listed(items: Sequence[T], kind: FindingKind, make: Callable[[T], Finding]) -> Iterator[Finding]:
    yield from map(make, items[:LISTED])
    if len(items) > LISTED:
        yield Finding(kind, f"{len(items) - LISTED:,} more like the {LISTED} before")
