"""Memory of tensors, measured on real ranks, equals what formulas say, to the byte."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import vizkit as vk
from vizkit.metrics import peak_memory
from vizkit.runtime.run import Run

FLOAT_BYTES = 4


def highest(run: Run, rank: int = 0) -> dict[str, int]:
    """Each category's own peak, the same on both clocks."""
    on_wall, virtual = (peak_memory(trace).highest_of(rank) for trace in (run.trace, run.replay()))
    assert on_wall == virtual
    return on_wall


class Layer(nn.Module):
    """A transformer layer with all its parts apart: no dropout, scores and softmax written out."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        y = self.norms[0](x)
        q, k, v = (part(y).view(batch, seq, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2) / (hidden // self.heads) ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


BATCH, SEQ, HIDDEN, HEADS, LAYERS = 3, 16, 32, 4, 3
SBH = BATCH * SEQ * HIDDEN
LAYER_BYTES = FLOAT_BYTES * (16 * SBH + HEADS * SEQ * SEQ * BATCH)
"""The published sbh(32 + 2as/h) of 16-bit numbers without dropout, in 32 bits: inputs of norms (2), of q, k, v together
(1), of the scores (2) and of their product with v (1 and the weights), of out (1), of the feed-forward (1 + 4 + 4)."""
NORM_STATISTICS_BYTES = 2 * 2 * FLOAT_BYTES * BATCH * SEQ


def train_layers(recompute: str) -> int:
    model = nn.Sequential(*[Layer(HIDDEN, HEADS) for _ in range(LAYERS)])
    optimizer = torch.optim.Adam(model.parameters())
    with vk.track_memory(model, optimizer):
        x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
        y = x
        for layer in model:
            y = layer(y) if recompute == "none" else checkpoint(layer, y, use_reentrant=recompute == "reentrant")
        y.sum().backward()
        optimizer.step()
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "recompute, activations",
    [
        ("none", LAYERS * (LAYER_BYTES + NORM_STATISTICS_BYTES)),
        # inputs of all layers, and the one that is computed again, which shares its input
        ("not reentrant", (LAYERS - 1) * FLOAT_BYTES * SBH + LAYER_BYTES + NORM_STATISTICS_BYTES),
        ("reentrant", (LAYERS - 1) * FLOAT_BYTES * SBH + LAYER_BYTES + NORM_STATISTICS_BYTES),
    ],
)
def test_a_transformer_layer_keeps_what_the_formula_says(recompute: str, activations: int) -> None:
    """Saved tensors by Korthikanti's count; parameters, gradients and Adam's moments at 4, 4 and 8 bytes."""
    run = vk.launch(train_layers, recompute, world_size=1)
    (num_params,) = run.results
    found = highest(run)
    bookkeeping = 0 if recompute == "none" else 8 * LAYERS  # torch's checkpoint may save a dummy number of its own
    assert activations <= found.pop("activations") <= activations + bookkeeping
    assert found == {"parameters": 4 * num_params, "gradients": 4 * num_params, "optimizer": 8 * num_params}
    ends = {counter.name: int(counter.values[-1]) for counter in run.trace.counters}
    assert ends["activations"] == 0


WIDTH, DEPTH = 16, 4


def train_sharded(strategy: str) -> int:
    warnings.filterwarnings("ignore")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model: nn.Module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    adam = torch.optim.Adam
    if strategy in ("ddp", "zero-1"):
        model = DistributedDataParallel(model)
    elif strategy == "tp":
        parallelize_module(model, mesh, {str(i): ColwiseParallel(output_layouts=Replicate()) for i in range(DEPTH)})
    else:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(parameters, adam) if strategy == "zero-1" else adam(parameters)
    with vk.track_memory(model, optimizer):
        if strategy == "fsdp, no backward":
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
        else:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, WIDTH)).sum().backward()
                optimizer.step()
    return len(parameters)


WEIGHT_BYTES = FLOAT_BYTES * WIDTH * WIDTH
MODEL_BYTES = DEPTH * WEIGHT_BYTES


@pytest.mark.parametrize(
    "strategy, parameters, gradients, optimizer",
    [
        ("ddp", MODEL_BYTES, MODEL_BYTES, 2 * MODEL_BYTES),
        ("zero-1", MODEL_BYTES, MODEL_BYTES, 2 * MODEL_BYTES // 2),
        ("tp", MODEL_BYTES // 2, MODEL_BYTES // 2, 2 * MODEL_BYTES // 2),
        # shards and one gathered layer; a whole gradient beside the shards of those before it
        ("fsdp", MODEL_BYTES // 2 + WEIGHT_BYTES, None, 2 * MODEL_BYTES // 2),
        ("fsdp, no backward", MODEL_BYTES // 2 + WEIGHT_BYTES, 0, 0),
    ],
)
def test_each_strategy_holds_its_share(strategy: str, parameters: int, gradients: int | None, optimizer: int) -> None:
    """On 2 ranks: replicas hold all, ZeRO-1 half of the moments, tensor parallelism and FSDP half of everything."""
    run = vk.launch(train_sharded, strategy, world_size=2)
    for rank in range(2):
        found = highest(run, rank)
        assert (found["parameters"], found["optimizer"]) == (parameters, optimizer)
        if gradients is None:
            assert MODEL_BYTES // 2 <= found["gradients"] <= MODEL_BYTES // 2 + WEIGHT_BYTES
        else:
            assert found["gradients"] == gradients
        if strategy == "fsdp":
            last = {c.name: int(c.values[-1]) for c in run.trace.counters if c.rank == rank}
            assert (last["parameters"], last["gradients"]) == (MODEL_BYTES // 2, MODEL_BYTES // 2)


MICROBATCHES, SAMPLES = 4, 8


def train_pipeline(name: str) -> None:
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)]
    schedule = vk.schedule(name, num_ranks=2, num_microbatches=MICROBATCHES)
    pipe = vk.pipeline(schedule, modules, lambda output, target: output.sum())
    with vk.track_memory(pipe):
        pipe.step(torch.ones(MICROBATCHES * SAMPLES, WIDTH), target=torch.ones(MICROBATCHES * SAMPLES, 1))


@pytest.mark.parametrize("name, in_flight", [("GPipe", (MICROBATCHES, MICROBATCHES)), ("1F1B", (2, 1))])
def test_a_pipelines_schedule_says_how_many_microbatches_are_kept(name: str, in_flight: tuple[int, int]) -> None:
    """GPipe keeps all m, 1F1B p on its first rank and one on its last; the first rank's inputs are views of a batch."""
    run = vk.launch(train_pipeline, name, world_size=2)
    one = FLOAT_BYTES * SAMPLES * WIDTH
    assert highest(run, 0)["activations"] == MICROBATCHES * one + in_flight[0] * one
    assert highest(run, 1)["activations"] == in_flight[1] * 2 * one


