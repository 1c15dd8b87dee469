"""What keeps a pipeline schedule from running, said in sentences."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import chain

import numpy as np

from vizkit.schedules.actions import ACTION_KINDS, Action
from vizkit.schedules.deadlock import Wait, cell_numbers, circle_of_waits
from vizkit.schedules.dependencies import Dependencies
from vizkit.schedules.findings import LISTED, Finding, FindingKind, listed
from vizkit.schedules.schedule import Schedule
from vizkit.trace import NONE, SpanKind

__all__ = ["Finding", "FindingKind", "check", "numbering"]

_F, _B, _I, _W = range(len(ACTION_KINDS))
_ROW_OF_CODE = np.full(256, NONE)
_ROW_OF_CODE[[kind.code for kind in ACTION_KINDS]] = range(len(ACTION_KINDS))
_LARGEST_TABLE = 1_000_000
"""Entries of a table of stages by microbatches, or 16 for each action if that is more."""


def check(schedule: Schedule) -> list[Finding]:
    """What keeps a schedule from running, causes before consequences; [] if nothing does.

    Every microbatch has a forward on every stage of its pipeline, each action once, and either a backward on all of
    them or none anywhere; a backward is B, or I and W. A stage lies on one rank, and a rank has a stage. Actions come
    after those of their own stage that they build on, and no ranks wait for each other in a circle, with overlapped
    cells as strict as torch's runtime takes them: both inputs first, and what both send leaves when both are done.
    Linear in the number of actions; of each rule the first 20 findings are listed.
    """
    wrong_numbers = [*numbering(schedule)]
    if wrong_numbers:
        return wrong_numbers
    facts = _Facts(schedule)
    needs = Dependencies.of(schedule)
    rules = (_gaps, _ranks, _pipelines, _missing, _duplicates, _conflicts)
    return [*chain.from_iterable(rule(facts) for rule in rules), *_order(facts, needs), *_deadlock(facts, needs)]


class _Facts:
    """Tables that the rules share, of stages by microbatches."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        stages, microbatches = schedule.num_stages, schedule.num_microbatches
        self.cells = cell_numbers(schedule)
        self.row = _ROW_OF_CODE[schedule.kind]
        self.first = np.full((len(ACTION_KINDS), stages, microbatches), NONE, np.int64)
        """Position of the first action of each kind, stage and microbatch, or −1."""
        key = (self.row * stages + schedule.stage) * microbatches + schedule.microbatch
        backwards = np.arange(len(schedule) - 1, -1, -1)  # so that the first of duplicates is written last
        self.first.ravel()[key[backwards]] = backwards
        self.has = self.first >= 0
        pipeline = np.arange(stages) // schedule.stages_per_pipeline
        bounds = np.arange(schedule.num_pipelines + 1) * microbatches // schedule.num_pipelines
        numbers = np.arange(microbatches)
        self.belongs = (bounds[pipeline, None] <= numbers) & (numbers < bounds[pipeline + 1, None])
        """Whether a microbatch passes through a stage."""

    def at(self, position: int, kind: FindingKind, reason: str) -> Finding:
        rank = int(self.schedule.rank[position])
        return Finding(kind, reason, rank, self.cell(position), str(self.schedule[position]))

    def cell(self, position: int) -> int:
        """Position of an action's cell in its rank's row."""
        return int(self.cells[position] - self.cells[self.schedule.offsets[self.schedule.rank[position]]])


