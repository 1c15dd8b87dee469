"""A tiny GPT trained in one process, and split over ranks in every way that PyTorch has; results by the same names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import vizkit as vk
from vizkit.runtime import gpt

SIZES = vk.Transformer(num_layers=2, hidden=16, heads=8, vocab=32, seq=8, tied_embeddings=False, final_norm=True)
BATCH = 24
"""Divides by 1, 2, 3, 4, 8 ranks and by the microbatches of each."""
STEPS = 2
CPU = torch.device("cpu")
Result = dict[str, Any]


def make_model() -> gpt.GPT:
    return gpt.GPT(SIZES)


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(SIZES.vocab, (BATCH, SIZES.seq + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def make_optimizer(parameters: Iterable[nn.Parameter], **keywords: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9, **keywords)


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """All of a tensor, wherever its shards lie."""
    full = getattr(tensor, "full_tensor", None)
    return full() if full else tensor


def learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: nn.Module | None = None,
    replica: int = 0,
    num_replicas: int = 1,
    group: Any = None,
    synchronise: Callable[[], None] = lambda: None,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Result:
    """Losses, the last gradients, and parameters after `STEPS` steps on this replica's part of each batch."""
    losses = []
    for step in range(STEPS):
        x, y = (part.chunk(num_replicas)[replica] for part in make_batch(step))
        optimizer.zero_grad()
        with context():
            loss = gpt.loss(model(x), y)
            loss.backward()
        synchronise()
        optimizer.step()
        losses.append(mean_of(whole(loss.detach()), num_replicas, group))
    return {"loss": losses, **states(parameters or model)}


def mean_of(loss: torch.Tensor, num_replicas: int, group: Any) -> torch.Tensor:
    loss = loss.clone()
    if num_replicas > 1:
        dist.all_reduce(loss, group=group)
    return loss / num_replicas


def states(model: nn.Module, owned: Sequence[nn.Module] | None = None) -> Result:
    """Gradients and parameters by the name that the unsplit model has for them."""
    mine = None if owned is None else {id(p) for module in owned for p in module.parameters()}
    named = {name: p for name, p in model.named_parameters() if mine is None or id(p) in mine}
    return {
        "gradients": {name: whole(p.grad) for name, p in named.items()},
        "parameters": {name: whole(p.detach()) for name, p in named.items()},
    }


def one_process() -> Result:
    model = make_model()
    return learn(model, make_optimizer(model.parameters()))


def everywhere() -> dict[str, int]:
    """Each rank is a replica."""
    return {"replica": dist.get_rank(), "num_replicas": dist.get_world_size()}


def device_mesh(**axes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def average_gradients(modules: Iterable[nn.Module], group: Any) -> None:
    """Data parallelism by hand, of whole gradients or of the shards that this rank has."""
    for module in modules:
        for p in module.parameters():
            gradient = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            dist.all_reduce(gradient, group=group)
            gradient /= dist.get_world_size(group)


def ddp() -> Result:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make_model())
    return learn(model, make_optimizer(model.parameters()), model.module, **everywhere())


def zero_1() -> Result:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)
    return learn(model, optimizer, model.module, **everywhere())


def shard_layers(model: gpt.GPT, mesh: Any) -> gpt.GPT:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp() -> Result:
    model = shard_layers(make_model(), device_mesh(dp=dist.get_world_size()))
    return learn(model, make_optimizer(model.parameters()), **everywhere())


