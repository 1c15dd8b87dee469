"""The work clock of a rank: CPU time of its thread, or time on its GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

NS_PER_MS = 1_000_000


class WorkClock(Protocol):
    """Reads marks in the hot path and turns them into nanoseconds afterwards."""

    @property
    def read(self) -> Callable[[], Any]: ...

    def start(self) -> None: ...

    def settle(self) -> None:
        """Waits until all marks have been passed."""

    def work_ns(self, mark: Any) -> int:
        """Nanoseconds of work up to this mark; only differences mean something."""

    def read_of(self, thread: int) -> Any:
        """A mark of another thread of this process, by its `threading.get_ident()`."""

    def leave_out(self, work_ns: int) -> None:
        """The work of this thread just done was vizkit's own, not the program's; read marks with a new `read`."""

    def wall_ns(self, mark: Any, host_ns: int) -> int:
        """When the mark was passed, on `CLOCK_MONOTONIC`; the host passed it at `host_ns`."""


class CpuClock:
    """The CPU time of the calling thread, less what was left out."""

    def __init__(self) -> None:
        self.read: Callable[[], int] = time.thread_time_ns
        self._left_out_ns = 0

    def start(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def read_of(self, thread: int) -> int:
        return time.clock_gettime_ns(time.pthread_getcpuclockid(thread)) - self._left_out_ns

    def leave_out(self, work_ns: int) -> None:
        self._left_out_ns += work_ns
        self.read = self._read_less

    def _read_less(self) -> int:
        return time.thread_time_ns() - self._left_out_ns

    def work_ns(self, mark: int) -> int:
        return mark

    def wall_ns(self, mark: int, host_ns: int) -> int:
        return host_ns


class CudaClock:
    """The time on the current stream: CUDA events, because the host only queues the work."""

    def __init__(self) -> None:
        self._origin = self.read()
        self._origin_host_ns = 0

    def read(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        torch.cuda.synchronize()
        self._origin = self.read()
        self._origin.synchronize()
        self._origin_host_ns = time.monotonic_ns()

    def settle(self) -> None:
        torch.cuda.synchronize()

    def read_of(self, thread: int) -> torch.cuda.Event:
        return self.read()

    def leave_out(self, work_ns: int) -> None:
        pass  # the device works on meanwhile

    def work_ns(self, mark: torch.cuda.Event) -> int:
        return round(self._origin.elapsed_time(mark) * NS_PER_MS)

    def wall_ns(self, mark: torch.cuda.Event, host_ns: int) -> int:
        return self._origin_host_ns + self.work_ns(mark)
