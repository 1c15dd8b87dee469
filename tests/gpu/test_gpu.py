"""Ranks on GPUs: NCCL with one each, gloo where they share, times from the device and not from the host."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import vizkit as vk
from tests.distributed.pipelines import assert_equals_one_process, run_steps

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "02_data_parallel.ipynb"
SIZE = 4096


def add_up() -> tuple[float, str, str]:
    x = torch.full((1_000_000,), dist.get_rank() + 1.0, device=vk.device())
    dist.all_reduce(x)
    return x[0].item(), str(x.device), dist.get_backend()


def test_one_gpu_a_rank_speaks_nccl() -> None:
    """With a GPU for each rank, "auto" means NCCL, the summary says so, and every byte is recorded."""
    count = torch.cuda.device_count()
    run = vk.launch(add_up, world_size=count)
    total = count * (count + 1) / 2
    assert run.results == [(total, f"cuda:{rank}", "nccl") for rank in range(count)]
    assert (run.backend, run.device) == ("nccl", "cuda")
    assert list(run.collectives["op"]) == ["all_reduce"]
    assert "backend nccl" in repr(run)


def test_ranks_that_share_a_gpu_speak_gloo() -> None:
    """With fewer GPUs than ranks, "cuda" means gloo with CUDA tensors, which NCCL refuses."""
    size = torch.cuda.device_count() + 1
    run = vk.launch(add_up, world_size=size, device="cuda")
    assert {result[2] for result in run.results} == {"gloo"}
    assert {result[0] for result in run.results} == {size * (size + 1) / 2}


def test_cpu_hides_the_gpus() -> None:
    """With "cpu", a rank sees no GPU."""
    run = vk.launch(lambda: (torch.cuda.is_available(), str(vk.device())), world_size=1, device="cpu")
    assert run.results == [(False, "cpu")]


def multiply() -> tuple[float, float]:
    """Milliseconds that the device and the host took for products that the host only queues."""
    a = torch.randn(SIZE, SIZE, device=vk.device())
    a @ a
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started = time.perf_counter()
    with vk.span("products", kind="F"):
        begin.record()
        for _ in range(20):
            a @ a
        end.record()
    host_ms = (time.perf_counter() - started) * 1e3
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host_ms


def test_span_times_are_the_devices() -> None:
    """A span lasts as long as the GPU worked, not as long as the host took to queue the work."""
    run = vk.launch(multiply, world_size=1)
    device_ms, host_ms = run.results[0]
    assert host_ms < device_ms / 2, "the host only queues"
    for trace in (run.trace, run.replay()):
        span_ms = sum(span.duration_ns for span in trace.filter(kind="F")) / 1e6
        assert span_ms == pytest.approx(device_ms, rel=0.2)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_a_pipeline_with_a_stage_on_each_gpu(name: str) -> None:
    """Loss, gradients and output equal one process, over NCCL where each rank has a GPU and over gloo where not."""
    schedule = vk.schedule(name, num_ranks=max(torch.cuda.device_count(), 2), num_microbatches=4)
    run = vk.launch(run_steps, schedule, world_size=schedule.num_ranks, device="cuda")
    assert_equals_one_process(run, schedule)
    unit = vk.Durations(F=1, I=1, W=1)
    assert vk.as_grid(run.replay(link=None, durations=unit)) == vk.as_grid(vk.simulate(schedule, unit))


def test_results_come_back_on_the_cpu() -> None:
    """A CUDA tensor that a rank returns arrives as a CPU tensor."""
    result = vk.launch(lambda: torch.ones(3, device=vk.device()), world_size=1).results[0]
    assert result.device.type == "cpu"
    assert result.tolist() == [1, 1, 1]


def test_the_notebook_runs_here() -> None:
    """02 executes from top to bottom on this machine's GPUs."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
