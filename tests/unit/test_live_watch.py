"""What the notebook makes of what the ranks tell, without ranks: their part is written by the test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from vizkit.runtime import live_record
from vizkit.runtime.board import Board, Operation, State, create_board
from vizkit.runtime.live_record import LiveRecord
from vizkit.runtime.live_state import LiveState, LiveSummary
from vizkit.runtime.live_watch import LiveWatch, watch_of
from vizkit.runtime.transport import anonymous_file
from vizkit.trace import SpanKind

RANKS = 3
MS = 1_000_000
NO_PROCESS = [None] * RANKS


class Seen:
    """A view that remembers."""

    stop_wanted = False

    def __init__(self) -> None:
        self.states: list[LiveState] = []

    def show(self, state: LiveState) -> None:
        self.states.append(state)

    def close(self, summary: LiveSummary) -> None:
        pass


class Ranks:
    """Three ranks, a view, and the watch between them."""

    def __init__(self, file: int) -> None:
        create_board(RANKS, file)
        self.view = Seen()
        self.watch: LiveWatch = watch_of(self.view, Board(file, RANKS), file, RANKS)
        self.boards = [Board(file, RANKS, rank) for rank in range(RANKS)]
        self.records = [LiveRecord(file, RANKS, rank) for rank in range(RANKS)]
        for board in self.boards:
            board.enter_state(State.RUNNING)

    def state(self) -> LiveState:
        self.watch.refresh(NO_PROCESS)
        return self.view.states[-1]

    def enter(self, rank: int, number: int, kind: SpanKind = SpanKind.ALL_REDUCE, peer: int = -1, key: str = "all"):
        members = tuple(range(RANKS)) if kind is SpanKind.ALL_REDUCE else (rank, peer)
        slot = self.boards[rank].post(Operation(kind, key, number, members, "float32", (10,), 10, peer))
        self.boards[rank].waiting(slot)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    file = anonymous_file("board")
    yield Ranks(file)
    os.close(file)


@pytest.fixture
def steps(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    """Lets all ranks do steps of 10 ms, of which the named rank works all and the others a third."""
    now = [0]
    monkeypatch.setattr(live_record, "monotonic_ns", lambda: now[0])

    def go(count: int, slow: int | None = None) -> None:
        for _ in range(count):
            now[0] += 10 * MS
            for rank, record in enumerate(ranks.records):
                record.blocked(0 if rank == slow else 6 * MS)
                record.step()

    return go


def test_a_rank_that_is_slow_twice_has_two_episodes(ranks: Ranks, steps):
    """Named while it is slow, not between; the summary says when, in steps."""
    named = []
    for slow in (1, 1, None, None, None, 1, 1):
        steps(24, slow)
        named.append([found.rank for found in ranks.state().slow])
    assert named == [[1], [1], [], [], [], [1], [1]]
    first, second = ranks.watch.close().slow
    assert (first.first_step, first.last_step, first.worst.rank) == (2, 48, 1)
    assert 96 < second.first_step <= 121
    assert second.last_step == 168
    assert first.worst.ratio == pytest.approx(2.5)


def test_a_rank_that_is_behind_is_compared_on_common_steps(ranks: Ranks, steps):
    """The fast ones have done more; step 17 of one is compared with step 17 of the others."""
    steps(30, 2)
    for _ in range(20):
        ranks.records[0].step()
    (slow,) = ranks.state().slow
    assert slow.rank == 2
    assert ranks.state().done == 30


@pytest.mark.parametrize("number", [0, 255, 256, 1000])
def test_who_waits_for_whom_in_a_collective(ranks: Ranks, number: int):
    """Ranks 0 and 2 are in it, rank 1 is not; the board's ring has come round or not."""
    for rank in (0, 1, 2):
        for earlier in range(max(0, number - 3), number):
            ranks.enter(rank, earlier)
    ranks.boards[1].resumed()
    ranks.enter(0, number)
    ranks.enter(2, number)
    waits = [rank.wait for rank in ranks.state().ranks]
    assert [(wait.operation, wait.missing) for wait in (waits[0], waits[2])] == [(f"all_reduce {number + 1}", (1,))] * 2
    assert waits[1] is None


def test_a_rank_that_is_ahead_in_another_group_is_not_missing(ranks: Ranks):
    """Where later operations have overwritten the slot that is compared, all that the rank has noted is looked at."""
    ranks.enter(0, 7)
    for key in map(str, range(200)):  # of 200 other groups some fall on the slot of the first
        for number in (0, 1, 2):
            ranks.boards[1].post(Operation(SpanKind.ALL_REDUCE, key, number, (0, 1, 2)))
    ranks.enter(1, 8)
    assert ranks.state().ranks[0].wait.missing == (2,)


def test_who_waits_for_whom_in_a_message(ranks: Ranks):
    """A receive waits for its sender alone."""
    ranks.enter(0, 0, SpanKind.RECEIVE, peer=2, key="2>0")
    assert str(ranks.state().ranks[0].wait).startswith("waits in receive 1 for rank 2")


def test_a_wait_inside_cpp_shows_in_a_backward_only(ranks: Ranks):
    """DDP's wait is noted nowhere: a backward that uses no processor and has something open is one; a sleep is not."""
    ranks.enter(0, 0)
    ranks.boards[0].resumed()
    ranks.state()
    assert ranks.state().ranks[0].doing == "running"
    ranks.boards[0].in_backward(True)
    assert ranks.state().ranks[0].wait.missing == (1, 2)


def test_a_curve_is_that_of_the_lowest_rank_that_logs_it(ranks: Ranks):
    """The last stage of a pipeline alone has a loss; where all have one, it is rank 0's."""
    ranks.records[2].log({"loss": 3.0})
    assert [(curve.rank, curve.points) for curve in ranks.state().curves] == [(2, ((1, 3.0),))]
    ranks.records[0].log({"loss": 1.0})
    ranks.records[2].log({"loss": 2.0})
    assert [(curve.rank, curve.points) for curve in ranks.state().curves] == [(0, ((1, 1.0),))]


def test_bytes_a_second_are_those_since_the_last_look(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    """1 MB by each of three ranks within half a second: 6 MB/s; then nothing."""
    from vizkit.runtime import live_watch

    now = [live_watch.time.monotonic()]
    monkeypatch.setattr(live_watch.time, "monotonic", lambda: now[0])
    ranks.state()
    now[0] += 0.5
    for record in ranks.records:
        record.posted(1_000_000)
    assert ranks.state().bytes_per_s == pytest.approx(6e6)
    now[0] += 0.5
    assert ranks.state().bytes_per_s == 0


def test_ranks_stop_at_a_step_that_none_has_come_to(ranks: Ranks, steps):
    """Ten steps ahead where a step takes 10 ms, so that all learn of it in time; the wait for it is bounded."""
    steps(20)
    patience_s = ranks.watch.ask_to_stop()
    assert 0.5 < patience_s <= 5
    steps(10)
    assert not any(map(ranks.watch.has_stopped, range(RANKS)))
    with pytest.raises(SystemExit):
        steps(1)
    assert ranks.watch.has_stopped(0)
    assert ranks.state().is_stopping
