"""What the tests of real pipelines share: a model in stages, one process to compare with, a function for the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import vizkit as vk

WIDTH = 6
Gradients = dict[int, list[torch.Tensor]]
"""Gradients of the parameters of each stage, in order."""


def make_stages(num_stages: int, width: int = WIDTH) -> list[nn.Module]:
    """Stages whose outputs all have one size, the same in each process."""
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_stages)]


def make_batch(size: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(size, width, generator=generator), torch.randn(size, width, generator=generator)


def gradients(pipe: vk.Pipeline) -> Gradients:
    return {s: [p.grad.clone() for p in pipe.module(s).parameters() if p.grad is not None] for s in pipe.stages}


def run_steps(
    schedule: vk.Schedule,
    make: Callable[[int], Any] = make_stages,
    batch: int | None = None,
    steps: int = 1,
    loss_fn: Any = nn.functional.mse_loss,
) -> tuple[list[float | None], Gradients, torch.Tensor | None]:
    """On each rank: losses of all steps, gradients after them, output of the last."""
    x, y = make_batch(batch or 2 * schedule.num_microbatches)
    pipe = vk.pipeline(schedule, make(schedule.num_stages), loss_fn)
    results = [pipe.step(x + step, target=y) for step in range(steps)]
    return [result.loss for result in results], gradients(pipe), results[-1].output


def one_process(
    schedule: vk.Schedule,
    make: Callable[[int], Any] = make_stages,
    batch: int | None = None,
    steps: int = 1,
    loss_fn: Any = nn.functional.mse_loss,
) -> tuple[list[float], Gradients, torch.Tensor]:
    """The same without a pipeline."""
    x, y = make_batch(batch or 2 * schedule.num_microbatches)
    stages = make(schedule.num_stages)
    losses = []
    for step in range(steps):
        output = nn.Sequential(*stages)(x + step)
        loss = loss_fn(output, y)
        if schedule.has_backward:
            loss.backward()
        losses.append(loss.item())
    found = {s: [p.grad for p in m.parameters() if p.grad is not None] for s, m in enumerate(stages)}
    return losses, found, output.detach()


def assert_equals_one_process(run: vk.Run, schedule: vk.Schedule, **keywords: Any) -> None:
    """Loss where the last stage is and nowhere else, its output, and the gradients of every stage on its rank."""
    losses, expected, output = one_process(schedule, **keywords)
    owner = schedule.stage_ranks[-1]
    for rank, (found, found_gradients, found_output) in enumerate(run.results):
        assert list(found_gradients) == schedule.stages_of(rank)
        for stage, tensors in found_gradients.items():
            torch.testing.assert_close(tensors, expected[stage], msg=lambda m, s=stage: f"{schedule.name} {s}: {m}")
        if rank == owner:
            torch.testing.assert_close(torch.tensor(found), torch.tensor(losses))
            torch.testing.assert_close(found_output, output)
        else:
            assert found == [None] * len(losses)
            assert found_output is None
