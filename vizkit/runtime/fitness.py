"""Whether this machine can run the lessons: facts, what each needs, and what to do where it falls short."""

from __future__ import annotations

import html
import importlib.metadata
import multiprocessing
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass

from vizkit.runtime.limits import available_cores, available_memory_bytes
from vizkit.units import bytes_text

FEWEST_MEMORY_BYTES = 1_000_000_000
"""Four ranks and the notebook take 0.5 GB; the lessons' data and figures want as much again."""
FEWEST_DISK_BYTES = 100_000_000
OLDEST_PYTHON = (3, 11)
TESTED_TORCH = "2.13.0"


@dataclass(frozen=True)
class Fact:
    """One thing about this machine; `remedy` says what to do, and is empty where it is fit."""

    name: str
    value: str
    remedy: str = ""

    @property
    def is_fit(self) -> bool:
        return not self.remedy


@dataclass(frozen=True)
class Fitness:
    """All facts; true where every one of them is fit."""

    facts: tuple[Fact, ...]

    @property
    def is_fit(self) -> bool:
        return all(fact.is_fit for fact in self.facts)

    def __bool__(self) -> bool:
        return self.is_fit

    @property
    def conclusion(self) -> str:
        unfit = [fact.name for fact in self.facts if not fact.is_fit]
        if not unfit:
            return "This machine is fit for every lesson."
        return f"This machine is not fit yet: {', '.join(unfit)}."

    def __repr__(self) -> str:
        width = max(len(fact.name) for fact in self.facts)
        rows = []
        for fact in self.facts:
            rows.append(f"{'ok ' if fact.is_fit else 'NO '} {fact.name:<{width}}  {fact.value}")
            if fact.remedy:
                rows.append(f"    {'':<{width}}  {fact.remedy}")
        return "\n".join([*rows, self.conclusion])

    def _repr_html_(self) -> str:
        cell = 'style="text-align: left"'
        rows = "".join(
            f"<tr><td {cell}>{'ok' if fact.is_fit else '<strong>NO</strong>'}</td>"
            f'<th scope="row" {cell}>{html.escape(fact.name)}</th><td {cell}>{html.escape(fact.value)}'
            f"{'<br>' + html.escape(fact.remedy) if fact.remedy else ''}</td></tr>"
            for fact in self.facts
        )
        return f"<table>{rows}</table><p>{html.escape(self.conclusion)}</p>"


def fitness() -> Fitness:
    """Looks at this machine, and launches two ranks that add up a number over the loopback interface.

    Cores and memory are the container's where there is one. Nothing is changed, and nothing is fetched.
    """
    return Fitness(
        (
            python_fact(sys.version_info[:3]),
            torch_fact(_version("torch")),
            cores_fact(available_cores()),
            memory_fact(available_memory_bytes()),
            disk_fact(shutil.disk_usage(tempfile.gettempdir()).free, tempfile.gettempdir()),
            start_fact("forkserver" in multiprocessing.get_all_start_methods(), hasattr(os, "memfd_create")),
            gpus_fact(_gpu_names()),
            ranks_fact(),
        )
    )


def python_fact(version: tuple[int, ...]) -> Fact:
    wanted = ".".join(str(part) for part in OLDEST_PYTHON)
    remedy = "" if version[:2] >= OLDEST_PYTHON else f"Install Python {wanted} or later, then run make lab again."
    return Fact("Python", f"{'.'.join(str(part) for part in version)} (needs {wanted} or later)", remedy)


def torch_fact(version: str | None) -> Fact:
    if version is None:
        return Fact("torch", "not installed", f"Install it: pip install torch=={TESTED_TORCH}, or run make lab again.")
    if version.split("+")[0] != TESTED_TORCH:
        remedy = f"The lessons were checked with {TESTED_TORCH}: pip install torch=={TESTED_TORCH}"
        return Fact("torch", version, remedy)
    return Fact("torch", version)


def cores_fact(cores: int) -> Fact:
    share = "" if cores >= 4 else "; four ranks share them, so read times off the virtual clock"
    return Fact("cores", f"{cores}{share}")


def memory_fact(memory_bytes: int | None) -> Fact:
    wanted = bytes_text(FEWEST_MEMORY_BYTES)
    if memory_bytes is None:
        return Fact("memory", f"unknown (needs {wanted})")
    remedy = (
        "" if memory_bytes >= FEWEST_MEMORY_BYTES else "Close other notebooks' kernels, or launch two ranks, not four."
    )
    return Fact("memory", f"{bytes_text(memory_bytes)} free (needs {wanted})", remedy)


def disk_fact(free_bytes: int, folder: str) -> Fact:
    wanted = bytes_text(FEWEST_DISK_BYTES)
    remedy = "" if free_bytes >= FEWEST_DISK_BYTES else f"Free some space in {folder}, or point TMPDIR elsewhere."
    return Fact("disk", f"{bytes_text(free_bytes)} free in {folder} (needs {wanted})", remedy)


def start_fact(has_forkserver: bool, has_memfd: bool) -> Fact:
    ways = ("forkserver" if has_forkserver else "spawn", "memory" if has_memfd else "temporary files")
    slower = "" if has_forkserver and has_memfd else "; works, and takes seconds longer"
    return Fact("ranks start", f"by {ways[0]}, data travel through {ways[1]}{slower}")


def gpus_fact(names: list[str]) -> Fact:
    if not names:
        return Fact("GPUs", "none; ranks run on the CPU, and every lesson works there")
    return Fact("GPUs", f"{len(names)}: {', '.join(names)}")


def ranks_fact() -> Fact:
    """Two real ranks, one real all-reduce."""
    from vizkit.runtime.launcher import launch

    try:
        run = launch(_sum_of_ranks, world_size=2, device="cpu")
    except Exception as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return Fact("two ranks", "failed", f"{first_line} (README.md, Troubleshooting)")
    is_right = run.results == [3.0, 3.0]
    remedy = "" if is_right else "The all-reduce gave a wrong sum: please report this machine and its torch."
    return Fact("two ranks", f"all-reduce over loopback: 1 + 2 = {run.results[0]:g} on both ranks", remedy)


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    return number.item()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
