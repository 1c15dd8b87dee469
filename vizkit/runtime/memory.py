"""How much memory this rank holds, sampled while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable

MIN_INTERVAL_NS = 1_000_000
"""Samples are at least a millisecond apart, so that sampling costs next to nothing."""


class MemorySampler:
    """Notes the bytes that `read` returns, at most once a millisecond."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._next_ns = 0
        self.samples: list[tuple[int, int]] = []

    def sample(self, now_ns: int) -> None:
        """Takes a sample at `now_ns` on `CLOCK_MONOTONIC`, unless the last one is too fresh."""
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + MIN_INTERVAL_NS
            self.samples.append((now_ns, self._read()))


def resident_bytes_reader() -> Callable[[], int]:
    """Reads this process's resident set, in bytes, from `/proc/self/statm`."""
    descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return lambda: int(os.pread(descriptor, 128, 0).split()[1]) * page_bytes


def memory_reader(on_cuda: bool) -> Callable[[], int]:
    """Reads what this rank holds, in bytes: the tensors on its GPU, or its resident set on a CPU."""
    if on_cuda:
        import torch

        return torch.cuda.memory_allocated
    return resident_bytes_reader()
