"""The ways to start ranks that we measure against, and the jobs that both sides run.

Run as a script, `python peers.py WAY JOB WORLD_SIZE REPEATS` prints the seconds of each launch as JSON, then the
memory of the whole family of processes at its greatest if WAY ends in "+memory".
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HOLD_ENV = "VIZKIT_BENCHMARK_HOLD"


def all_reduce_job() -> float:
    x = torch.ones(1000)
    dist.all_reduce(x)
    hold()
    return x.sum().item()


def ddp_job() -> float:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    hold()
    return loss.item()


JOBS: dict[str, Callable[[], float]] = {"all_reduce": all_reduce_job, "ddp": ddp_job}


def hold() -> None:
    """Where memory is measured: wait for all ranks, report this one's, and let the first report the parent's."""
    folder = os.environ.get(HOLD_ENV)
    if folder:
        dist.barrier()
        (Path(folder) / str(dist.get_rank())).write_text(str(os.getpid()))
        while not (Path(folder) / "measured").exists():
            time.sleep(0.02)


def family_pss_bytes(process: psutil.Process) -> int:
    """Proportional set size of a process and all below it: shared pages count once in all."""
    return sum(member.memory_full_info().pss for member in (process, *process.children(recursive=True)))


def _spawned(rank: int, world_size: int, folder: str, job: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.save(JOBS[job](), f"{folder}/result-{rank}")
    dist.destroy_process_group()


def by_spawn(job: str, world_size: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_spawned, (world_size, folder, job), nprocs=world_size)
        return [torch.load(f"{folder}/result-{rank}") for rank in range(world_size)]


def by_launch(job: str, world_size: int) -> list[float]:
    import vizkit as vk

    return vk.launch(JOBS[job], world_size=world_size).results


WAYS = {"spawn": by_spawn, "launch": by_launch}


def main(way: str, job: str, world_size: str, repeats: str) -> None:
    seconds = []
    for _ in range(int(repeats)):
        started = time.perf_counter()
        results = WAYS[way](job, int(world_size))
        seconds.append(time.perf_counter() - started)
        assert len(set(results)) == 1
        assert len(results) == int(world_size)
    print(json.dumps(seconds))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(*sys.argv[1:])
