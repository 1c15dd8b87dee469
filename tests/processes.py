"""Finds processes that a test left behind, also those that outlived their parent."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping

import psutil

MARK = "VIZKIT_TEST_MARK"
SERVANTS = ("forkserver", "resource_tracker", "semaphore_tracker")
"""Parts of the command lines of multiprocessing's helpers, which live as long as the process that they serve."""


def marked_environment(mark: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment whose processes, and all that they start, `processes_with` finds."""
    return {**(os.environ if base is None else base), MARK: mark}


def new_mark() -> str:
    return uuid.uuid4().hex


def processes_with(mark: str) -> list[psutil.Process]:
    """Every living process that was started with this mark in its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def leftover_descendants() -> list[psutil.Process]:
    """Children of this process that are no helpers of multiprocessing, and everything below any child."""
    left = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            is_servant = any(word in " ".join(child.cmdline()) for word in SERVANTS)
            left += [*([] if is_servant else [child]), *child.children(recursive=True)]
    return [process for process in left if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_until_gone(find: Callable[[], list[psutil.Process]], *, within_s: float = 5.0) -> list[str]:
    """Descriptions of the processes that `find()` still returns after `within_s` seconds; empty where all went."""
    deadline = time.monotonic() + within_s
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [describe(process) for process in left]


def describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} ({process.status()}): {' '.join(process.cmdline())[:160]}"
    return f"{process.pid}: gone while being described"


def stop(processes: Iterable[psutil.Process]) -> None:
    """Ends processes that a failed test left, so that the next test starts clean."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
