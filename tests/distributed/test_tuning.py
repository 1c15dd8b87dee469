"""Collectives and hooks that send less, on real ranks: exact where they promise it, within bounds elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import vizkit as vk
from vizkit.collectives.exchanges import Moved, Nodes, hierarchical_all_reduce, quantised_all_gather
from vizkit.collectives.exchanges import quantised_all_reduce as quantised_all_reduce_bytes
from vizkit.links import Links
from vizkit.runtime import tuning as vt
from vizkit.runtime.run import Run

LENGTHS = (1, 2, 3, 5, 8, 96, 1001)
BLOCKS = (4, 256)


def numbers(length: int, rank: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(length, generator=torch.Generator().manual_seed(100 * length + rank))


def moved(run: Run, ranks_per_node: int) -> Moved:
    wire = vk.metrics.traffic(run.trace).wire_bytes
    return Moved(int(wire.sum()), Links(vk.Link(), vk.Link(), ranks_per_node).crossing_bytes(wire))


def hierarchical_sums(ranks_per_node: int) -> dict[str, Any]:
    """Whole numbers, whose sum has no rounding, and others, whose sum depends on the order."""
    levels = vt.two_levels(ranks_per_node)
    exact, rounded = {}, {}
    for length in LENGTHS:
        exact[str(length)] = numbers(length, dist.get_rank(), 100).round()
        rounded[str(length)] = numbers(length, dist.get_rank())
        for x in (exact, rounded):
            vt.hierarchical_all_reduce(x[str(length)], levels)
    return {"exact": exact, "rounded": rounded}


@pytest.mark.parametrize("shape", [(1, 1), (4, 2), (4, 4), (6, 3)], ids=str)
def test_a_hierarchical_all_reduce_is_the_sum_and_moves_the_formulas_bytes(shape: tuple[int, int]) -> None:
    """On every rank and for every length: equal to the last bit where sums are exact, and to fp32's rounding else."""
    world_size, ranks_per_node = shape
    run = vk.launch(hierarchical_sums, ranks_per_node, world_size=world_size, device="cpu")
    for length in LENGTHS:
        exact = sum(numbers(length, rank, 100).round() for rank in range(world_size))
        rounded = sum(numbers(length, rank) for rank in range(world_size))
        for result in run.results:
            assert torch.equal(result["exact"][str(length)], exact)
            torch.testing.assert_close(result["rounded"][str(length)], rounded)
    expected = sum((2 * hierarchical_all_reduce(Nodes(*shape), n) for n in LENGTHS), Moved())
    # chunks of a length that the ranks do not divide differ by a byte a call
    assert moved(run, ranks_per_node).total_bytes == round(expected.total_bytes)
    assert abs(moved(run, ranks_per_node).crossing_bytes - expected.crossing_bytes) <= 2 * len(LENGTHS) * world_size


def quantised() -> list[list[dict[str, torch.Tensor]]]:
    results = []
    for block in BLOCKS:
        results.append([])
        for length in LENGTHS:
            mine = numbers(length, dist.get_rank())
            summed = mine.clone()
            vt.quantised_all_reduce(summed, block=block)
            results[-1].append({"sum": summed, "parts": vt.quantised_all_gather(mine, block=block)})
    return results


@pytest.mark.parametrize("world_size", [1, 3])
def test_quantised_collectives_are_within_half_scales_and_move_the_formulas_bytes(world_size: int) -> None:
    """A sum is off by half of each rank's scale there and half of the sum's; all ranks hold the same numbers."""
    run = vk.launch(quantised, world_size=world_size, device="cpu")
    expected = Moved()
    nodes = Nodes(world_size, 1)
    for i, block in enumerate(BLOCKS):
        for j, length in enumerate(LENGTHS):
            parts = [numbers(length, rank) for rank in range(world_size)]
            share = math.ceil(length / world_size)
            half = sum(half_scales(part, share, block) for part in parts)
            truth = sum(parts)
            for rank in run.results:
                result = rank[i][j]
                torch.testing.assert_close(result, run.results[0][i][j], rtol=0, atol=0)
                of_sum = (truth.abs().max() + half.max()) / 127 / 2
                assert ((result["sum"] - truth).abs() <= (half + of_sum) * 1.0001).all()
                alone = torch.cat([half_scales(part, length, block) for part in parts])
                assert ((result["parts"] - torch.cat(parts)).abs() <= alone * 1.0001).all()
            expected += quantised_all_reduce_bytes(nodes, length, block) + quantised_all_gather(nodes, length, block)
    assert moved(run, 1).total_bytes == expected.total_bytes


