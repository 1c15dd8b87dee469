"""Faults planted in small real runs, and a table of what a diagnosis finds in each.

`python -m tests.distributed.faults` prints the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import sleep, thread_time
from typing import Any

import torch
import torch.distributed as dist

import vizkit as vk
from vizkit.findings import Diagnosis, FindingKind, diagnose
from vizkit.runtime.fingerprints import fingerprint
from vizkit.runtime.run import Run

MS = 1e-3
DURATIONS = {"data": 0.1 * MS, "F": 1 * MS, "B": 2 * MS, "optimizer": 0.2 * MS, "compute": 1 * MS}
QUICK = vk.Link(latency_s=1e-6, bandwidth_bytes_per_s=100e9)


@dataclass(frozen=True)
class Plant:
    """A run: what the ranks do, how it is judged, and what is wrong with it (nothing for a clean one)."""

    name: str
    program: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 4
    judged: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[FindingKind, ...] = ()
    cores: int | None = None

    @property
    def key(self) -> str:
        """Plants with the same key are the same run, judged in another way."""
        return f"{self.program.__name__}{dict(self.arguments)}{self.world_size}"

    def diagnose(self, run: Run) -> Diagnosis:
        run = run if self.cores is None else replace(run, cores=self.cores)
        return diagnose(run, **({"link": QUICK, "durations": DURATIONS} | dict(self.judged)))


def data_parallel(
    steps: int = 6,
    extra_spans: tuple[int, ...] = (0, 0, 0, 0),
    num_buckets: int = 1,
    elements: int = 1000,
    drifts: bool = False,
    reads_the_same: bool = False,
) -> None:
    """Replicas that average gradients; `extra_spans[rank]` spans of 1 ms more in each step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    weights, samples = torch.zeros(elements), torch.arange(64.0)
    with vk.track_memory([weights]):
        for step in range(steps):
            with vk.span("load", kind="data"):
                batch = samples[step * 8 : step * 8 + 8] if reads_the_same else samples[rank::world_size] + step
            fingerprint(batch, "data", step=step, same=False)
            with vk.span("forward", kind="F"):
                loss = (weights[0] - batch.mean()) ** 2
            for _ in range(extra_spans[rank]):
                with vk.span("more work"):
                    pass
            gradient = torch.full_like(weights, float(loss))
            with vk.span("backward", kind="B"):
                works = [dist.all_reduce(bucket, async_op=True) for bucket in gradient.chunk(num_buckets)]
            for work in works:
                work.wait()
            with vk.span("optimizer", kind="optimizer"):
                weights -= 0.01 * gradient / world_size
            if drifts and rank == 1 and step == 3:
                weights[5] += 0.5
            fingerprint(weights, step=step)


def rotating(steps: int = 8) -> None:
    """Another rank has more work in each step."""
    for step in range(steps):
        with vk.span("forward", kind="F"):
            pass
        for _ in range(2 * (step % dist.get_world_size() == dist.get_rank())):
            with vk.span("long sequence"):
                pass
        dist.all_reduce(torch.ones(1))


def pipeline(microbatches: int, steps: int = 1, elements: int = 4) -> None:
    """GPipe by hand, one stage a rank; one microbatch is layer-wise model parallelism."""
    stage, last = dist.get_rank(), dist.get_world_size() - 1
    for _ in range(steps):
        for kind, source, target in (("F", stage - 1, stage + 1), ("B", stage + 1, stage - 1)):
            for microbatch in range(microbatches):
                x = torch.ones(elements)
                with vk.span(kind, kind=kind, stage=stage, microbatch=microbatch):
                    if 0 <= source <= last:
                        dist.recv(x, source)
                    if 0 <= target <= last:
                        dist.send(x, target)


def parameter_server(steps: int = 4, elements: int = 100_000, asks_all_at_once: bool = False) -> None:
    """Rank 0 sends its weights to each worker: one after the other, or as a broadcast."""
    rank, weights = dist.get_rank(), torch.ones(elements)
    for _ in range(steps):
        if asks_all_at_once:
            dist.broadcast(weights, 0)
        elif rank == 0:
            for worker in range(1, dist.get_world_size()):
                dist.send(weights, worker)
        else:
            dist.recv(weights, 0)
        with vk.span("forward", kind="F"):
            pass
        dist.all_reduce(torch.ones(1))


def busy(seconds: float) -> None:
    """Uses this much CPU time, whatever else the machine does."""
    until = thread_time() + seconds
    while thread_time() < until:
        pass


def measured(steps: int = 5, load_s: float = 0.0, one_core: bool = False) -> None:
    """Real work of 20 ms a step; a loader that sleeps `load_s` on rank 1; all on one core if asked."""
    if one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for _ in range(steps):
        with vk.span("load", kind="data"):
            busy(0.001)
            sleep(load_s if dist.get_rank() == 1 else 0)
        with vk.span("forward", kind="F"):
            busy(0.02)
        dist.all_reduce(torch.ones(1))


