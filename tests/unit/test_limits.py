"""A launch counts the container's cores and memory, not the host's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vizkit.runtime.limits import available_cores, available_memory_bytes

HOST = len(os.sched_getaffinity(0))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, HOST),
        ({"cpu.max": "max 100000"}, HOST),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "garbage"}, HOST),
        ({"cpu.max": "50000 0"}, HOST),
        ({"cpu/cpu.cfs_quota_us": "100", "cpu/cpu.cfs_period_us": "0"}, HOST),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, HOST),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_cores(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    """The smaller of affinity and quota, in both versions of cgroups, at least one."""
    assert available_cores(write(tmp_path, files)) == cores


MEMINFO = "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, 8_192_000),
        ({"memory.max": "max", "memory.current": "5", "memory.stat": ""}, 8_192_000),
        (
            {"memory.max": "2000000", "memory.current": "1500000", "memory.stat": "anon 1\ninactive_file 300000"},
            800_000,
        ),
        ({"memory.max": "1000", "memory.current": "5000", "memory.stat": ""}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "2000000",
                "memory/memory.usage_in_bytes": "500000",
                "memory/memory.stat": "total_inactive_file 1",
            },
            1_500_001,
        ),
    ],
)
def test_memory(tmp_path: Path, files: dict[str, str], left: int) -> None:
    """The smaller of what the machine and the cgroup have left; file cache counts as free."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    assert available_memory_bytes(write(tmp_path / "cgroup", files), meminfo) == left


def test_unknown_memory(tmp_path: Path) -> None:
    """Where nothing tells, nothing is claimed: no file, or one of a kernel that does not count what is available."""
    assert available_memory_bytes(tmp_path, tmp_path / "none") is None
    write(tmp_path, {"meminfo": "MemTotal: 9000 kB\nMemFree: 8000 kB\n"})
    assert available_memory_bytes(tmp_path, tmp_path / "meminfo") is None