def half_scales(part: torch.Tensor, share: int, block: int) -> torch.Tensor:
    """Half the scale that each number's block has where every `share` of them is quantised alone."""
    halves = [vt.scales(vt.quantise(x, block)).repeat_interleave(block)[: len(x)] / 2 for x in part.split(share)]
    return torch.cat(halves)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 7))


def batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(8, 40, generator=drawn), torch.randn(8, 7, generator=drawn)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def gradients(tuning: vt.Tuning, ranks_per_node: int, passes: int = 1) -> list[torch.Tensor | None]:
    """Those of the last of `passes` backwards, of the same batches each time."""
    model = DistributedDataParallel(network(), bucket_cap_mb=tuning.bucket_mb)
    vt.register(model, tuning, vt.two_levels(ranks_per_node))
    batches = [batch(number, dist.get_rank()) for number in range(tuning.accumulate)]
    for _ in range(passes):
        model.zero_grad()
        vt.accumulate(model, batches, loss_of, tuning.forward_in_no_sync)
    return [p.grad for p in model.parameters()]


def gradients_of_one_process(world_size: int, num_batches: int = 1) -> list[torch.Tensor | None]:
    model = network()
    for rank in range(world_size):
        for number in range(num_batches):
            (loss_of(model, batch(number, rank)) / world_size / num_batches).backward()
    return [p.grad for p in model.parameters()]


EXACT = {
    "plain": vt.Tuning("plain"),
    "small buckets": vt.Tuning("small buckets", bucket_mb=0.001),
    "hierarchical": vt.Tuning("hierarchical", "hierarchical all-reduce"),
    "hierarchical, small buckets": vt.Tuning("both", "hierarchical all-reduce", bucket_mb=0.001),
    "PowerSGD of full rank": vt.Tuning("full rank", "PowerSGD", rank=24),
    "accumulated": vt.Tuning("accumulated", accumulate=3),
    "forward outside no_sync": vt.Tuning("wrong", accumulate=3, forward_in_no_sync=False),
}


def all_gradients() -> dict[str, list[torch.Tensor | None]]:
    return {name: gradients(tuning, 2, passes=3) for name, tuning in EXACT.items()}


def test_hooks_that_lose_nothing_give_one_process_s_gradients() -> None:
    """Also over several batches, where one process takes them all at once, and also by the wrong `no_sync`."""
    expected = {name: gradients_of_one_process(4, tuning.accumulate) for name, tuning in EXACT.items()}
    assert vk.parity(vk.launch(all_gradients, world_size=4, device="cpu"), expected)


@pytest.mark.parametrize("forward_in_no_sync, exchanges", [(True, 1), (False, 3)])
def test_no_sync_exchanges_once_if_the_forward_is_inside(forward_in_no_sync: bool, exchanges: int) -> None:
    """Three batches: one all-reduce of the gradients, or three."""
    tuning = vt.Tuning("accumulated", accumulate=3, forward_in_no_sync=forward_in_no_sync)
    run = vk.launch(gradients, tuning, 1, world_size=2, device="cpu")
    gradient_bytes = sum(p.nbytes for p in network().parameters())
    all_reduces = vk.metrics.traffic(run.trace).by_kind[vk.SpanKind.ALL_REDUCE]
    assert (all_reduces.operations, all_reduces.payload_bytes) == (exchanges, exchanges * gradient_bytes)


BOUNDS = {
    "all-reduce in fp16": lambda largest: 4 * 2**-11 * largest + 4 * 2**-24,
    "int8 all-to-all and all-gather": lambda largest: 2 * largest / 127,
}
"""By how much an average over 4 ranks may be off, by the largest gradient of a rank: 4 roundings of fp16; half a scale
for each rank, averaged, and half a scale of the sum."""


def rounded_gradients() -> dict[str, list[torch.Tensor | None]]:
    return {exchange: gradients(vt.Tuning(exchange, exchange), 2) for exchange in BOUNDS}


