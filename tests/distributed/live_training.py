"""A training loop without a model, for tests of the live view: ranks import this and little else."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import vizkit as vk

STEP_S = 0.005


def train(steps: int, slow: int = -1, factor: float = 4.0) -> int:
    """Each step computes for a while and ends with an all-reduce of 4,000 bytes."""
    for step in vk.progress(range(steps), label="step"):
        time.sleep(STEP_S * (factor if dist.get_rank() == slow else 1))
        dist.all_reduce(torch.ones(1000))
        vk.log(loss=1 / (step + 1))
    return steps
