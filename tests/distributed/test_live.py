"""The live view over real ranks: what it shows while they run, how Stop ends them, and that it never harms a run."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import vizkit as vk
from tests.distributed.live_training import STEP_S, train
from vizkit.errors import RunStoppedError
from vizkit.runtime.live_state import LiveState, LiveSummary

LONG = 2_000
MOST_S = 60


class Watcher:
    """A view that remembers what it was shown, and presses Stop where `until` says so."""

    def __init__(self, until: Callable[[LiveState], object] = lambda state: False) -> None:
        self.until = until
        self.states: list[LiveState] = []
        self.summaries: list[LiveSummary] = []
        self.stop_wanted = False

    def show(self, state: LiveState) -> None:
        self.states.append(state)
        self.stop_wanted = bool(self.until(state)) or state.elapsed_s > MOST_S

    def close(self, summary: LiveSummary) -> None:
        self.summaries.append(summary)


def stopped_when(until: Callable[[LiveState], object], fn: Callable[..., object], *args: object, **options: object):
    view = Watcher(until)
    with pytest.raises(RunStoppedError) as stopped:
        vk.launch(fn, *args, live=view, **options)
    return view, stopped.value


def test_a_slow_rank_is_named_while_it_happens_and_stop_keeps_the_record():
    """Rank 1 takes four times as long: it is named long before the end; after Stop all have done as many steps."""
    view, stopped = stopped_when(lambda state: state.slow, train, LONG, 1, world_size=3)
    (named,) = view.states[-1].slow
    assert named.rank == 1
    assert named.ratio > 2
    assert 0 < view.states[-1].done < LONG
    steps = set(stopped.run.live.steps)
    assert len(steps) == 1
    assert str(stopped).startswith(f"stopped at step {steps.pop()} of {LONG}, after ")
    assert str(stopped).endswith(
        ": Stop was pressed, and the ranks were stopped; `.run` of this error has what was recorded until then"
    )
    assert stopped.run.results == [None] * 3
    assert [episode.worst.rank for episode in stopped.run.live.slow] == [1]
    assert stopped.run.replay(durations={"compute": 1.0}).world_size == 3
    assert view.summaries == [stopped.run.live]


def test_ranks_that_are_alike_are_not_accused():
    """A whole run, with its curve, its bytes by formula, its steps and its memory."""
    view = Watcher()
    run = vk.launch(train, 150, world_size=2, live=view)
    assert run.results == [150, 150]
    assert not any(state.slow for state in view.states)
    assert run.live.steps == (150, 150)
    assert run.live.posted_bytes == (150 * 4000, 150 * 4000)
    assert run.live.curves["loss"] == tuple((n, 1 / n) for n in range(1, 151))
    assert all(own < step for own, step in zip(run.live.own_s, run.live.step_s, strict=True))
    assert all(step > STEP_S for step in run.live.step_s)
    middle = next(state for state in view.states if state.done)
    assert 0 < middle.done < 150
    assert middle.progress == f"step {middle.done} of 150"
    assert middle.bytes_per_s > 0


def hold(rank_of_the_big_one: int) -> None:
    held = torch.zeros(25_000_000 if dist.get_rank() == rank_of_the_big_one else 1)
    held += 1
    time.sleep(1.5)
    del held


def test_memory_is_read_by_rank():
    """Rank 1 holds 100 MB more than rank 0."""
    live = vk.launch(hold, 1, world_size=2, live=Watcher()).live
    small, big = live.peak_memory_bytes
    assert 90e6 < big - small < 130e6
    assert live.steps == (0, 0)


def stay_away() -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1))


def test_a_hang_shows_who_waits_for_whom_before_it_is_an_error():
    """Rank 1 has returned; the others are seen to wait for it, in which operation, and for how long already."""
    view = Watcher()
    with pytest.raises(vk.RanksStuckError):
        vk.launch(stay_away, world_size=3, live=view)
    waits = [rank.wait for rank in view.states[-1].ranks]
    assert waits[1] is None
    assert view.states[-1].ranks[1].state == "returned"
    for wait in (waits[0], waits[2]):
        assert (wait.operation, wait.missing) == ("all_reduce 2", (1,))
        assert wait.since_s > 0.3
        assert str(wait).endswith(" s in all_reduce 2 for rank 1")
    assert len(view.summaries) == 1


def sleep_while_the_other_waits() -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def test_stop_ends_ranks_that_come_to_no_next_step():
    """One sleeps, one waits for it in the backend: both end within seconds, and both hand over their record."""
    _, stopped = stopped_when(lambda state: state.ranks[1].wait, sleep_while_the_other_waits, world_size=2)
    assert [len(list(rank.calls)) for rank in stopped.run.record.ranks] == [1, 2]
    assert stopped.run.live.seconds < MOST_S


def be_deaf() -> None:
    while True:
        try:
            time.sleep(60)
        except SystemExit:
            print("not me")


def test_a_rank_that_will_not_stop_is_killed_and_that_is_said():
    """What it had recorded is lost; nothing is left of it."""
    _, stopped = stopped_when(lambda state: state.ranks[0].state == "running", be_deaf, world_size=1)
    assert stopped.run is None
    assert "rank 0 did not stop when asked and was killed; `.run` of this error is None" in str(stopped)


class Broken(Watcher):
    """A view with a mistake."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def show(self, state: LiveState) -> None:
        if self.where == "show":
            raise TypeError("no such widget")
        if self.where == "stop_wanted":
            del self.stop_wanted

    def close(self, summary: LiveSummary) -> None:
        if self.where == "close":
            raise OSError("the page is gone")


