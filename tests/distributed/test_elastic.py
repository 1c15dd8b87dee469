"""Elastic restart: ranks die, torchrun starts them again, and the run ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import vizkit as vk
from tests.conftest import REPOSITORY
from tests.distributed.elastic_training import steps_done, train
from tests.processes import MARK, new_mark, processes_with, stop, wait_until_gone
from vizkit.formats.rank_folder import read_run
from vizkit.runtime.hosts import Hosts, hosts_problem

needs_hosts = pytest.mark.skipif(hosts_problem() is not None, reason=f"no hosts of namespaces: {hosts_problem()}")
STEPS, DIES_AFTER, PAUSE_S = 16, 4, 0.15
DOWN_S = 1.0
WITHIN_S = 150
RENDEZVOUS = ("keep_alive_interval=1", "keep_alive_max_attempt=6", "last_call_timeout=1")
ENVIRONMENT = {
    "PYTHONPATH": str(REPOSITORY),
    "OMP_NUM_THREADS": "1",
    # torch 2.13: else the agent of a node that comes back waits for an address that rank 0 does not write again
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def torchrun(folder: Path, *options: str, steps: int = STEPS) -> list[str]:
    """The command line of one node's agent; one rank leaves one file for each start in `folder`/traces."""
    target = ["-m", "vizkit", "run", "tests.distributed.elastic_training:train", "--trace", str(folder / "traces")]
    limits = ["--max-restarts", "3", "--monitor-interval", "0.1"]
    arguments = ["--", str(folder), str(steps), f"pause_s={PAUSE_S}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *limits, *target, *arguments]


def nodes(count: str) -> Sequence[str]:
    meeting_point = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29500", "--rdzv-id", "elastic"]
    return ["--nnodes", count, "--nproc-per-node", "1", *meeting_point, "--rdzv-conf", ",".join(RENDEZVOUS)]


def wait_until(is_so: Callable[[], bool], what: str, agents: Sequence[subprocess.Popen]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline, f"never saw {what}"
        assert any(agent.poll() is None for agent in agents), f"torchrun ended before {what}"
        time.sleep(0.05)


def uninterrupted_loss(folder: Path) -> float:
    folder.mkdir()
    return vk.launch(train, str(folder), STEPS, world_size=2).results[0]["loss"]


@pytest.mark.slow
@needs_hosts
def test_a_killed_node_comes_back_and_the_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Power cut on host1: host0 waits for it, both load the checkpoint, and the loss is that of a run in one piece."""
    environment, command = ENVIRONMENT, torchrun(tmp_path, *nodes("2"))
    with Hosts(2) as hosts:
        agents = [hosts.popen(host, command, env=environment) for host in range(2)]
        wait_until(lambda: steps_done(tmp_path) >= DIES_AFTER, "the step after which host1 dies", agents)
        hosts.kill(1)
        done_before = steps_done(tmp_path)
        time.sleep(DOWN_S)
        hosts.start(1)
        agents[1] = hosts.popen(1, command, env=environment)
        assert [agent.wait(WITHIN_S) for agent in agents] == [0, 0]
    check_interrupted_run(tmp_path, done_before, DOWN_S)


@pytest.mark.slow
@needs_hosts
def test_the_run_goes_on_without_a_node_that_stays_away(tmp_path: Path) -> None:
    """With --nnodes 1:2 the world shrinks to one rank, which has each step's whole batch: the same loss, rounded."""
    command = torchrun(tmp_path, *nodes("1:2"))
    with Hosts(2) as hosts:
        agents = [hosts.popen(host, command, env=ENVIRONMENT) for host in range(2)]
        wait_until(lambda: steps_done(tmp_path) >= DIES_AFTER, "the step after which host1 dies", agents)
        hosts.kill(1)
        assert agents[0].wait(WITHIN_S) == 0
    run = read_run(tmp_path / "traces")
    assert run.attempts[-1].world_size == 1
    assert run.results[0]["first"] >= DIES_AFTER
    assert run.results[0]["loss"] == pytest.approx(uninterrupted_loss(tmp_path / "in one piece"), abs=1e-5)


@pytest.mark.slow
def test_a_killed_rank_is_started_again_by_its_agent(tmp_path: Path) -> None:
    """The same on one machine without namespaces: SIGKILL of rank 1, two ranks under one agent."""
    mark = new_mark()
    options = ["--standalone", "--nproc-per-node", "2"]
    agent = subprocess.Popen(torchrun(tmp_path, *options), env={**os.environ, **ENVIRONMENT, MARK: mark})
    try:
        wait_until(lambda: steps_done(tmp_path) >= DIES_AFTER, "the step after which rank 1 dies", [agent])
        (doomed,) = (process for process in processes_with(mark) if process.environ().get("RANK") == "1")
        doomed.send_signal(signal.SIGKILL)
        done_before = steps_done(tmp_path)
        assert agent.wait(WITHIN_S) == 0
        assert wait_until_gone(lambda: processes_with(mark)) == []
    finally:
        stop(processes_with(mark))
    check_interrupted_run(tmp_path, done_before, 0)


def check_interrupted_run(folder: Path, done_before: int, down_s: float) -> None:
    """Two starts; no step lost, at most one done twice; same loss; and a gap, as long as it was."""
    run = read_run(folder / "traces")
    assert [attempt.number for attempt in run.attempts] == [0, 1]
    second = run.attempts[1].results
    assert {result["loss"] for result in second.values()} == {uninterrupted_loss(folder / "in one piece")}
    began_again = {int(result["first"]) for result in second.values()}
    assert len(began_again) == 1
    assert began_again <= {done_before, done_before + 1}  # rank 0 may have saved once more between two looks
    trace = vk.read_trace(folder / "traces")
    gaps = {span.rank: span for span in trace if span.name == "restart 1"}
    assert (gaps[0].end_ns - gaps[0].start_ns) / 1e9 >= down_s
    assert 1 in gaps or "rank00001-attempt00" in trace.notes["left out"]  # killed before it had saved anything
    assert not [
        span for span in trace if gaps[0].start_ns < span.start_ns < span.end_ns < gaps[0].end_ns and span.rank == 0
    ]