def test_hooks_that_round_keep_their_bound() -> None:
    """And every rank holds the same gradients."""
    truth = gradients_of_one_process(4)
    largest = max(
        float(p.grad.abs().max())
        for rank in range(4)
        for model in [network()]
        if loss_of(model, batch(0, rank)).backward() is None
        for p in model.parameters()
    )
    results = vk.launch(rounded_gradients, world_size=4, device="cpu").results
    for exchange, bound in BOUNDS.items():
        error = max(float((a - b).abs().max()) for a, b in zip(results[0][exchange], truth, strict=True))
        assert 0 < error <= bound(largest)
        assert all(torch.equal(a, b) for r in results for a, b in zip(r[exchange], results[0][exchange], strict=True))


def power_sgd_in_two_buckets() -> None:
    gradients(vt.Tuning("low rank", "PowerSGD", bucket_mb=0.001), 1)


def test_power_sgd_in_several_buckets_is_refused() -> None:
    """On gloo its low-rank all-reduces of two buckets are posted by two threads, in any order."""
    with pytest.raises(vk.RankFailedError) as failure:
        vk.launch(power_sgd_in_two_buckets, world_size=2, device="cpu")
    assert (
        "bucket_mb=0.001: cuts 4,636 bytes into buckets, whose low-rank all-reduces overtake each other on gloo; "
        "use bucket_mb=1, or more"
    ) in str(failure.value)


def steps(tuning: vt.Tuning, num_steps: int) -> list[list[torch.Tensor]]:
    """All parameters of this rank after each step, of a batch of its own each time."""
    trainer = vt.Trainer(network(), tuning, vt.two_levels(2), loss_of)
    history = []
    for number in range(num_steps):
        trainer.step([batch(number, dist.get_rank())])
        history.append([p.detach().clone() for p in trainer.model.parameters()])
    return history