@pytest.mark.parametrize(
    ("where", "trouble"),
    [
        ("show", "TypeError: no such widget"),
        ("close", "OSError: the page is gone"),
        ("stop_wanted", "AttributeError: 'Broken' object has no attribute 'stop_wanted'"),
    ],
)
def test_a_view_that_raises_does_not_harm_the_run(where: str, trouble: str):
    """The run goes on unwatched, and its summary says why."""
    run = vk.launch(train, 100, world_size=2, live=Broken(where))
    assert run.results == [100, 100]
    assert run.live.trouble == trouble


def interrupt(state: LiveState) -> None:
    """Once the ranks are connected: one that still waits for a connection hears nothing and is killed."""
    if state.done > 2:
        raise KeyboardInterrupt


def test_the_kernels_own_stop_works_as_before():
    """An interrupt is an interrupt, whatever is being shown; the view is left with its summary."""
    view = Watcher(interrupt)
    with pytest.raises(KeyboardInterrupt, match="the ranks were stopped"):
        vk.launch(train, LONG, world_size=2, live=view)
    assert len(view.summaries) == 1


def test_a_failure_is_reported_as_ever():
    """The view ends with its summary, and the error is the rank's."""
    view = Watcher()
    with pytest.raises(vk.RankFailedError, match="ZeroDivisionError"):
        vk.launch(lambda: 1 / 0, world_size=1, live=view)
    assert len(view.summaries) == 1


def train_with_ddp(slow: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(64, 64), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(LONG):
        time.sleep(STEP_S * (4 if dist.get_rank() == slow else 1))
        optimizer.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()


def test_ddp_needs_no_word_of_the_program():
    """Steps are the optimizer's; DDP's waits, inside C++, are not taken for work of the ranks that wait."""
    view, stopped = stopped_when(lambda state: state.slow, train_with_ddp, 0, world_size=2)
    assert [found.rank for found in view.states[-1].slow] == [0]
    own_s, step_s = stopped.run.live.own_s, stopped.run.live.step_s
    assert own_s[1] < 0.7 * step_s[1]
    assert own_s[0] > 0.7 * step_s[0]


def test_one_rank_is_a_run_too(capfd: pytest.CaptureFixture[str]):
    """Nobody to compare with; without a notebook or a terminal only the summary is printed."""
    run = vk.launch(train, 20, world_size=1, live=True)
    out, err = capfd.readouterr()
    assert out == f"{run.live}\n"
    assert out.startswith("step 20 of 20 in ")
    assert err == ""
    assert run.live.slow == ()


def test_without_live_nothing_is_watched():
    """`vk.log` and `vk.progress` do nothing then."""
    assert vk.launch(train, 2, world_size=2).live is None


@pytest.mark.parametrize("live", ["yes", 1, None])
def test_odd_values_start_no_rank(live: object):
    """Refused before anything runs."""
    with pytest.raises(vk.InvalidInputError, match=r"must be True or False, or a view of your own; use live=True"):
        vk.launch(train, 2, world_size=2, live=live)


def test_own_times_add_up():
    """Own work and waiting make the step: one that works four times as long leaves the other mostly idle."""
    live = vk.launch(train, 60, 1, world_size=2, live=Watcher()).live
    waiting = np.array(live.step_s) - np.array(live.own_s)
    assert waiting[0] > 2 * STEP_S > waiting[1]
