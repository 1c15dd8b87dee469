"""Parity of real ranks with one process."""

from __future__ import annotations

import torch

import vizkit as vk


def train() -> dict[str, object]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 2)
    loss = layer(torch.ones(3, 4)).square().mean()
    loss.backward()
    return {"loss": loss.item(), "gradients": {name: p.grad for name, p in layer.named_parameters()}}


def test_runs_of_real_ranks() -> None:
    """Two replicas of the same step against one process."""
    found = vk.parity(vk.launch(train, world_size=2, device="cpu"), vk.launch(train, world_size=1, device="cpu"))
    assert str(found).startswith("equal to one process: 3 values on 2 ranks\nlargest difference: ")
