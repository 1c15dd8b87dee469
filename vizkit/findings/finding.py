"""A finding, and all findings about one run."""

from __future__ import annotations

import enum
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from vizkit.trace import Clock
from vizkit.units import seconds_text

MOST_RANKS_NAMED = 8


class FindingKind(enum.StrEnum):
    """What can be wrong with a run; among findings of equal cost, those that come first here come first."""

    DRIFTED_REPLICA = "drifted replica"
    REPEATED_DATA = "repeated data"
    STRAGGLER = "straggler"
    IMBALANCE = "imbalance"
    SERIAL_TRANSFER = "serial transfer"
    BUBBLE = "bubble"
    STARVED_LOADER = "starved loader"
    SMALL_BUCKETS = "small buckets"
    EXPOSED_COMMUNICATION = "exposed communication"
    OVERSUBSCRIBED_CORES = "oversubscribed cores"
    MEMORY_NEAR_LIMIT = "memory near limit"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: `what` in a sentence, the numbers behind it, what to do.

    `ranks` are those at fault or concerned, in order. `cost_s` is seconds on `clock` that each rank loses by it, mean
    over the ranks unless the rule of its kind says otherwise; costs of two findings may overlap.
    """

    kind: FindingKind
    ranks: tuple[int, ...]
    cost_s: float
    clock: Clock
    what: str
    evidence: str
    remedy: str

    def __str__(self) -> str:
        cost = f"{seconds_text(self.cost_s)} a rank, {self.clock.value} clock"
        return f"{self.kind.value} ({cost}): {self.what}\n  evidence: {self.evidence}\n  remedy: {self.remedy}"


@dataclass(frozen=True, repr=False)
class Diagnosis(Sequence[Finding]):
    """Findings, most costly first; false, and "nothing found" as text, where there is none.

    `num_rules` rules looked at `world_size` ranks over `makespan_s` seconds on `clock`.

    >>> print(Diagnosis((), Clock.VIRTUAL, makespan_s=0.25, world_size=4, num_rules=11))
    nothing found: 11 rules, 4 ranks, 250 ms on the virtual clock
    """

    findings: tuple[Finding, ...]
    clock: Clock
    makespan_s: float
    world_size: int
    num_rules: int

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Finding]: ...
    def __getitem__(self, index: int | slice) -> Finding | Sequence[Finding]:
        return self.findings[index]

    def __len__(self) -> int:
        return len(self.findings)

    @property
    def kinds(self) -> tuple[FindingKind, ...]:
        """The kinds that were found, in the order of the findings, each once."""
        return tuple(dict.fromkeys(finding.kind for finding in self.findings))

    def of(self, kind: FindingKind | str) -> tuple[Finding, ...]:
        """The findings of one kind."""
        return tuple(finding for finding in self.findings if finding.kind == FindingKind(kind))

    def __str__(self) -> str:
        size = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        looked = f"{size}, {seconds_text(self.makespan_s)} on the {self.clock.value} clock"
        if not self.findings:
            return f"nothing found: {self.num_rules} rules, {looked}"
        head = f"{len(self)} finding{'s' * (len(self) != 1)}, most costly first; {looked}"
        return "\n".join([head, *(f"{number}. {finding}" for number, finding in enumerate(self.findings, 1))])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *_ = str(self).split("\n")
        items = "".join(_item(finding) for finding in self.findings)
        mark = "" if self.findings else "✓ "
        return f"<div><b>{mark}{html.escape(head)}</b>{f'<ol>{items}</ol>' if items else ''}</div>"


def _item(finding: Finding) -> str:
    first, *rest = map(html.escape, str(finding).split("\n"))
    title, _, what = first.partition(": ")
    return f"<li><b>{title}</b>: {what}{''.join(f'<br>{line.strip()}' for line in rest)}</li>"


def ranks_text(ranks: Iterable[int]) -> str:
    """
    >>> ranks_text([2]), ranks_text([0, 3, 1]), ranks_text(range(20))
    ('rank 2', 'ranks 0, 1 and 3', '20 ranks (0, 1, 2, …)')
    """
    numbers = sorted(ranks)
    if len(numbers) > MOST_RANKS_NAMED:
        return f"{len(numbers)} ranks ({', '.join(map(str, numbers[:3]))}, …)"
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
