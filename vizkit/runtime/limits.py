"""How much of this machine a launch may use: the container's share, not the host's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def available_cores(root: Path = CGROUP) -> int:
    """Cores that this process may use: the smaller of its affinity and the cgroup's quota, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for read in (_quota_v2, _quota_v1) if (quota := _attempt(read, root)) is not None]
    return max(1, min([affinity, *(max(1, int(quota)) for quota in quotas)]))


def available_memory_bytes(root: Path = CGROUP, meminfo: Path = MEMINFO) -> int | None:
    """Bytes that may still be allocated: the smaller of what the machine and the cgroup have left; None if unknown."""
    known = [
        left
        for read, source in ((_memory_v2, root), (_memory_v1, root), (_memory_free, meminfo))
        if (left := _attempt(read, source)) is not None
    ]
    return max(0, int(min(known))) if known else None


def _attempt(read: Callable[[Path], float | None], source: Path) -> float | None:
    try:
        return read(source)
    except (OSError, ValueError, LookupError, ZeroDivisionError):
        return None


def _quota_v2(root: Path) -> float | None:
    quota, period = (root / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(root: Path) -> float | None:
    quota = int((root / "cpu/cpu.cfs_quota_us").read_text())
    return None if quota <= 0 else quota / int((root / "cpu/cpu.cfs_period_us").read_text())


def _memory_v2(root: Path) -> float | None:
    limit = (root / "memory.max").read_text().strip()
    if limit == "max":
        return None
    used = int((root / "memory.current").read_text())
    return int(limit) - used + _reclaimable(root / "memory.stat", "inactive_file")


def _memory_v1(root: Path) -> float | None:
    folder = root / "memory"
    limit = int((folder / "memory.limit_in_bytes").read_text())
    used = int((folder / "memory.usage_in_bytes").read_text())
    return limit - used + _reclaimable(folder / "memory.stat", "total_inactive_file")


def _reclaimable(stat: Path, key: str) -> int:
    """File cache counts as used in a cgroup, but the kernel gives it back on demand."""
    rows = dict(line.split() for line in stat.read_text().splitlines())
    return int(rows.get(key, 0))


def _memory_free(meminfo: Path) -> float | None:
    rows = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024
