"""A training function that survives restarts: after each step rank 0 saves a checkpoint, and each start loads it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import vizkit as vk

CHECKPOINT = "checkpoint.pt"
GLOBAL_BATCH, FEATURES = 16, 8


def train(folder: str, steps: int, pause_s: float = 0.0) -> dict[str, float]:
    """Data-parallel SGD for `steps` steps in all; a step's batch depends on its number alone, not on who computes it.

    Returns the loss of the global batch in the last step, and the step at which this start began.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    saved = Path(folder) / CHECKPOINT
    first = load(saved, model, optimizer) if saved.exists() else 0
    replica = DistributedDataParallel(model)
    mean_loss = torch.zeros(())
    for step in range(first, steps):
        with vk.span(f"step {step}"):
            time.sleep(pause_s)
            x, y = shard(step, dist.get_rank(), dist.get_world_size())
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(replica(x), y)
            loss.backward()
            optimizer.step()
            mean_loss = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean_loss)
        if dist.get_rank() == 0:
            save(saved, model, optimizer, step + 1)
    return {"loss": mean_loss.item(), "first": first}


def shard(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the step's batch."""
    x = torch.randn(GLOBAL_BATCH, FEATURES, generator=torch.Generator().manual_seed(step))
    y = x.sum(dim=1, keepdim=True).sin()
    return x.chunk(world_size)[rank], y.chunk(world_size)[rank]


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Whole or not at all: a rank that is killed while it writes leaves the checkpoint before."""
    new = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
    os.replace(new, path)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restores both and returns the number of steps done; momentum is part of the state."""
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def steps_done(folder: Path) -> int:
    """Steps that the checkpoint in `folder` has behind it; 0 where there is none."""
    path = folder / CHECKPOINT
    return torch.load(path)["step"] if path.exists() else 0
