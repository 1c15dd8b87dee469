"""Compressed models and messages on real ranks: bytes by formula, results within the scales' bounds."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

import vizkit as vk
from vizkit.runtime.compression import (
    dynamic_int8,
    message_bytes,
    model_bytes,
    quantize,
    received,
    shard,
    to_message,
    weight_only,
)

TOKENS, HIDDEN, WIDTH = 12, 16, 24


def summand(rank: int) -> torch.Tensor:
    """What a rank adds: numbers of another size on each rank."""
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)) * (rank + 1)


def add_as_messages() -> torch.Tensor:
    mine = to_message(summand(dist.get_rank()))
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return sum(map(received, every))


def pass_on() -> torch.Tensor:
    """A ring of messages: what rank 0 had, after a hop to each rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.send(to_message(summand(0)), 1)
        return summand(0)
    message = torch.empty(TOKENS, HIDDEN + 4, dtype=torch.int8)
    dist.recv(message, rank - 1)
    if rank < n - 1:
        dist.send(to_message(received(message)), rank + 1)
    return received(message)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_of_messages_err_by_half_a_scale_a_rank(world_size: int) -> None:
    """An all-gather of codes and scales: (h + 4) bytes a token and rank, the same sum on each rank."""
    run = vk.launch(add_as_messages, world_size=world_size, device="cpu")
    bound = sum(quantize(summand(rank)).scale / 2 for rank in range(world_size))
    error = (run.results[0] - sum(map(summand, range(world_size)))).abs()
    assert bool((error <= bound * 1.0001).all())
    assert all(torch.equal(result, run.results[0]) for result in run.results)
    one = message_bytes(TOKENS, HIDDEN)
    gathered = vk.volume.Movement("tp", "all_gather", world_size * one)
    assert vk.ledger(run, vk.Mesh(tp=world_size), expected=[gathered]).matches
    assert vk.metrics.traffic(run.trace).wire_bytes[0].sum() == (world_size - 1) * one


def test_hops_of_messages_add_no_further_error() -> None:
    """Quantising what was quantised changes nothing, so a pipeline that sends on errs once."""
    run = vk.launch(pass_on, world_size=3, device="cpu")
    once = received(to_message(summand(0)))
    torch.testing.assert_close(run.results[2], once)
    hop = vk.volume.Movement("pp", "send", message_bytes(TOKENS, HIDDEN))
    assert vk.ledger(run, vk.Mesh(pp=3), expected=[hop]).matches


def feed_forward() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.ReLU(), nn.Linear(WIDTH, HIDDEN)).requires_grad_(False)


def by_columns_then_rows(module: nn.Sequential, shares_scale: bool) -> tuple[torch.Tensor, int]:
    rank, n = dist.get_rank(), dist.get_world_size()
    up, down = shard(module[0], 0, rank, n), shard(module[2], 1, rank, n)

    def largest_of_all(largest: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest

    down.over_ranks = largest_of_all if shares_scale else None
    out = down(torch.relu(up(summand(0))))
    dist.all_reduce(out)
    return out, model_bytes(up) + model_bytes(down)


MAKERS: dict[str, tuple[Callable[[nn.Module], nn.Module], bool, bool]] = {
    "float32": (lambda module: module, False, True),
    "8 bits": (weight_only, False, True),
    "4 bits": (lambda module: weight_only(module, bits=4), False, True),
    "dynamic int8": (dynamic_int8, False, False),
    "dynamic int8 with shared scales": (dynamic_int8, True, True),
}


@pytest.mark.parametrize("make, shares_scale, is_equal", MAKERS.values(), ids=MAKERS)
def test_tensor_parallel_ranks_compute_what_one_process_does(make, shares_scale: bool, is_equal: bool) -> None:
    """Codes that are cut after they were made; dynamic scales only where the ranks share them."""
    module = make(feed_forward())
    run = vk.launch(by_columns_then_rows, module, shares_scale, world_size=3, device="cpu")
    parity = vk.parity([{"y": out} for out, _ in run.results], {"y": module(summand(0))}, atol=1e-5)
    assert parity.holds == is_equal
    assert vk.parity([{"y": out} for out, _ in run.results], {"y": feed_forward()(summand(0))}, atol=1.0, rtol=0)
    assert max(held for _, held in run.results) < model_bytes(module) / 2


def test_an_all_reduce_of_codes_is_no_sum() -> None:
    """Notebook 14's mistake: codes wrap around at 127, and each rank's mean something else."""

    def add_codes() -> torch.Tensor:
        mine = quantize(summand(dist.get_rank()))
        dist.all_reduce(mine.codes)
        return mine.dequantize()

    run = vk.launch(add_codes, world_size=2, device="cpu")
    true = summand(0) + summand(1)
    assert (run.results[0] - true).abs().max() > true.abs().max() / 2
    assert not torch.equal(*run.results)


def test_what_notebook_14_says_of_torch_still_stands() -> None:
    """Deprecated and there; masks that double the bytes; 2 of 4 for CUDA only; int8 products that are exact."""
    linear = nn.Sequential(nn.Linear(64, 64, bias=False)).requires_grad_(False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        old = torch.ao.quantization.quantize_dynamic(linear, {nn.Linear}, dtype=torch.qint8)
    assert "deprecated and will be removed" in str(said[0].message)
    assert "per_tensor" in repr(old[0])
    prune.l1_unstructured(linear[0], "weight", amount=0.5)
    assert model_bytes(linear) == 2 * 64 * 64 * 4
    with pytest.raises(RuntimeError, match="cpu is not supported"):
        torch.sparse.to_sparse_semi_structured(torch.ones(64, 64).half())
    a, b = quantize(torch.randn(3, 64)).codes, quantize(torch.randn(5, 64)).codes
    assert torch.equal(torch._int_mm(a, b.t()), a.int() @ b.int().t())
