"""Which ranks of a schedule wait for each other in a circle."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from vizkit.schedules.schedule import Schedule
from vizkit.trace import NONE

_SEARCH_STEPS = 1_000_000
"""The search for the shortest circle stops after about so many; a hundred ranks need ten thousand."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that stands still: before `action`, because `needed_rank` has not done `needed`; positions of actions."""

    rank: int
    action: int
    needed_rank: int
    needed: int


def cell_numbers(schedule: Schedule) -> np.ndarray:
    """For each action, the number of its cell, counted through all ranks; overlapped actions share one."""
    opens = ~schedule.joined
    opens[schedule.offsets[:-1][np.diff(schedule.offsets) > 0]] = True
    return np.cumsum(opens) - 1


def circle_of_waits(schedule: Schedule, cells: np.ndarray, inputs: np.ndarray) -> list[Wait]:
    """The shortest circle of ranks of which each waits for the next, from its lowest rank on; [] if all ranks finish.

    `inputs` holds for each action the position of the one on *another* rank whose output it takes, or −1. A rank does
    a cell when the inputs of all its actions are there, and what they send leaves when all are done: the rule of
    torch's lowering (`_add_send_recv`). Linear in the number of actions.
    """
    progress, opening, ends = _run_until_stuck(schedule, cells, inputs)
    waits: dict[int, list[Wait]] = {}
    ranks = schedule.rank
    for rank, (cell, end) in enumerate(zip(progress, ends, strict=True)):
        if cell < end:
            after = opening[cell + 1] if cell + 1 < len(opening) else len(schedule)
            waits[rank] = [
                Wait(rank, action, int(ranks[needed]), needed)
                for action in range(opening[cell], after)
                if (needed := int(inputs[action])) >= 0 and cells[needed] >= progress[ranks[needed]]
            ]
    return _shortest_circle(waits) if waits else []


def _run_until_stuck(
    schedule: Schedule, cells: np.ndarray, inputs: np.ndarray
) -> tuple[list[int], list[int], list[int]]:
    """For each rank the cell that it cannot do, or its end; for each cell its first action; for each rank its end.

    Runs each rank until it needs a cell that is not done; whoever does that wakes it.
    """
    opening = np.flatnonzero(np.diff(cells, prepend=NONE))
    wanted = np.where(inputs >= 0, cells[inputs], NONE)
    first, second = wanted[opening].tolist(), np.full(len(opening), NONE)
    overlapped = np.ones(len(cells), bool)
    overlapped[opening] = False
    second[cells[overlapped]] = wanted[overlapped]
    also = second.tolist()
    ranks = schedule.rank[opening].tolist()
    bounds = np.searchsorted(opening, schedule.offsets).tolist()
    progress, ends = bounds[:-1], bounds[1:]
    waiting: dict[int, list[int]] = {}
    runnable = list(range(len(ends)))
    while runnable:
        rank = runnable.pop()
        cell, end = progress[rank], ends[rank]
        while cell < end:
            needed = first[cell]
            if needed < 0 or needed < progress[ranks[needed]]:
                needed = also[cell]
            if needed >= 0 and needed >= progress[ranks[needed]]:
                waiting.setdefault(needed, []).append(rank)
                break
            if cell in waiting:
                runnable += waiting.pop(cell)
            cell += 1
        progress[rank] = cell
    return progress, opening.tolist(), ends


def _shortest_circle(waits: dict[int, list[Wait]]) -> list[Wait]:
    """Every rank here waits for one that waits too, so that following them ends in a circle."""
    passed = set()
    rank = min(waits)
    while rank not in passed:
        passed.add(rank)
        rank = waits[rank][0].needed_rank
    starts = [rank, *waits][: 1 + _SEARCH_STEPS // len(waits)]
    circle = min((c for c in (_circle_through(start, waits) for start in starts) if c), key=len)
    lowest = min(range(len(circle)), key=lambda i: circle[i].rank)
    return circle[lowest:] + circle[:lowest]


def _circle_through(start: int, waits: dict[int, list[Wait]]) -> list[Wait]:
    reached: dict[int, Wait] = {}
    queue = deque([start])
    while queue:
        for wait in waits[queue.popleft()]:
            if wait.needed_rank == start:
                path = [wait]
                while path[-1].rank != start:
                    path.append(reached[path[-1].rank])
                return path[::-1]
            if wait.needed_rank not in reached:
                reached[wait.needed_rank] = wait
                queue.append(wait.needed_rank)
    return []
