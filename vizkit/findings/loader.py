"""Ranks that wait for their next batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vizkit.findings.evidence import Evidence, Machine
from vizkit.findings.finding import Finding, FindingKind, ranks_text
from vizkit.metrics.intervals import Intervals
from vizkit.trace import NS_PER_S, Clock, Role, SpanKind, Trace
from vizkit.units import seconds_text
from vizkit.workload import work_before_events

NOTICEABLE_LOADING = 0.2
"""Of the makespan: reading a batch takes some time in every run."""


def starved_loader(evidence: Evidence) -> Iterator[Finding]:
    """Spans of kind "data" during which their rank does nothing else, from 20 % of the makespan on.

    Cost: their time on the rank that has most, since the others wait for it at the next collective. Where ranks really
    ran, a loader that waits for storage uses no CPU, so the virtual clock does not see it: then wall time counts, less
    what the machine's load explains (the ratio of wall to CPU time in the rank's other work).
    """
    trace, loading_ns = evidence.trace, _loading_ns(evidence.trace)
    waiting = ""
    if evidence.machine is not None and trace.clock is Clock.VIRTUAL:
        asleep_ns = _asleep_ns(evidence.machine, loading_ns)
        if (loading_ns + asleep_ns).max(initial=0) / NS_PER_S >= NOTICEABLE_LOADING * _wall_s(evidence.machine):
            trace, loading_ns = evidence.machine.wall, loading_ns + asleep_ns
            waiting = f", {seconds_text(asleep_ns.max() / NS_PER_S)} of them waiting without CPU"
    cost_s = float(loading_ns.max(initial=0) / NS_PER_S)
    if cost_s <= 0 or cost_s < NOTICEABLE_LOADING * trace.duration_ns / NS_PER_S:
        return
    ranks = tuple(np.flatnonzero(loading_ns >= loading_ns.max() / 2).tolist())
    yield Finding(
        FindingKind.STARVED_LOADER,
        ranks,
        cost_s,
        trace.clock,
        f"{ranks_text(ranks)} wait{'s' * (len(ranks) == 1)} for data",
        f'spans of kind "data" take {seconds_text(cost_s)} of {seconds_text(trace.duration_ns / NS_PER_S)}{waiting}',
        "load the next batch while this one computes (num_workers, prefetch_factor, pin_memory), keep decoded data, or "
        "read larger pieces from nearer storage",
    )


def _loading_ns(trace: Trace) -> np.ndarray:
    """Nanoseconds on each rank in which only a data span is open."""
    computes, loads = trace.is_role(Role.COMPUTE), trace.is_kind(SpanKind.DATA)
    other = Intervals.of(trace, computes & ~loads)
    return Intervals.of(trace, computes).lengths_ns() - other.lengths_ns()


def _wall_s(machine: Machine) -> float:
    return machine.wall.duration_ns / NS_PER_S


def _asleep_ns(machine: Machine, cpu_data: np.ndarray) -> np.ndarray:
    """Wall time in data spans on each rank, beyond their CPU time stretched as the rank's other work was."""
    wall = machine.wall
    wall_data = _loading_ns(wall).astype(float)
    wall_all = Intervals.of(wall, wall.is_role(Role.COMPUTE)).lengths_ns()
    cpu_all = np.zeros(wall.world_size)
    for rank in machine.record.ranks:
        cpu_all[rank.rank] = sum(work_before_events(rank))
    stretch = np.maximum((wall_all - wall_data) / np.maximum(cpu_all - cpu_data, 1), 1)
    return np.maximum(wall_data - cpu_data * stretch, 0)
