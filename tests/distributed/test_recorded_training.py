"""Strategies of PyTorch on real ranks, as the recorder sees them and as replay runs them again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vizkit as vk
from tests.distributed.readings import kinds, table
from vizkit.record import Wait
from vizkit.trace import COMMUNICATION_KINDS

FLOAT_BYTES = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def train_ddp(steps: int) -> int:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Net(), bucket_cap_mb=64 * 64 * FLOAT_BYTES / 2**20)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        with vk.span("forward", kind="F", microbatch=step):
            loss = model(torch.randn(8, 64)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(p.numel() for p in model.parameters())


def test_ddp_sends_its_buckets_during_backward() -> None:
    """Buckets add up to the gradients' bytes in each step, start inside backward, and are waited for at its end."""
    steps = 3
    run = vk.launch(train_ddp, steps, world_size=2)
    reductions = [call for call in run.record.ranks[0].calls if call.kind.value == "all_reduce"]
    assert sum(call.payload_bytes for call in reductions) == steps * run.results[0] * FLOAT_BYTES
    implicit = [e for e in run.record.ranks[0].events if isinstance(e, Wait) and e.implicit]
    assert [len(wait.calls) for wait in implicit] == [1, 4, 4]  # DDP learns the order of its buckets in the first step
    assert kinds(run)[:3] == ["F", "B", "optimizer"]

    trace = run.replay(link=None, durations={"F": 1.0, "B": 2.0})
    backward = list(trace.filter(rank=0, kind="B"))[-1]
    starts = [s.start_ns for s in trace.filter(rank=0, kind="all_reduce")][-4:]
    assert starts == [backward.start_ns + quarter * 500_000_000 for quarter in (1, 2, 3, 4)]
    assert backward.duration_ns == 2_000_000_000

    slow = vk.Link(latency_s=0.1, bandwidth_bytes_per_s=1e9)
    overlapped = run.replay(link=slow, durations={"F": 1.0, "B": 2.0})
    first = list(overlapped.filter(rank=0, kind="all_reduce"))[-4]
    backward = list(overlapped.filter(rank=0, kind="B"))[-1]
    assert backward.start_ns < first.start_ns < first.end_ns < backward.end_ns


def test_replays_of_two_runs_with_given_durations_are_the_same() -> None:
    """Nothing of what the machine did remains: spans are equal from run to run."""
    first, second = (
        list(vk.launch(train_ddp, 2, world_size=2).replay(durations={"F": 1.0, "B": 2.0})) for _ in range(2)
    )
    assert first == second


def train_fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(torch.randn(8, 64)).sum().backward()


def test_fsdp2_gathers_and_scatters() -> None:
    """One all-gather a layer in forward and one in backward, one reduce-scatter a layer, of that layer's bytes."""
    run = vk.launch(train_fsdp, world_size=2)
    counts = dict.fromkeys(("all_gather", "reduce_scatter"), 0)
    for op, _, payload, times in table(run):
        assert payload == 64 * 64 * FLOAT_BYTES
        counts[op] += times
    assert counts["reduce_scatter"] == 4
    assert 4 <= counts["all_gather"] <= 8
    assert len(run.replay()) > 0


def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with vk.span("forward", kind="F"):
        loss = model(torch.ones(4, 16)).sum()
        loss = loss.item() if hasattr(loss, "item") else loss


def test_functional_collectives_of_dtensor_and_their_waits() -> None:
    """A row-wise layer all-reduces its output through `_c10d_functional`, and the wait reaches the record."""
    run = vk.launch(tensor_parallel, world_size=2)
    calls = list(run.record.ranks[0].calls)
    (reduction,) = [call for call in calls if call.kind.value == "all_reduce"]
    assert reduction.payload_bytes == 4 * 16 * FLOAT_BYTES
    waits = [event for event in run.record.ranks[0].events if isinstance(event, Wait)]
    assert any(reduction.call in wait.calls for wait in waits)


def pipeline(schedule_name: str, num_microbatches: int) -> None:
    from torch.distributed import pipelining

    rank, world_size = dist.get_rank(), dist.get_world_size()
    stage = pipelining.PipelineStage(nn.Linear(8, 8), rank, world_size, torch.device("cpu"))
    schedule = getattr(pipelining, schedule_name)(stage, num_microbatches, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(4 * num_microbatches, 8)
    for _ in range(2):
        if rank == 0:
            schedule.step(batch)
        elif rank == world_size - 1:
            schedule.step(target=batch)
        else:
            schedule.step()


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipeline_schedules_replay(schedule: str) -> None:
    """Torch's schedules send each microbatch's activations down and gradients up, and each backward is labelled.

    Before its first step torch runs one more backward on each stage but the first, to learn the shapes of gradients.
    """
    stages, microbatches = 3, 4
    run = vk.launch(pipeline, schedule, microbatches, world_size=stages)
    tensor_bytes = 4 * 8 * FLOAT_BYTES
    sent = {tuple(edge): times for op, edge, payload, times in table(run) if (op, payload) == ("send", tensor_bytes)}
    assert sent == {(0, 1): 8, (1, 0): 8, (1, 2): 8, (2, 1): 8}
    trace = run.replay(link=None, durations={"B": 1.0})
    for rank in range(stages):
        backwards = [span for span in trace.filter(rank=rank, kind="B") if span.duration_ns]
        assert sum(span.duration_ns for span in backwards) == ((rank > 0) + 2 * microbatches) * 1_000_000_000


def test_every_byte_of_the_record_is_in_both_traces() -> None:
    """Neither clock loses or invents a communication."""
    run = vk.launch(train_ddp, 2, world_size=3)
    for trace in (run.trace, run.replay(), run.replay(durations={"F": 1.0})):
        assert int(trace.payload_bytes.sum()) == run.record.payload_bytes
        assert int(trace.is_kind(*COMMUNICATION_KINDS).sum()) == sum(1 for r in run.record.ranks for _ in r.calls)
