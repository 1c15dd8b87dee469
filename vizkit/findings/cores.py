"""More ranks at work than cores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vizkit.findings.evidence import NOTICEABLE_SHARE, Evidence
from vizkit.findings.finding import Finding, FindingKind
from vizkit.metrics.intervals import Intervals
from vizkit.trace import NS_PER_S, Clock, Role
from vizkit.units import seconds_text
from vizkit.workload import work_before_events


def oversubscribed_cores(evidence: Evidence) -> Iterator[Finding]:
    """Ranks that had work and no core: needs a run, with its wall and CPU times, whose threads outnumber the cores.

    Cost on the wall clock: wall time in compute less the thread's CPU time there, mean over the ranks, and at most what
    crowding explains: where k ranks of t threads compute at once on c cores, k − c/t of them stand still.
    """
    machine = evidence.machine
    if machine is None or len(machine.record.ranks) * machine.num_threads <= machine.cores:
        return
    wall, size = machine.wall, len(machine.record.ranks)
    compute = Intervals.of(wall, wall.is_role(Role.COMPUTE))
    cpu_ns = sum(sum(work_before_events(rank)) for rank in machine.record.ranks)
    wall_ns = int(compute.lengths_ns().sum())
    times = np.concatenate([compute.starts, compute.ends]) % compute.stride
    order = np.argsort(times, kind="stable")
    one = np.ones(len(compute.starts), np.int64)
    at_work = np.concatenate([one, -one])[order].cumsum()
    length = np.diff(times[order], append=times.max(initial=0))
    crowded_ns = (np.maximum(at_work - machine.cores / machine.num_threads, 0) * length).sum()
    cost_s = float(min(wall_ns - cpu_ns, crowded_ns) / size / NS_PER_S)
    if cost_s <= 0 or cost_s < NOTICEABLE_SHARE * wall.duration_ns / NS_PER_S:
        return
    yield Finding(
        FindingKind.OVERSUBSCRIBED_CORES,
        tuple(sorted(rank.rank for rank in machine.record.ranks)),
        cost_s,
        Clock.WALL,
        f"{size} ranks share {machine.cores} core{'s' * (machine.cores != 1)}, so the wall clock shows the operating "
        "system's scheduler too",
        f"compute took {seconds_text(wall_ns / size / NS_PER_S)} of wall time a rank for "
        f"{seconds_text(cpu_ns / size / NS_PER_S)} of CPU time; {machine.num_threads} "
        f"thread{'s' * (machine.num_threads != 1)} a rank",
        "read times off the virtual clock (run.replay()), start fewer ranks or threads a rank, or take more cores",
    )