def alone(num_steps: int, members: list[int], start: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """One process's parameters after steps with the mean gradient of these ranks' batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(num_steps):
        optimizer.zero_grad()
        for rank in members:
            (loss_of(model, batch(number, rank)) / len(members)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "exchange, teams", [("nothing", [[0], [1], [2], [3]]), ("all-reduce inside nodes", [[0, 1], [2, 3]])]
)
def test_local_sgd_goes_apart_and_meets_at_each_period(exchange: str, teams: list[list[int]]) -> None:
    """After 2 of 3 steps a rank, or its node, is where it would be alone; after 3 all are where the mean is."""
    history = vk.launch(steps, vt.Tuning("local", exchange, period=3), 3, world_size=4, device="cpu").results
    for team in teams:
        for rank in team:
            torch.testing.assert_close(history[rank][1], alone(2, team))
    mean = [sum(parts) / len(teams) for parts in zip(*(alone(3, team) for team in teams), strict=True)]
    for rank in range(4):
        torch.testing.assert_close(history[rank][2], mean)


def test_sharded_sgd_is_sgd_within_half_a_scale() -> None:
    """After three steps: what rounding takes away stays in each rank's own part, and does not add up."""
    sharded = vt.Tuning("sharded", "reduce-scatter, int8 all-gather", block=32)
    history = vk.launch(steps, sharded, 3, world_size=4, device="cpu").results
    largest = max(float(p.abs().max()) for p in alone(3, [0, 1, 2, 3]))
    for rank in range(4):
        assert all(torch.equal(a, b) for a, b in zip(history[rank][2], history[0][2], strict=True))
    for a, b in zip(history[0][2], alone(3, [0, 1, 2, 3]), strict=True):
        assert 0 < (a - b).abs().max() <= largest / 127


def low_precision(exchange: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A model that starts differently on each rank, in bfloat16."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(5, 3).bfloat16()
    trainer = vt.Trainer(model, vt.Tuning("x", exchange, learning_rate=1e-4), vt.two_levels(1), mean_of)
    start = [p.detach().float() for p in model.parameters()]
    for _ in range(100):
        trainer.step([(torch.ones(2, 5).bfloat16(), torch.zeros(2))])
    return start, [p.detach().float() for p in model.parameters()]


def mean_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(batch[0]).mean()


def test_sharded_sgd_starts_with_rank_0_and_adds_up_small_updates_in_fp32() -> None:
    """100 updates of a bias by a 3,000th each: in bfloat16, with 8 bits of mantissa, most would be lost."""
    (start, end), other = vk.launch(
        low_precision, "reduce-scatter, int8 all-gather", world_size=2, device="cpu"
    ).results
    torch.manual_seed(0)
    for found, expected in zip(start, nn.Linear(5, 3).bfloat16().parameters(), strict=True):
        assert torch.equal(found, expected.float())
    assert vk.parity([[start, end], list(other)], [start, end])
    lost = sum(1 - 0.9**n for n in range(1, 101))  # momentum's sum of 100 equal gradients is ten times that
    moved_by = 1e-4 * 10 * lost / 3
    assert (start[1] - end[1]).mean().item() == pytest.approx(moved_by, abs=0.004)


def odd_parameters(shape: tuple[int, ...]) -> None:
    model = nn.Linear(4, 2)
    model.scale = nn.Parameter(torch.ones(shape))
    replica = DistributedDataParallel(model)
    vt.register(replica, vt.Tuning("low rank", "PowerSGD"), vt.two_levels(1))


@pytest.mark.parametrize("shape", [(), (0,)])
def test_power_sgd_of_what_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    """Torch's hook raises an IndexError in the third step."""
    with pytest.raises(vk.RankFailedError) as failure:
        vk.launch(odd_parameters, shape, world_size=2, device="cpu")
    rule = f"scale='parameter of shape {shape}': is no matrix to PowerSGD; give it shape (1,) or more"
    assert rule in str(failure.value)


def wrong_steps() -> list[str]:
    refused = []
    trainer = vt.Trainer(network(), vt.Tuning("threefold", accumulate=3), vt.two_levels(1), loss_of)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    for call in (
        lambda: trainer.step([batch(number, 0) for number in range(6)]),
        lambda: vt.accumulate(trainer.model, [], loss_of),
        lambda: vt.ShardedSGD(frozen, 0.1),
    ):
        with pytest.raises(vk.InvalidInputError) as refusal:
            call()
        refused.append(str(refusal.value))
    return refused


def test_steps_of_other_batches_are_refused() -> None:
    """Six batches in a step would be another tuning, and without any a rank would leave the others waiting."""
    assert vk.launch(wrong_steps, world_size=1, device="cpu").results == [
        [
            "number of batches=6: a step of 'threefold' takes accumulate=3; give 3",
            "number of batches=0: nothing would be exchanged; give 1 or more",
            "model='Linear': has nothing to train; unfreeze a layer",
        ]
    ]


def sums_of_leaves() -> list[torch.Tensor]:
    leaves = [nn.Parameter(torch.arange(3.0)), nn.Parameter(torch.arange(3.0))]
    vt.hierarchical_all_reduce(leaves[0], vt.two_levels(1))
    vt.quantised_all_reduce(leaves[1], block=1)
    return [leaf.detach() for leaf in leaves]


def test_parameters_are_summed_in_place() -> None:
    """As `dist.all_reduce` does, outside autograd."""
    for leaves in vk.launch(sums_of_leaves, world_size=2, device="cpu").results:
        for leaf in leaves:
            torch.testing.assert_close(leaf, 2 * torch.arange(3.0))


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: vt.Tuning("x", "fp16"),
            "exchange='fp16': is no way to exchange gradients; use one of all-reduce, all-reduce in fp16, PowerSGD, "
            "hierarchical all-reduce, int8 all-to-all and all-gather, reduce-scatter, int8 all-gather, nothing, "
            "all-reduce inside nodes",
        ),
        (
            lambda: vt.Tuning("x", "nothing"),
            "period=1: with the exchange 'nothing': parameters are averaged, every 2 steps or more, where gradients "
            "are not, and only there; use period=4 with 'nothing' or 'all-reduce inside nodes', and period=1 with any "
            "other",
        ),
        (lambda: vt.Tuning("x", accumulate=0), "accumulate=0: must be a whole number, at least 1; use accumulate=1"),
        (lambda: vt.Tuning("x", bucket_mb=0), "bucket_mb=0: must be positive and finite; use bucket_mb=0.1"),
        (
            lambda: vt.Tuning("x", error_feedback=1),
            "error_feedback=1: must be True or False; use error_feedback=True",
        ),
    ],
)
def test_a_tuning_that_makes_no_sense_is_refused(call, message: str) -> None:
    with pytest.raises(vk.InvalidInputError) as refusal:
        call()
    assert str(refusal.value) == message
