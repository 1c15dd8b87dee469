"""What real ranks move, held against the formulas to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vizkit as vk
from tests.distributed.splitting import device_mesh
from vizkit.ledgers import Cause, Ledger, ShardedMovement
from vizkit.trace import SpanKind
from vizkit.volume import Movement

FLOAT_BYTES = 4
WIDTH, LAYERS, STEPS, ROWS, SEQ = 12, 3, 2, 4, 6
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * FLOAT_BYTES
MODEL_BYTES = LAYERS * LAYER_BYTES
PATIENT_S = 120
K = SpanKind


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def ledger(fn: Any, mesh: vk.Mesh, expected: list[Movement], *args: Any, steps: int = 1) -> Ledger:
    run = vk.launch(fn, *args, world_size=mesh.world_size, device="cpu", timeout_s=PATIENT_S)
    return vk.ledger(run, mesh, expected, steps=steps)


def causes(book: Ledger, axis: str, kind: SpanKind) -> set[Cause]:
    return {explanation.cause for explanation in book.row(axis, kind).explanations}


def train_ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Net(), bucket_cap_mb=LAYER_BYTES / 2**20)
    for _ in range(STEPS):
        loss = model(torch.ones(2, WIDTH)).sum()
        loss.backward()
        dist.all_reduce(loss.detach())


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_ddp(dp: int) -> None:
    """2Ψ on the ring: the gradients once a step, in buckets; besides them the loss, and at the start the parameters.

    On the start-up: ranks compare how many parameters they have, and rank 0 broadcasts its parameters.
    """
    book = ledger(train_ddp, vk.Mesh(dp=dp), [Movement("dp", K.ALL_REDUCE, MODEL_BYTES)], steps=STEPS)
    row = book.row("dp", K.ALL_REDUCE)
    assert row.difference_bytes == STEPS * FLOAT_BYTES
    assert causes(book, "dp", K.ALL_REDUCE) == {Cause.BUCKETS, Cause.NOT_IN_THE_FORMULA}
    assert row.wire_bytes == row.ring_bytes
    assert row.ring_bytes == pytest.approx(2 * (dp - 1) / dp * row.payload_bytes, abs=2 * FLOAT_BYTES * row.calls)
    assert MODEL_BYTES <= book.row("dp", K.BROADCAST).payload_bytes < MODEL_BYTES + 1_000
    assert (book.explained, book.matches) == (True, False)


def zero_by_hand(num_elements: int) -> None:
    """A step of ZeRO on flat parameters, padded to whole shards."""
    n = dist.get_world_size()
    shard = -(-num_elements // n)
    flat, mine = torch.ones(n * shard), torch.empty(shard)
    for _ in range(STEPS):
        dist.reduce_scatter_tensor(mine, flat)
        dist.all_gather_into_tensor(flat, mine)


@pytest.mark.parametrize(("dp", "padding_elements"), [(2, 1), (3, 2), (4, 3)])
def test_zero_by_hand(dp: int, padding_elements: int) -> None:
    """Ψ scattered and Ψ gathered, and the padding of each; gloo sends a reduce-scatter twice."""
    elements = 12 * 25 + 1
    expected = [Movement("dp", kind, elements * FLOAT_BYTES) for kind in (K.REDUCE_SCATTER, K.ALL_GATHER)]
    book = ledger(zero_by_hand, vk.Mesh(dp=dp), expected, elements, steps=STEPS)
    padded = STEPS * (elements + padding_elements) * FLOAT_BYTES
    for kind in (K.REDUCE_SCATTER, K.ALL_GATHER):
        row = book.row("dp", kind)
        assert [(e.cause, e.difference_bytes) for e in row.explanations] == [
            (Cause.PADDING, STEPS * padding_elements * FLOAT_BYTES)
        ]
        assert row.ring_bytes * dp == (dp - 1) * padded
    scattered = book.row("dp", K.REDUCE_SCATTER)
    assert scattered.wire_bytes == 2 * scattered.ring_bytes
    assert scattered.wire_explanation is not None
    assert scattered.wire_explanation.cause is Cause.GLOO_REDUCE_SCATTER
    assert book.matches


def train_fsdp(axes: dict[str, int], reshard_after_forward: bool, width: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh, model = device_mesh(**axes), Net(width)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh)
    for _ in range(STEPS):
        model(torch.ones(2, width)).sum().backward()
        if not reshard_after_forward:
            for layer in model.layers:
                layer.reshard()  # type: ignore[operator]


def fsdp_formula(axis: str, gathers: int, width: int) -> list[Movement]:
    """Each layer's tensors, with the shapes that tell their padding."""
    layer_bytes, shapes = (width * width + width) * FLOAT_BYTES, ((width, width), (width,))
    kinds = ((K.ALL_GATHER, gathers), (K.REDUCE_SCATTER, 1))
    return [ShardedMovement(axis, kind, layer_bytes, LAYERS * times, shapes=shapes) for kind, times in kinds]


