"""When each action of a schedule starts and ends: two engines, one for few ranks, one for many, with the same answers.

Plain lists take about a microsecond an action. Arrays take some ten times that for a front, the next action of every
rank that can go on, so they win where fronts are wide: from about sixteen ranks on, if these work at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vizkit.schedules.schedule import Schedule

MANY_RANKS = 16
_NARROW = 8
"""Actions of a front below which lists are quicker."""
_LOOK_EVERY = 256
"""Fronts between two looks at how wide they have been."""
_NOT_YET = np.iinfo(np.int64).max
_ALONE = -1


@dataclass(frozen=True, eq=False)
class Costs:
    """What a schedule's actions take, in nanoseconds: arrays with one entry an action.

    `input` is the action whose output each needs, `edge` the directed edge that its own output takes to another rank
    (source × ranks + target), −1 where there is none; `wire_ns` is how long it occupies the edge. `overlap_ns` is what
    an overlapped cell takes, −1 where its two actions take turns.
    """

    input: np.ndarray
    edge: np.ndarray
    duration_ns: np.ndarray
    wire_ns: np.ndarray
    latency_ns: int
    blocking_sends: bool
    overlap_ns: int


@dataclass(frozen=True, eq=False)
class Times:
    """Nanoseconds from the beginning: when each action starts and ends, and when its output is where it is needed.

    `finished` is false where some rank waits for ever; what it would have done has no times.
    """

    start: np.ndarray
    end: np.ndarray
    ready: np.ndarray
    finished: bool


def run(schedule: Schedule, costs: Costs) -> Times:
    """Every rank does its actions in order, each as soon as the one before is done and its input is there."""
    times = None
    if schedule.num_ranks >= MANY_RANKS and not schedule.joined.any():
        times = run_fronts(schedule, costs, narrow=_NARROW)
    return times or run_ranks(schedule, costs)


def run_ranks(schedule: Schedule, costs: Costs) -> Times:
    """Runs each rank until it needs an output that is not there yet; whoever makes that wakes it."""
    needs, duration, edges = costs.input.tolist(), costs.duration_ns.tolist(), costs.edge.tolist()
    wire, latency, blocking = costs.wire_ns.tolist(), costs.latency_ns, costs.blocking_sends
    size = len(needs)
    start, end, ready = [0] * size, [0] * size, [_NOT_YET] * size
    ready.append(0)  # found at −1: what needs no input has it from the beginning
    pairs = set((np.flatnonzero(schedule.joined) - 1).tolist())
    bounds = list(pairwise(schedule.offsets.tolist()))
    positions, clocks = [first for first, _ in bounds], [0] * len(bounds)
    edge_free: defaultdict[int, int] = defaultdict(int)
    waiting: dict[int, int] = {}
    runnable = list(range(len(bounds) - 1, -1, -1))

    def run_pair(i: int, now: int) -> int:
        """Both actions of an overlapped cell, whose outputs leave together; returns when the rank may go on."""
        if costs.overlap_ns >= 0:
            start[i] = start[i + 1] = max(now, ready[needs[i]], ready[needs[i + 1]])
            end[i] = end[i + 1] = start[i] + costs.overlap_ns
        else:
            for k in (i, i + 1):
                start[k] = max(now, ready[needs[k]])
                now = end[k] = start[k] + duration[k]
        done = now = end[i + 1]
        for k in (i, i + 1):
            ready[k] = done
            if edges[k] >= 0:
                edge_free[edges[k]] = max(done, edge_free[edges[k]]) + wire[k]
                ready[k] = edge_free[edges[k]] + latency
                now = max(now, ready[k]) if blocking else now
            if k in waiting:
                runnable.append(waiting.pop(k))
        return now

    not_yet, wake = _NOT_YET, runnable.append
    while runnable:
        rank = runnable.pop()
        i, stop, now = positions[rank], bounds[rank][1], clocks[rank]
        while i < stop:
            there = ready[needs[i]]
            if there == not_yet:
                waiting[needs[i]] = rank
                break
            if i in pairs:
                if ready[needs[i + 1]] == not_yet:
                    waiting[needs[i + 1]] = rank
                    break
                now = run_pair(i, now)
                i += 2
                continue
            if there > now:
                now = there
            start[i] = now
            now += duration[i]
            end[i] = now
            edge = edges[i]
            if edge < 0:
                ready[i] = now
            else:
                free = edge_free[edge]
                edge_free[edge] = gone = (now if now > free else free) + wire[i]
                ready[i] = arrived = gone + latency
                if blocking:
                    now = arrived
            if i in waiting:
                wake(waiting.pop(i))
            i += 1
        positions[rank], clocks[rank] = i, now
    finished = all(position == stop for position, (_, stop) in zip(positions, bounds, strict=True))
    return Times(np.array(start), np.array(end), np.array(ready[:-1]), finished)


def run_fronts(schedule: Schedule, costs: Costs, narrow: int = 0) -> Times | None:
    """Runs one action of every rank that can go on, all at once, until none can; without overlapped cells.

    Gives up, with None, where fronts turn out to have fewer than `narrow` actions on average.
    """
    size = len(schedule)
    needs, edges, duration, wire = costs.input, costs.edge, costs.duration_ns, costs.wire_ns
    start, end = np.zeros(size, np.int64), np.zeros(size, np.int64)
    ready = np.full(size + 1, _NOT_YET)
    ready[_ALONE] = 0  # what needs no input has it from the beginning
    position, stop = schedule.offsets[:-1].copy(), schedule.offsets[1:]
    clock = np.zeros(schedule.num_ranks, np.int64)
    sent_after = np.where(edges >= 0, costs.latency_ns, 0)
    crowded = bool(wire.any())
    edge_free = np.zeros(schedule.num_ranks**2 + 1 if crowded else 0, np.int64)
    done = fronts = 0
    ranks = np.flatnonzero(position < stop)
    while len(ranks):
        here = position[ranks]
        there = ready[needs[here]]
        can = there < _NOT_YET
        going = ranks
        if not can.all():
            going, here, there = ranks[can], here[can], there[can]
            if not len(going):
                break
        now = np.maximum(clock[going], there)
        start[here] = now
        now += duration[here]
        end[here] = now
        left = now
        if crowded:
            edge = edges[here]
            left = np.where(edge >= 0, np.maximum(now, edge_free[edge]) + wire[here], now)
            edge_free[edge] = left
        arrived = left + sent_after[here]
        ready[here] = arrived
        clock[going] = arrived if costs.blocking_sends else now
        here += 1
        position[going] = here
        if (here == stop[going]).any():
            ranks = np.flatnonzero(position < stop)
        done += len(going)
        fronts += 1
        if fronts % _LOOK_EVERY == 0 and done < narrow * fronts:
            return None
    return Times(start, end, ready[:-1], not len(ranks))