def odd_uses() -> dict[str, object]:
    """Facts told by the rank itself, each from a small piece of training."""
    found: dict[str, object] = {}
    tracker = vk.runtime.recorder.current_recorder
    layer = nn.Linear(8, 8)
    x = torch.ones(2, 8)

    def held() -> tuple[int, ...]:
        return tracker().tensors._rows[-1][1:]

    layer(x).exp().sum().backward()
    untracked = layer.weight.grad.clone()
    layer.zero_grad()
    outer, inner = vk.track_memory(layer), vk.track_memory([layer, nn.Linear(8, 8, bias=False)])
    with outer, inner, outer:
        found["two modules, one of them twice"] = held()[0]
        y = layer(x).exp()
        y.sum().backward()
        found["same gradient"] = torch.equal(layer.weight.grad, untracked)
        layer.zero_grad(set_to_none=True)
        layer(x)
        found["gradients set to none"] = held()[1]
        changed = (layer(x) * 1).exp()
        changed.add_(1)
        try:
            changed.sum().backward()
        except RuntimeError as error:
            found["changed in place"] = str(error)
        del changed, y
    found["nothing kept"] = held()[3]
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(9, 9, device="meta"))
    tied[1].weight = tied[0].weight
    state = {"moments": [torch.zeros(5), torch.zeros(7)]}
    with vk.track_memory({"tied": tied}, state):
        found["tied, on meta, state by hand"] = held()
        with torch.no_grad():
            tied[1](tied[0](x))
        found["no backward, nothing kept"] = held()[3]
    gathered = nn.Linear(8, 8, bias=False)
    shard = gathered.weight.data[:4].clone()
    with vk.track_memory(gathered):
        gathered.weight.data = shard
        with vk.span("sharded"):
            pass
        found["a shard put in by hand"] = held()[0]
    return found


def test_odd_uses() -> None:
    """Nested and repeated use, shared and meta parameters, state by hand, errors that hooks would hide from torch."""
    (found,) = vk.launch(odd_uses, world_size=1).results
    message = found.pop("changed in place")
    assert message.startswith("one of the variables needed for gradient computation has been modified by an inplace")
    assert found == {
        "two modules, one of them twice": FLOAT_BYTES * (72 + 64),
        "same gradient": True,
        "gradients set to none": 0,
        "nothing kept": 0,
        "tied, on meta, state by hand": (FLOAT_BYTES * 64, 0, FLOAT_BYTES * 12, 0),
        "no backward, nothing kept": 0,
        "a shard put in by hand": FLOAT_BYTES * 32,
    }


def many_saves() -> None:
    layer = nn.Linear(8, 8)
    with vk.track_memory(layer):
        for step in range(6):
            y = torch.ones(2, 8)
            for _ in range(400 if step == 3 else 200):
                y = layer(y).tanh()
            y.sum().backward()


def test_a_long_run_stays_small_and_keeps_its_peak() -> None:
    """Thousands of samples become 600 at most; the largest is among them: 400 inputs, as outputs are inputs."""
    run = vk.launch(many_saves, world_size=1)
    assert {len(counter.values) for counter in run.trace.counters} <= set(range(100, 601))
    assert highest(run)["activations"] == FLOAT_BYTES * 2 * 8 * (400 + 1)
