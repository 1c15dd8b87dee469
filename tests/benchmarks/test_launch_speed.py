"""Starting ranks, against `torch.multiprocessing.spawn`: seconds from the call to all results back, and memory."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
import pytest

from tests.benchmarks.conftest import Compare, Row
from tests.benchmarks.peers import HOLD_ENV, family_pss_bytes

PEERS = str(Path(__file__).with_name("peers.py"))


@functools.cache
def seconds(way: str, job: str, repeats: int) -> list[float]:
    done = subprocess.run(
        [sys.executable, PEERS, way, job, "4", str(repeats)], capture_output=True, text=True, check=True, timeout=170
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(("job", "limit"), [("all_reduce", 1 / 15), ("ddp", 1 / 25)])
def test_later_launches(job: str, limit: float, compare: Compare) -> None:
    """From the second launch on, ranks are there at once."""
    ours, peer = median(seconds("launch", job, 8)[1:]), median(seconds("spawn", job, 3))
    compare(Row(f"4 ranks, {job}, second and later launches", ours, peer, "torch.multiprocessing.spawn", "s", limit))


def test_first_launch(compare: Compare) -> None:
    """The first launch in a kernel starts the forkserver too, and costs little more than one spawn."""
    ours, peer = seconds("launch", "all_reduce", 8)[0], median(seconds("spawn", "all_reduce", 3))
    compare(Row("4 ranks, all_reduce, first launch", ours, peer, "torch.multiprocessing.spawn", "s", 1.5))


def pss_bytes(way: str, world_size: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, PEERS, way, "all_reduce", str(world_size), "1"]
        process = subprocess.Popen(command, env=os.environ | {HOLD_ENV: folder}, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 120
            while len(list(Path(folder).glob("[0-9]*"))) < world_size:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            return family_pss_bytes(psutil.Process(process.pid))
        finally:
            (Path(folder) / "measured").touch()
            process.wait(60)


@pytest.mark.parametrize(("world_size", "limit"), [(4, 0.65), (8, 0.55)])
def test_memory(world_size: int, limit: float, compare: Compare) -> None:
    """Ranks share the pages of what they have imported, with each other and with the process they were born from."""
    ours, peer = pss_bytes("launch", world_size), pss_bytes("spawn", world_size)
    what = f"{world_size} ranks and parent, memory (PSS)"
    compare(Row(what, ours / 1e6, peer / 1e6, "torch.multiprocessing.spawn", "MB", limit))
