"""Trains on a rank with any tuning: data-parallel, with the kit's digits or a model and batches of one's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

from vizkit.errors import InvalidInputError
from vizkit.runtime import digits
from vizkit.runtime.device import device
from vizkit.runtime.recorder import span
from vizkit.runtime.tuning.hierarchical import Levels, two_levels
from vizkit.runtime.tuning.hooks import register
from vizkit.runtime.tuning.quantised import BLOCK, quantised_all_gather
from vizkit.runtime.tuning.tunings import Exchange, Tuning
from vizkit.sizes import divides, whole_number

MOMENTUM = 0.9
Batch = tuple[torch.Tensor, torch.Tensor]
LossOf = Callable[[nn.Module, Batch], torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """What one rank brings back: the mean loss of its samples in each optimizer step, and all parameters."""

    losses: tuple[float, ...]
    parameters: tuple[torch.Tensor, ...]


def accumulate(model: nn.Module, batches: Sequence[Batch], loss_of: LossOf, forward_in_no_sync: bool = True) -> float:
    """Adds up the gradients of the mean loss over equal batches, and lets DDP exchange them with the last one only.

    DDP decides in the forward whether its backward exchanges, so the forward belongs inside `no_sync` too.
    `forward_in_no_sync=False` leaves it outside: every backward exchanges then, with the same gradients in the end.
    Returns the mean loss on this rank. A model that is not DDP's exchanges nothing. Raises `InvalidInputError` for no
    batch, with which nothing would be exchanged and the other ranks would wait.
    """
    if not batches:
        raise InvalidInputError.because("number of batches", 0, "nothing would be exchanged", "give 1 or more")
    total = 0.0
    for number, batch in enumerate(batches, start=1):
        quiet = getattr(model, "no_sync", contextlib.nullcontext) if number < len(batches) else contextlib.nullcontext
        with quiet() if forward_in_no_sync else contextlib.nullcontext(), span("forward", kind="F"):
            loss = loss_of(model, batch) / len(batches)
        with quiet():
            loss.backward()
        total += loss.item()
    return total


class ShardedSGD:
    """SGD of which each rank updates a part, in fp32, and gathers all parameters in int8 (ZeRO-1, as in ZeRO++).

    Gradients are averaged by a reduce-scatter. Models on all ranks hold the same quantised parameters, and begin with
    those of rank 0, as with DDP; what rounding takes away stays in the part, so that small updates add up. It has fp32,
    or more where parameters have more. Raises `InvalidInputError` for a model in which nothing is trained.
    """

    def __init__(self, model: nn.Module, learning_rate: float, block: int = BLOCK) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._ranks, self._block = dist.get_world_size(), block
        if not sum(p.numel() for p in self._parameters):
            raise InvalidInputError.because("model", type(model).__name__, "has nothing to train", "unfreeze a layer")
        flat = self._flat(self._parameters)
        dist.broadcast(flat, 0)
        self._put(flat)
        part = flat.chunk(self._ranks)[dist.get_rank()]
        self._part = nn.Parameter(part.to(torch.promote_types(part.dtype, torch.float32), copy=True))
        self._optimizer = torch.optim.SGD([self._part], lr=learning_rate, momentum=MOMENTUM)

    def _flat(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return pad(flat, (0, -len(flat) % self._ranks))

    def _put(self, flat: torch.Tensor) -> None:
        """Into the parameters."""
        sizes = [p.numel() for p in self._parameters]
        for p, new in zip(self._parameters, flat[: sum(sizes)].split(sizes), strict=True):
            p.data.copy_(new.view_as(p))

    def step(self) -> None:
        flat = self._flat(torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters)
        gradient = flat.new_empty(len(self._part))
        dist.reduce_scatter_single(gradient, flat.div_(self._ranks))
        self._part.grad = gradient.to(self._part.dtype)
        self._optimizer.step()
        self._put(quantised_all_gather(self._part.detach(), block=self._block))

    def zero_grad(self) -> None:
        for p in self._parameters:
            p.grad = None


class Trainer:
    """A model that trains as a tuning says; all ranks make it together.

    `step(batches)` takes this rank's `tuning.accumulate` batches through one optimizer step, and averages parameters
    where the tuning does; `model` is the bare module. Raises `InvalidInputError` for more or fewer batches.
    """

    def __init__(self, model: nn.Module, tuning: Tuning, levels: Levels, loss_of: LossOf) -> None:
        self.model, self.tuning, self._loss_of = model, tuning, loss_of
        self._replica: nn.Module = model
        self._optimizer: torch.optim.Optimizer | ShardedSGD
        if tuning.exchange is Exchange.SHARDED:
            self._optimizer = ShardedSGD(model, tuning.learning_rate, tuning.block)
        else:
            self._replica = DistributedDataParallel(model, bucket_cap_mb=tuning.bucket_mb)
            register(self._replica, tuning, levels)
            self._optimizer = torch.optim.SGD(model.parameters(), lr=tuning.learning_rate, momentum=MOMENTUM)
        self._averager = None
        if tuning.averages_parameters:
            among = levels.between if tuning.exchange is Exchange.IN_NODE else None
            # torch's averager begins with an average after the first step; this makes it the last of each period
            self._averager = PeriodicModelAverager(tuning.period, tuning.period - 1, process_group=among)

    def step(self, batches: Sequence[Batch]) -> float:
        """The mean loss of these batches on this rank, before the step."""
        if len(batches) != self.tuning.accumulate:
            raise InvalidInputError.because(
                "number of batches",
                len(batches),
                f"a step of {self.tuning.name!r} takes accumulate={self.tuning.accumulate}",
                f"give {self.tuning.accumulate}",
            )
        self._optimizer.zero_grad()
        loss = accumulate(self._replica, batches, self._loss_of, self.tuning.forward_in_no_sync)
        self._optimizer.step()
        if self._averager is not None:
            self._averager.average_parameters(self.model.parameters())
        return loss


def train(
    tuning: Tuning,
    images: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_batches: int,
    global_batch: int = 128,
    ranks_per_node: int = 1,
) -> Trained:
    """Runs inside a rank: the kit's network learns digits from `num_batches` batches of `global_batch` samples.

    Every tuning sees the same samples in the same order, an equal share on each rank. Raises `InvalidInputError` where
    the batch does not divide by the ranks or is larger than the training set, the ranks do not divide by those of a
    node, or the batches by `tuning.cycle`.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    divides("global_batch", digits.batch_of_digits(global_batch), "world_size", world_size)
    divides("num_batches", whole_number("num_batches", num_batches), "cycle", tuning.cycle)
    here = str(device())
    images, labels = images.to(here), labels.to(here)
    trainer = Trainer(digits.network().to(here), tuning, two_levels(ranks_per_node), _cross_entropy)
    shuffle = torch.Generator().manual_seed(0)

    def next_batch() -> Batch:
        mine = torch.randperm(digits.NUM_TRAINING_SAMPLES, generator=shuffle)[:global_batch][rank::world_size]
        return images[mine], labels[mine]

    losses = []
    for _ in range(num_batches // tuning.accumulate):
        losses.append(trainer.step([next_batch() for _ in range(tuning.accumulate)]))
    return Trained(tuple(losses), tuple(p.detach().cpu() for p in trainer.model.parameters()))


def _cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)
