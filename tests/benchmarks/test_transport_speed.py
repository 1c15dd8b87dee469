"""Large tensors between the notebook and its ranks, against writing and reading them through a file in memory."""

from __future__ import annotations

import os
import time
from statistics import median

import torch

import vizkit as vk
from tests.benchmarks.conftest import Compare, Row

NUM_BYTES = 100_000_000
WORLD_SIZE = 2


def through_a_file(tensor: torch.Tensor) -> torch.Tensor:
    descriptor = os.memfd_create("peer")
    with open(descriptor, "r+b") as file:
        file.write(memoryview(tensor.numpy()).cast("B"))
        file.seek(0)
        arrived = torch.empty_like(tensor)
        file.readinto(memoryview(arrived.numpy()).cast("B"))
    return arrived


def there_and_back(tensor: torch.Tensor) -> torch.Tensor:
    tensor.add_(1)
    return tensor


def test_a_hundred_megabytes_each_way(compare: Compare) -> None:
    """To and from each of two ranks, less what a launch without them costs."""
    tensor = torch.ones(NUM_BYTES // 4)
    small = torch.ones(1)
    vk.launch(there_and_back, small, world_size=WORLD_SIZE)

    def timed(function, *arguments) -> float:
        started = time.perf_counter()
        function(*arguments)
        return time.perf_counter() - started

    def by_file() -> None:
        for _ in range(WORLD_SIZE):
            there_and_back(through_a_file(tensor))
            through_a_file(tensor)

    def by_launch(argument: torch.Tensor) -> float:
        return timed(lambda: vk.launch(there_and_back, argument, world_size=WORLD_SIZE))

    peer = median(timed(by_file) for _ in range(5))
    ours = median(by_launch(tensor) for _ in range(5)) - median(by_launch(small) for _ in range(5))
    compare(Row("100 MB to and from each of 2 ranks", ours, peer, "file in memory, written and read", "s", 1.3))