def hsdp(num_copies: int) -> Result:
    mesh = device_mesh(replicate=num_copies, shard=dist.get_world_size() // num_copies)
    model = shard_layers(make_model(), mesh)
    return learn(model, make_optimizer(model.parameters()), **everywhere())


def block_plan(sequence_parallel: bool) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    split = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"feed_forward.up": ColwiseParallel()}
    if not sequence_parallel:
        return split | {"attention.out": RowwiseParallel(), "feed_forward.down": RowwiseParallel()}
    whole_sequence = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    and_no_cache = {name: (*layouts, None) for name, layouts in whole_sequence.items()}
    return split | {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(**and_no_cache),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(**whole_sequence),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def split_tensors(model: gpt.GPT, mesh: Any, sequence_parallel: bool = False, loss_parallel: bool = False) -> gpt.GPT:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for layer in model.layers:
        parallelize_module(layer, mesh, block_plan(sequence_parallel))
    ends: dict[str, Any] = {}
    if sequence_parallel:
        ends |= {
            "embed.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "embed.positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "head.norm": SequenceParallel(),
        }
    if sequence_parallel or loss_parallel:
        ends["head.logits"] = ColwiseParallel(
            input_layouts=Shard(1) if sequence_parallel else Replicate(),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        )
    return parallelize_module(model, mesh, ends)


def tp(**options: bool) -> Result:
    from torch.distributed.tensor.parallel import loss_parallel

    model = split_tensors(make_model(), device_mesh(tp=dist.get_world_size()), **options)
    optimizer = make_optimizer(model.parameters(), foreach=False)
    if options.get("loss_parallel"):
        return learn(model, optimizer, context=loss_parallel)
    return learn(model, optimizer)


def uneven_tp(parallel_loss: bool) -> Result:
    """Sizes that do not divide: the feed-forward's width, or the vocabulary and its loss."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    model, mesh = make_model(), device_mesh(tp=dist.get_world_size())
    if parallel_loss:
        plan = {"head.logits": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    else:
        plan = {
            "layers.*.feed_forward.up": ColwiseParallel(use_local_output=False),
            "layers.*.feed_forward.down": RowwiseParallel(),
        }
    parallelize_module(model, mesh, plan)
    optimizer = make_optimizer(model.parameters(), foreach=False)
    return learn(model, optimizer, context=loss_parallel if parallel_loss else contextlib.nullcontext)


def fsdp_tp(dp: int) -> Result:
    """Tensors split along one axis of the mesh, and each shard sharded again along the other."""
    mesh = device_mesh(dp=dp, tp=dist.get_world_size() // dp)
    model = shard_layers(split_tensors(make_model(), mesh["tp"], sequence_parallel=True), mesh["dp"])
    optimizer = make_optimizer(model.parameters(), foreach=False)
    return learn(model, optimizer, None, mesh["dp"].get_local_rank(), dp, mesh["dp"].get_group())


def dp_tp(dp: int) -> Result:
    """The same split tensors, and gradients averaged by hand."""
    mesh = device_mesh(dp=dp, tp=dist.get_world_size() // dp)
    model, group = split_tensors(make_model(), mesh["tp"]), mesh["dp"].get_group()
    optimizer = make_optimizer(model.parameters(), foreach=False)
    replica = mesh["dp"].get_local_rank()
    return learn(model, optimizer, None, replica, dp, group, lambda: average_gradients([model], group))


def pp(num_stages: int, dp: int = 1, tp: int = 1, num_microbatches: int = 2) -> Result:
    """Stages of PyTorch's pipeline; each also in `dp` copies, whose gradients are averaged, and `tp` parts."""
    from torch.distributed import pipelining

    mesh = device_mesh(pp=num_stages, dp=dp, tp=tp)
    model = make_model()
    if tp > 1:
        split_tensors(model, mesh["tp"])
    number, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    parts = model.sequence()
    mine = nn.Sequential(*(parts[i] for i in np.array_split(np.arange(len(parts)), num_stages)[number]))
    stage = pipelining.PipelineStage(mine, number, num_stages, CPU, group=mesh["pp"].get_group())
    schedule = pipelining.ScheduleGPipe(stage, num_microbatches, loss_fn=gpt.loss)
    optimizer = make_optimizer(mine.parameters(), foreach=False)
    is_first, is_last, losses = number == 0, number == num_stages - 1, []
    for step in range(STEPS):
        x, y = (part.chunk(dp)[replica] for part in make_batch(step))
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        keywords = {"target": y, "losses": found} if is_last else {}
        schedule.step(*([x] if is_first else []), **keywords)
        if dp > 1:
            average_gradients([mine], mesh["dp"].get_group())
        optimizer.step()
        losses.append(mean_of(torch.stack(found).mean(), dp, mesh["dp"].get_group()) if is_last else None)
    return {"loss": losses, **states(model, [mine])}


def unsynchronised() -> Result:
    """The bug: nobody averages the gradients."""
    model = make_model()
    return learn(model, make_optimizer(model.parameters()), **everywhere())


def wrong_group() -> Result:
    """The bug: replicas along one axis, gradients averaged along the other."""
    mesh, model = device_mesh(dp=2, tp=2), make_model()
    optimizer, replica, dp_group = (
        make_optimizer(model.parameters()),
        mesh["dp"].get_local_rank(),
        mesh["dp"].get_group(),
    )
    return learn(
        model, optimizer, None, replica, 2, dp_group, lambda: average_gradients([model], mesh["tp"].get_group())
    )


def initialised_after_sharding() -> Result:
    """The bug: each rank draws its own shard of a layer, from the same seed, so that shards are copies."""
    model = split_tensors(make_model(), device_mesh(tp=dist.get_world_size()))
    torch.manual_seed(0)
    shard = model.layers[1].feed_forward.up.weight.to_local()  # type: ignore[union-attr, operator]
    with torch.no_grad():
        nn.init.normal_(shard, std=0.05)
    return learn(model, make_optimizer(model.parameters(), foreach=False))
