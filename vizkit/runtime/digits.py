"""The kit's main job: a small convolutional network learns real handwritten digits, data-parallel over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vizkit.errors import InvalidInputError
from vizkit.runtime.device import device
from vizkit.runtime.recorder import span
from vizkit.sizes import whole_number

NUM_TRAINING_SAMPLES = 1536
"""The rest of the 1797 digits is for testing."""
BUCKET_MB = 0.05
"""Small enough that this small network has several buckets, and the first travels while backward still computes."""


@dataclass(frozen=True)
class Lesson:
    """What one rank knows after training: loss on its shard at each step, and how it did on its share of the test."""

    losses: tuple[float, ...]
    num_right: int
    num_tested: int
    gradient_bytes: int


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Scikit-learn's handwritten digits, shuffled: images of shape (1797, 1, 8, 8) from 0 to 1, and their labels.

    Load them once, outside the ranks: importing scikit-learn takes each rank longer than the whole training.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = torch.tensor(data.images[order] / 16, dtype=torch.float32).unsqueeze(1)
    return images, torch.tensor(data.target[order])


def network(seed: int = 0) -> nn.Sequential:
    """Two convolutions and two linear layers for 8 × 8 images; the same weights for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batch_of_digits(global_batch: int) -> int:
    """The size of a batch; raises `InvalidInputError` for one without samples, or with more than there are to train on.

    >>> batch_of_digits(128)
    128
    """
    if whole_number("global_batch", global_batch) > NUM_TRAINING_SAMPLES:
        raise InvalidInputError.because(
            "global_batch",
            global_batch,
            f"there are {NUM_TRAINING_SAMPLES} digits to train on",
            f"use {NUM_TRAINING_SAMPLES} or fewer",
        )
    return global_batch


def train(
    images: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_steps: int = 80,
    global_batch: int = 128,
    learning_rate: float = 0.05,
) -> Lesson:
    """Runs inside a rank: each step takes `global_batch` samples, of which every rank computes an equal share.

    Raises `InvalidInputError` where the batch does not divide by the number of ranks, or is none.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_of_digits(global_batch)
    if global_batch % world_size:
        below = global_batch - global_batch % world_size
        raise InvalidInputError.because(
            "global_batch",
            global_batch,
            f"must divide by the {world_size} ranks",
            f"use {below or world_size} or {below + world_size}",
        )
    here = str(device())
    images, labels = images.to(here), labels.to(here)
    model = DistributedDataParallel(network().to(here), bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    shuffle = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(num_steps):
        with span("load", kind="data"):
            mine = torch.randperm(NUM_TRAINING_SAMPLES, generator=shuffle)[:global_batch][rank::world_size]
            batch, target = images[mine], labels[mine]
        with span("forward", kind="forward"):
            loss = criterion(model(batch), target)
        with span("backward", kind="backward"):
            optimizer.zero_grad()
            loss.backward()
        with span("optimizer", kind="optimizer"):
            optimizer.step()
        losses.append(loss.item())
    tested = slice(NUM_TRAINING_SAMPLES + rank, None, world_size)
    with span("evaluate", kind="compute"), torch.no_grad():
        right = model.module(images[tested]).argmax(dim=1) == labels[tested]
    gradient_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return Lesson(tuple(losses), int(right.sum()), len(right), gradient_bytes)
