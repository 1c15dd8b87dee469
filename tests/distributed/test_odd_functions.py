"""What functions do that nobody expects of a rank, and what becomes of their results, messages and processes."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

import vizkit as vk
from tests.distributed.test_live import Watcher, stopped_when
from vizkit.errors import RankFailedError


def forks_and_returns() -> str:
    child = os.fork()
    if child == 0:
        time.sleep(0.05)
        return "the child"
    os.waitpid(child, 0)
    return "the rank"


def forks_and_raises() -> int:
    child = os.fork()
    if child == 0:
        raise ValueError("in the child")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_that_comes_back_from_the_function_is_no_rank():
    """`os.fork` in a rank: the result is the rank's; what the child raises shows in the output, and it exits with 1."""
    assert vk.launch(forks_and_returns, world_size=2).results == ["the rank"] * 2
    run = vk.launch(forks_and_raises, world_size=1)
    assert run.results == [1]
    assert "ValueError: in the child" in run.logs[0]


def closes_its_outputs() -> str:
    sys.stdout.write("no line break")
    os.close(1)
    os.close(2)
    return "here"


def test_a_result_comes_back_from_a_rank_that_has_closed_its_outputs():
    """What was left to print is lost with the output, and does not land in the answer."""
    assert vk.launch(closes_its_outputs, world_size=1).results == ["here"]


def raises_a_group() -> None:
    raise ExceptionGroup("two things", [ValueError("first"), ExceptionGroup("more", [KeyError("second")])])


def test_the_members_of_an_exception_group_are_told():
    """Its own text says only how many there are."""
    with pytest.raises(RankFailedError) as failed:
        vk.launch(raises_a_group, world_size=1)
    assert str(failed.value).startswith(
        "rank 0 raised ExceptionGroup: two things (2 sub-exceptions)\n"
        "  ValueError: first\n"
        "  ExceptionGroup: more (1 sub-exception)\n"
        "    KeyError: 'second'\n"
    )


def gets_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def test_a_rank_that_somebody_else_has_stopped_did_not_call_exit():
    """SIGTERM from outside the launch, as a batch system sends it."""
    with pytest.raises(RankFailedError, match="rank 0 got SIGTERM, though nobody stopped this launch"):
        vk.launch(gets_sigterm, world_size=1)


def fails_when_stopped() -> None:
    try:
        for _ in vk.progress(range(10_000)):
            time.sleep(0.005)
            dist.all_reduce(torch.ones(1))
    finally:
        if dist.get_rank() == 1:
            raise OSError("no room for the checkpoint")


def test_what_goes_wrong_while_a_rank_is_stopped_is_told():
    """The error of a checkpoint that is written in the end must not be lost."""
    _, stopped = stopped_when(lambda state: state.done > 2, fails_when_stopped, world_size=2)
    assert "the ranks were stopped; meanwhile rank 1 raised OSError: no room for the checkpoint; `.run`" in str(stopped)
    assert stopped.run.results == [None, None]


def one_sleeps_in_the_end() -> None:
    for _ in range(5):
        dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def test_a_run_that_was_stopped_in_a_collective_can_be_looked_at():
    """Rank 1 waits for rank 0, which sleeps: shown, replayed and diagnosed is what both have finished."""
    waits = lambda state: any(rank.wait and rank.wait.since_s > 0.3 for rank in state.ranks)  # noqa: E731
    _, stopped = stopped_when(waits, one_sleeps_in_the_end, world_size=2)
    assert stopped.run.record.notes["stopped"] == "step 0"
    assert len(stopped.run.replay().filter(kind="all_reduce")) == 10
    assert "10" not in repr(stopped.run.trace.notes)
    assert len(stopped.run.trace.filter(kind="all_reduce")) == 11
    assert vk.diagnose(stopped.run).world_size == 2
    assert repr(stopped.run).startswith("2 ranks on cpu")


class Interrupted(Watcher):
    """Somebody presses Ctrl-C while the view is closed."""

    def close(self, summary: object) -> None:
        raise KeyboardInterrupt


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors in /proc")
def test_an_interrupt_in_the_very_end_leaves_no_descriptor_open():
    """Whatever one part of the end raises, the others are done."""
    vk.launch(os.getpid, world_size=2)
    before = num_descriptors()
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            vk.launch(os.getpid, world_size=2, live=Interrupted())
    assert num_descriptors() <= before