SLOW = vk.Link(latency_s=1e-6, bandwidth_bytes_per_s=100e6)
LATE = vk.Link(latency_s=100e-6, bandwidth_bytes_per_s=10e9)
REAL = {"durations": None}
PIPELINE = {"durations": {"F": 1 * MS, "B": 2 * MS}}
UNEQUAL = {"durations": {"F": [1 * MS, 1 * MS, 1.5 * MS], "B": [2 * MS, 2 * MS, 3 * MS]}}
K = FindingKind
PLANTS = (
    Plant("data parallel, clean", data_parallel),
    Plant("a slow rank", data_parallel, {"extra_spans": (0, 0, 2, 0)}, faults=(K.STRAGGLER,)),
    Plant("uneven shares", data_parallel, {"extra_spans": (0, 1, 2, 3)}, faults=(K.IMBALANCE,)),
    Plant("uneven sequences", rotating, faults=(K.IMBALANCE,)),
    Plant("a slow link", data_parallel, {"elements": 50_000}, judged={"link": SLOW}, faults=(K.EXPOSED_COMMUNICATION,)),
    Plant("32 buckets", data_parallel, {"num_buckets": 32}, judged={"link": LATE}, faults=(K.SMALL_BUCKETS,)),
    Plant(
        "the same, 2 buckets",
        data_parallel,
        {"num_buckets": 2},
        judged={"link": LATE, "durations": DURATIONS | {"F": 10 * MS}},
    ),
    Plant("a replica drifts", data_parallel, {"drifts": True}, faults=(K.DRIFTED_REPLICA,)),
    Plant("all read the same", data_parallel, {"reads_the_same": True}, faults=(K.REPEATED_DATA,)),
    Plant("memory 95 % full", data_parallel, judged={"memory_limit_bytes": 4200}, faults=(K.MEMORY_NEAR_LIMIT,)),
    Plant("memory 50 % full", data_parallel, judged={"memory_limit_bytes": 8000}),
    Plant(
        "a slow loader", data_parallel, judged={"durations": DURATIONS | {"data": 2 * MS}}, faults=(K.STARVED_LOADER,)
    ),
    Plant("pipeline, clean", pipeline, {"microbatches": 48}, 3, PIPELINE),
    Plant("pipeline, 4 microbatches", pipeline, {"microbatches": 4}, 3, PIPELINE, (K.BUBBLE,)),
    Plant("pipeline, unequal stages", pipeline, {"microbatches": 64}, 3, UNEQUAL, (K.IMBALANCE,)),
    Plant("pipeline, both", pipeline, {"microbatches": 4}, 3, UNEQUAL, (K.BUBBLE, K.IMBALANCE)),
    Plant("layer-wise", pipeline, {"microbatches": 1, "steps": 3}, 3, PIPELINE, (K.SERIAL_TRANSFER,)),
    Plant("server, one by one", parameter_server, {}, 4, {"link": SLOW}, (K.SERIAL_TRANSFER, K.EXPOSED_COMMUNICATION)),
    Plant("server, broadcast", parameter_server, {"asks_all_at_once": True}),
    Plant("a loader sleeps", measured, {"load_s": 0.2}, 2, REAL, (K.STARVED_LOADER,)),
    Plant("2 ranks on 1 core", measured, {"one_core": True}, 2, REAL, (K.OVERSUBSCRIBED_CORES,), cores=1),
    Plant("real work, clean", measured, {}, 2, REAL, cores=2),
)


def fault_matrix(found: Mapping[str, Diagnosis], planted: Mapping[str, tuple[FindingKind, ...]]) -> str:
    """One row a run, one column a rule: `●` planted and found, `·` neither, `MISSED`, `FALSE`."""
    kinds = list(FindingKind)
    cells = {(True, True): "●", (False, False): "·", (True, False): "MISSED", (False, True): "FALSE"}
    width = max(map(len, found))
    head = [kind.value.split()[0] + (" " + kind.value.split()[1][:6] if " " in kind.value else "") for kind in kinds]
    lines = ["  ".join([" " * width, *head])]
    for name, diagnosis in found.items():
        row = [cells[kind in planted[name], kind in diagnosis.kinds] for kind in kinds]
        lines.append(
            "  ".join([name.ljust(width), *(cell.center(len(title)) for cell, title in zip(row, head, strict=True))])
        )
    hits = sum(kind in diagnosis.kinds for name, diagnosis in found.items() for kind in planted[name])
    false = sum(kind not in planted[name] for name, diagnosis in found.items() for kind in diagnosis.kinds)
    return "\n".join(
        [*lines, f"{hits} of {sum(map(len, planted.values()))} planted faults found; {false} falsely found"]
    )


def diagnose_all(runs: dict[str, Run]) -> dict[str, Diagnosis]:
    """Launches each run once, into `runs` by key."""
    for plant in PLANTS:
        if plant.key not in runs:
            runs[plant.key] = vk.launch(plant.program, world_size=plant.world_size, **plant.arguments)
    return {plant.name: plant.diagnose(runs[plant.key]) for plant in PLANTS}


PLANTED = {plant.name: plant.faults for plant in PLANTS}


def main() -> None:
    found = diagnose_all({})
    print(fault_matrix(found, PLANTED))
    for name, diagnosis in found.items():
        print(f"\n== {name}\n{diagnosis}")


if __name__ == "__main__":
    main()
