"""What recording costs a rank, against the same program unrecorded and under `torch.profiler`."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import vizkit as vk
from tests.benchmarks.conftest import Compare, Row

CALLS = 2000
ALLOWED_S = 15e-6


def cpu_s_a_collective(recorded: bool) -> float:
    """Main-thread CPU seconds of one small all-reduce, in the recorded group or in torch's own."""
    group = None if recorded else unrecorded_group()
    x = torch.ones(4)
    costs = []
    for _ in range(5):
        started = time.thread_time()
        for _ in range(CALLS // 5):
            dist.all_reduce(x, group=group)
        costs.append((time.thread_time() - started) / (CALLS // 5))
    return min(costs)


def unrecorded_group() -> dist.ProcessGroup:
    """A group of all ranks with torch's own backend, as it would be without the kit."""
    recording = c10d.ProcessGroupGloo
    c10d.ProcessGroupGloo = torch._C._distributed_c10d.ProcessGroupGloo
    try:
        return dist.new_group(list(range(dist.get_world_size())))
    finally:
        c10d.ProcessGroupGloo = recording


def test_a_collective_costs_little(compare: Compare) -> None:
    """The recorder adds at most 15 µs of the rank's main thread to a collective."""
    plain, recorded = (
        min(vk.launch(cpu_s_a_collective, way, world_size=2).results[0] for _ in range(3)) for way in (False, True)
    )
    added = max(recorded - plain, 0.0)
    compare(Row("recorder, main-thread CPU a collective", added * 1e6, ALLOWED_S * 1e6, "15 µs allowed", "µs", 1.0))


def ddp_step_s(way: str) -> float:
    """Median wall seconds of a DDP step that computes for about 32 ms."""
    group = unrecorded_group() if way in ("plain", "profiler") else None
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
    model = torch.nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.randn(192, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    def measure() -> float:
        times = []
        for _ in range(40):
            started = time.thread_time()
            step()
            times.append(time.thread_time() - started)
        return median(times)

    for _ in range(3):
        step()
    if way != "profiler":
        return measure()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return measure()


def test_a_ddp_step_is_hardly_slower(compare: Compare) -> None:
    """Recording adds at most 5 % to the main thread's time of a DDP step; `torch.profiler` stands in the same table."""
    best = {
        way: min(vk.launch(ddp_step_s, way, world_size=2).results[0] for _ in range(3))
        for way in ("plain", "recorder", "profiler")
    }
    milliseconds = {way: seconds * 1e3 for way, seconds in best.items()}
    compare(Row("DDP step, recorded", milliseconds["recorder"], milliseconds["plain"], "unrecorded step", "ms", 1.05))
    compare(
        Row("DDP step, torch.profiler", milliseconds["profiler"], milliseconds["plain"], "unrecorded step", "ms", 100.0)
    )