def numbering(schedule: Schedule) -> Iterator[Finding]:
    """Numbers with which nothing else can be asked."""
    stages, microbatches, pipelines = schedule.num_stages, schedule.num_microbatches, schedule.num_pipelines
    kind = FindingKind.NUMBERING
    if not len(schedule):
        yield Finding(kind, "no rank has an action; add forwards, such as 0F0")
    if pipelines < 1 or stages % pipelines or stages < pipelines:
        yield Finding(
            kind,
            f"{stages} stages cannot be {pipelines} pipelines of equal length; use num_pipelines=1, or add stages",
        )
    outside = (schedule.stage < 0) | (schedule.stage >= stages) | (_ROW_OF_CODE[schedule.kind] < 0)
    outside |= (schedule.microbatch < 0) | (schedule.microbatch >= microbatches)
    for position in np.flatnonzero(outside)[:LISTED].tolist():
        yield Finding(
            kind,
            f"is not F, B, I or W with a stage below {stages} and a microbatch below {microbatches}; renumber it",
            int(schedule.rank[position]),
            None,
            str(schedule[position]),
        )
    if stages * microbatches > max(_LARGEST_TABLE, 16 * len(schedule)):
        yield Finding(
            kind,
            f"{microbatches:,} microbatches on {stages:,} stages need a forward each, and there are only "
            f"{len(schedule):,} actions; number stages and microbatches from 0 without a gap",
        )


def _gaps(facts: _Facts) -> Iterator[Finding]:
    unused = ~np.any(facts.has, axis=0)
    for name, plural, axis in (("stage", "stages", 1), ("microbatch", "microbatches", 0)):
        numbers = [f"{name} {number}" for number in np.flatnonzero(np.all(unused, axis=axis)).tolist()]
        rule = f"has no action; {plural} are numbered from 0 without a gap: renumber or add it"
        yield from listed(numbers, FindingKind.NUMBERING, functools.partial(_gap, rule))


def _gap(rule: str, number: str) -> Finding:
    return Finding(FindingKind.NUMBERING, f"{number} {rule}")


def _ranks(facts: _Facts) -> Iterator[Finding]:
    """A stage on each rank, and each stage on one."""
    schedule, kind = facts.schedule, FindingKind.MISPLACED
    yield from listed(
        np.flatnonzero(np.diff(schedule.offsets) == 0).tolist(),
        kind,
        lambda rank: Finding(kind, "has no action; every rank holds a stage: leave the rank out", rank),
    )
    owner = np.asarray(schedule.stage_ranks)[schedule.stage]
    strays = np.flatnonzero(owner != schedule.rank)
    of_stage = schedule.stage[strays].astype(np.int64) * schedule.num_ranks + schedule.rank[strays]
    firsts = np.sort(strays[np.unique(of_stage, return_index=True)[1]])
    yield from listed(
        firsts.tolist(),
        kind,
        lambda position: facts.at(
            position,
            kind,
            f"stage {schedule.stage[position]} lies on rank {owner[position]}, and a stage lies on one rank; "
            f"move its actions to one",
        ),
    )


def _pipelines(facts: _Facts) -> Iterator[Finding]:
    """Each microbatch in its own pipeline."""
    schedule, kind = facts.schedule, FindingKind.MISPLACED
    yield from listed(
        np.flatnonzero(~facts.belongs[schedule.stage, schedule.microbatch]).tolist(),
        kind,
        lambda position: facts.at(
            position,
            kind,
            f"microbatch {schedule.microbatch[position]} passes through the other pipeline's stages; each of the "
            f"{schedule.num_pipelines} pipelines has its own share of the microbatches: change stage or microbatch",
        ),
    )


def _missing(facts: _Facts) -> Iterator[Finding]:
    has = facts.has
    used = np.any(has, axis=0)
    expected = facts.belongs & np.any(used, axis=1)[:, None] & np.any(used, axis=0)
    backward = has[_B] | has[_I] | has[_W]
    rules = (
        (_F, expected & ~has[_F], "every microbatch has a forward on every stage"),
        (
            _B,
            expected & ~backward & backward.any(),
            "a schedule that trains has a backward, B or I and W, for every microbatch on every stage",
        ),
        (_I, has[_W] & ~has[_I] & ~has[_B], "W is half of a backward and needs I, the other half"),
        (_W, has[_I] & ~has[_W] & ~has[_B], "I is half of a backward and needs W, the other half"),
    )
    for row, absent, rule in rules:
        kind = ACTION_KINDS[row]
        actions = [Action(stage, kind, microbatch) for stage, microbatch in np.argwhere(absent).tolist()]
        yield from listed(actions, FindingKind.MISSING, functools.partial(_lacks, facts.schedule, rule))


