"""What recording costs a rank, against the same program unrecorded and under `torch.profiler`."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import vizkit as vk
from tests.benchmarks.conftest import Compare, Row

CALLS = 40
STEPS = 20
ALLOWED_S = 15e-6


class InstantGroup:
    """In the place of the real group: what is left is the recorder's own time."""

    def __init__(self) -> None:
        self._work = dist.all_reduce(torch.ones(1), async_op=True)._work
        self._work.wait()

    def allreduce(self, *arguments: object) -> dist.Work:
        return self._work


def own_cpu_s_a_collective() -> float:
    """Main-thread CPU seconds that recording one synchronous all-reduce and its wait costs, the backend left out."""
    group = dist.group.WORLD
    instant = InstantGroup()
    tensors, options = [torch.ones(4)], dist.AllreduceOptions()
    options.asyncOp = False

    def cost_s(function: Callable[[], object]) -> float:
        started = time.thread_time()
        for _ in range(CALLS):
            function()
        return (time.thread_time() - started) / CALLS

    real, group._inner = group._inner, instant
    try:
        costs = [
            cost_s(lambda: group.allreduce(tensors, options)) - cost_s(lambda: instant.allreduce().wait())
            for _ in range(100)
        ]
    finally:
        group._inner = real
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
    """Recording takes at most 15 µs of a rank's main thread for a collective and its wait; a core for each rank."""
    own_s = min(min(vk.launch(own_cpu_s_a_collective, world_size=2).results) for _ in range(4))
    what = "recorder's own main-thread CPU, all-reduce and wait"
    compare(Row(what, own_s * 1e6, ALLOWED_S * 1e6, "what is allowed", "µs", 1.0))


def ddp_steps_s() -> dict[str, float]:
    """Median main-thread seconds of a DDP step of about 32 ms, taken in turns in one process."""
    recorder = dist.group.WORLD.recorder
    groups = {"plain": unrecorded_group(), "recorded": None}
    steps = {way: ddp_step(group) for way, group in groups.items()}
    times: dict[str, list[float]] = {"plain": [], "recorded": [], "profiled": []}

    def timed_s(step: Callable[[], None]) -> float:
        started = time.thread_time()
        step()
        return time.thread_time() - started

    for _ in range(STEPS):
        times["recorded"].append(timed_s(steps["recorded"]))
        recorder.uninstall()
        times["plain"].append(timed_s(steps["plain"]))
        recorder.install()
    recorder.uninstall()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        times["profiled"] = [timed_s(steps["plain"]) for _ in range(STEPS // 2)]
    recorder.install()
    return {way: median(seconds[3:]) for way, seconds in times.items()}


def ddp_step(group: dist.ProcessGroup | None) -> Callable[[], None]:
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
    model = torch.nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.randn(320, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    return step


def test_a_ddp_step_is_hardly_slower(compare: Compare) -> None:
    """Recording adds at most 5 % to the main thread's time of a DDP step; `torch.profiler` stands in the same table."""
    seconds = min((vk.launch(ddp_steps_s, world_size=2).results[0] for _ in range(3)), key=added)
    ours, plain, profiled = (seconds[way] * 1e3 for way in ("recorded", "plain", "profiled"))
    compare(Row("DDP step under torch.profiler (main thread)", profiled, plain, "unrecorded step", "ms", float("inf")))
    compare(Row("DDP step, recorded (main thread)", ours, plain, "unrecorded step", "ms", 1.05))


def added(seconds: dict[str, float]) -> float:
    """What recording added to a step, as a share; the least of several runs is the one least disturbed."""
    return seconds["recorded"] / seconds["plain"]