@pytest.mark.parametrize(("reshard", "volume"), [(True, 3), (False, 2)])
@pytest.mark.parametrize("dp", [2, 4])
def test_fsdp2(dp: int, reshard: bool, volume: int) -> None:
    """Resharded after forward, parameters are gathered twice: 3Ψ; kept until backward, once: 2Ψ, as data parallel."""
    expected = fsdp_formula("dp", volume - 1, WIDTH)
    book = ledger(train_fsdp, vk.Mesh(dp=dp), expected, {"dp": dp}, reshard, WIDTH, steps=STEPS)
    assert book.matches
    assert {row.difference_bytes for row in book.rows} == {0}
    assert sum(row.payload_bytes for row in book.rows) == volume * MODEL_BYTES * STEPS
    assert all(row.wire_explanation is None for row in book.rows if row.kind is not K.REDUCE_SCATTER)


@pytest.mark.parametrize(("dp", "rows"), [(3, 12), (4, 12)])
def test_fsdp2_pads_rows_that_do_not_divide(dp: int, rows: int) -> None:
    """Ten rows become twelve, of each tensor: all of the difference is that padding."""
    width = 10
    book = ledger(train_fsdp, vk.Mesh(dp=dp), fsdp_formula("dp", 2, width), {"dp": dp}, True, width, steps=STEPS)
    padding_bytes = LAYERS * STEPS * (rows - width) * (width + 1) * FLOAT_BYTES
    gathered, scattered = book.row("dp", K.ALL_GATHER), book.row("dp", K.REDUCE_SCATTER)
    assert (gathered.difference_bytes, scattered.difference_bytes) == (2 * padding_bytes, padding_bytes)
    assert causes(book, "dp", K.ALL_GATHER) == causes(book, "dp", K.REDUCE_SCATTER) == {Cause.PADDING}
    assert book.matches


def test_hsdp() -> None:
    """Sharded along one axis, and each shard of the gradients all-reduced along the other."""
    axes = {"replicate": 2, "shard": 2}
    expected = [
        *fsdp_formula("shard", 2, WIDTH),
        Movement("replicate", K.ALL_REDUCE, LAYER_BYTES / 2, LAYERS, why="the shard of the gradients, once"),
    ]
    book = ledger(train_fsdp, vk.Mesh(**axes), expected, axes, True, WIDTH, steps=STEPS)
    assert book.matches
    assert [(row.axis, row.kind) for row in book.rows] == [
        ("replicate", K.ALL_REDUCE),
        ("shard", K.ALL_GATHER),
        ("shard", K.REDUCE_SCATTER),
    ]