def _lacks(schedule: Schedule, rule: str, action: Action) -> Finding:
    rank = schedule.stage_ranks[action.stage]
    reason = f"is missing; {rule}: add {action} to rank {rank}"
    return Finding(FindingKind.MISSING, reason, rank, None, str(action))


def _duplicates(facts: _Facts) -> Iterator[Finding]:
    schedule, kind = facts.schedule, FindingKind.DUPLICATE
    first = facts.first[facts.row, schedule.stage, schedule.microbatch]
    yield from listed(
        np.flatnonzero(first != np.arange(len(schedule))).tolist(),
        kind,
        lambda position: facts.at(
            position,
            kind,
            f"is already cell {facts.cell(first[position])} of rank {schedule.rank[first[position]]}; "
            "an action is done once: delete one, or correct its number",
        ),
    )


def _conflicts(facts: _Facts) -> Iterator[Finding]:
    has, kind = facts.has, FindingKind.CONFLICT
    both = has[_B] & (has[_I] | has[_W])
    half = np.where(has[_I], facts.first[_I], facts.first[_W])
    yield from listed(
        np.sort(half[both]).tolist(),
        kind,
        lambda position: facts.at(
            position,
            kind,
            f"stands beside {_full(facts.schedule[position])}, which is the full backward already; "
            "use B alone, or I and W",
        ),
    )


def _full(half: Action) -> Action:
    return Action(half.stage, SpanKind.BACKWARD, half.microbatch)


def _ranks_of(schedule: Schedule, positions: np.ndarray) -> np.ndarray:
    """The rank of the action at each position, or −1 where there is none."""
    return np.where(positions >= 0, schedule.rank[np.maximum(positions, 0)], NONE)


def _order(facts: _Facts, needs: Dependencies) -> Iterator[Finding]:
    """Each action after the one of its own stage that it builds on."""
    schedule, kind, own = facts.schedule, FindingKind.ORDER, needs.own
    late = (own > np.arange(len(own))) & (_ranks_of(schedule, own) == schedule.rank)
    yield from listed(
        np.flatnonzero(late).tolist(),
        kind,
        lambda position: facts.at(
            position,
            kind,
            f"comes before {schedule[own[position]]}, which it builds on; "
            f"move it after {schedule[own[position]]} (cell {facts.cell(own[position])})",
        ),
    )


def _deadlock(facts: _Facts, needs: Dependencies) -> Iterator[Finding]:
    """A rank that waits for itself, then the shortest circle of ranks that wait for each other."""
    schedule, kind = facts.schedule, FindingKind.DEADLOCK
    here = np.arange(len(schedule))
    source = _ranks_of(schedule, needs.input)
    inside = source == schedule.rank
    yield from listed(
        np.flatnonzero(inside & (needs.input > here)).tolist(),
        kind,
        lambda position: facts.at(
            position,
            kind,
            f"comes before {schedule[needs.input[position]]}, whose output it takes, on the same rank, which then "
            f"waits for itself; move it after {schedule[needs.input[position]]} "
            f"(cell {facts.cell(needs.input[position])})",
        ),
    )
    circle = circle_of_waits(schedule, facts.cells, np.where(inside | (source < 0), NONE, needs.input))
    if circle:
        sentence = "; ".join(
            _wait(facts, wait, following) for wait, following in zip(circle, [*circle[1:], circle[0]], strict=True)
        )
        yield facts.at(circle[0].action, kind, f"{sentence}: a circle of waits; change the order on one of these ranks")


def _wait(facts: _Facts, wait: Wait, following: Wait) -> str:
    """`following` is what the rank waits before that this one waits for."""
    schedule = facts.schedule
    blocked = schedule[following.action]
    if following.action == wait.needed:
        where = ""
    elif facts.cells[following.action] == facts.cells[wait.needed]:
        where = f", which shares a cell with {blocked}"
    else:
        where = f", which stands behind {blocked}"
    return (
        f"rank {wait.rank} cannot do {schedule[wait.action]} (cell {facts.cell(wait.action)}) "
        f"until rank {wait.needed_rank} has done {schedule[wait.needed]}{where}"
    )