def megatron_mlp(sequence_parallel: bool, backward: bool) -> None:
    """Forward, or forward and backward; the weights are cut in place, so that nothing is sent to split them."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False))
    end, sequence = (Shard(1) if sequence_parallel else Replicate()), SEQ
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=end)}
    mesh = device_mesh(tp=dist.get_world_size())
    parallelize_module(mlp, mesh, styles, src_data_rank=None)
    if sequence_parallel:
        parallelize_module(mlp, mesh, PrepareModuleInput(input_layouts=(end,), desired_input_layouts=(Replicate(),)))
        sequence //= dist.get_world_size()
    out = mlp(torch.ones(ROWS, sequence, WIDTH, requires_grad=True))
    if backward:
        out.sum().backward()
    elif hasattr(out, "wait"):
        out.wait()


@pytest.mark.parametrize(
    ("sequence_parallel", "backward", "times"),
    [
        (False, False, {K.ALL_REDUCE: 1}),
        (False, True, {K.ALL_REDUCE: 2}),
        (True, False, {K.ALL_GATHER: 1, K.REDUCE_SCATTER: 1}),
        (True, True, {K.ALL_GATHER: 2, K.REDUCE_SCATTER: 2}),
    ],
)
@pytest.mark.parametrize("tp", [2, 3])
def test_megatron_mlp(tp: int, sequence_parallel: bool, backward: bool, times: dict[SpanKind, int]) -> None:
    """An all-reduce of the activations in each direction; split by sequence, an all-gather and a reduce-scatter.

    Together they are the same bytes on a ring: 2 (t - 1)/t of batch x sequence x width.
    """
    activations = ROWS * SEQ * WIDTH * FLOAT_BYTES
    expected = [Movement("tp", kind, activations, count) for kind, count in times.items()]
    book = ledger(megatron_mlp, vk.Mesh(tp=tp), expected, sequence_parallel, backward)
    assert book.matches, str(book)
    assert {row.difference_bytes for row in book.rows} == {0}
    directions = 1 + backward
    assert sum(row.ring_bytes for row in book.rows) * tp == directions * 2 * (tp - 1) * activations


def run_pipeline(num_microbatches: int) -> None:
    schedule = vk.schedule("1F1B", num_ranks=dist.get_world_size(), num_microbatches=num_microbatches)
    pipe = vk.pipeline(schedule, [nn.Linear(WIDTH, WIDTH) for _ in range(schedule.num_stages)], nn.functional.mse_loss)
    x = torch.ones(2 * num_microbatches, WIDTH)
    for _ in range(STEPS):
        pipe.step(x, target=x)


@pytest.mark.parametrize("pp", [2, 3])
def test_pipeline(pp: int) -> None:
    """A microbatch's activations to the next stage and their gradients back: only inner stages send both."""
    microbatches, message = 4, 2 * WIDTH * FLOAT_BYTES
    messages = microbatches * (2 if pp > 2 else 1)
    book = ledger(run_pipeline, vk.Mesh(pp=pp), [Movement("pp", K.SEND, message, messages)], microbatches, steps=STEPS)
    row = book.row("pp", K.SEND)
    assert book.matches, str(book)
    assert (row.difference_bytes, row.least_payload_bytes) == (0, STEPS * microbatches * message)
    assert causes(book, "pp", K.SEND) == ({Cause.PART_OF_THE_FULLEST} if pp > 2 else set())
    assert row.wire_bytes == row.payload_bytes


def average_along(axis: str) -> None:
    mesh = device_mesh(dp=2, tp=2)
    dist.all_reduce(torch.ones(100), group=mesh[axis].get_group())


@pytest.mark.parametrize(("axis", "right"), [("dp", True), ("tp", False)])
def test_a_wrong_group_shows(axis: str, right: bool) -> None:
    """Bytes along the wrong axis are not in the formula, and what should have gone along the right one never came."""
    book = ledger(average_along, vk.Mesh(dp=2, tp=2), [Movement("dp", K.ALL_REDUCE, 400)], axis)
    assert (book.explained, book.matches) == (right, right)
    if not right:
        assert causes(book, "tp", K.ALL_REDUCE) == {Cause.NOT_IN_THE_FORMULA}
        assert causes(book, "dp", K.ALL_REDUCE) == {Cause.NEVER_CAME}


def test_a_device_mesh_serves_as_mesh() -> None:
    """One of real torch, made on a rank, has the axes that a ledger asks for."""
    run = vk.launch(axes_on_ranks, world_size=4, device="cpu", timeout_s=PATIENT_S)
    assert run.results == [vk.Mesh(dp=2, tp=2)] * 4


def axes_on_ranks() -> vk.Mesh:
    return vk.Mesh.of(device_mesh(dp=2, tp=2))
