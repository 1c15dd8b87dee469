"""From what ranks have noted on the board to who can never go on, and who is at fault."""

from __future__ import annotations

import os

import pytest

from vizkit.errors import CollectiveMismatchError
from vizkit.runtime.board import Board, Operation, State, create_board
from vizkit.runtime.diagnosis import (
    at_fault,
    cycle,
    doomed,
    failure_text,
    is_consequence,
    is_timeout,
    misfit,
    own_failures_text,
    stuck_text,
)
from vizkit.runtime.transport import anonymous_file
from vizkit.runtime.worker import ASKED_TO_STOP, Failure, Raised
from vizkit.trace import SpanKind

ALL = (0, 1, 2)


class Ranks:
    """A board with a handle for each rank, to act out what ranks do."""

    def __init__(self, size: int = 3) -> None:
        descriptor = anonymous_file("test")
        create_board(size, descriptor)
        self.notebook = Board(descriptor, size)
        self.boards = [Board(descriptor, size, rank) for rank in range(size)]
        os.close(descriptor)
        for board in self.boards:
            board.enter_state(State.RUNNING)

    def waits(self, rank: int, operation: Operation) -> None:
        self.boards[rank].waiting(self.boards[rank].post(operation))

    def stuck(self, idle: tuple[int, ...] = (), gone: tuple[int, ...] = ()):
        return doomed(self.notebook.snapshots(), idle, gone)


def all_reduce(number: int, members: tuple[int, ...] = ALL, numel: int = 4, group: str = "world") -> Operation:
    return Operation(SpanKind.ALL_REDUCE, group, number - 1, members, "float32", (numel,), numel)


def send(source: int, destination: int) -> Operation:
    key = f"world:{source}>{destination}:0"
    return Operation(SpanKind.SEND, key, 0, (source, destination), "float32", (4,), 4, peer=destination)


def receive(source: int, destination: int) -> Operation:
    key = f"world:{source}>{destination}:0"
    return Operation(SpanKind.RECEIVE, key, 0, (destination, source), "float32", (4,), 4, peer=source)


def test_waiting_for_a_rank_that_still_works_is_no_hang() -> None:
    """Ranks 0 and 1 wait for rank 2, which computes."""
    ranks = Ranks()
    ranks.waits(0, all_reduce(1))
    ranks.waits(1, all_reduce(1))
    assert ranks.stuck() == []
    assert ranks.stuck(idle=ALL) == []


def test_an_operation_that_all_have_entered_is_no_hang() -> None:
    """It only needs time."""
    ranks = Ranks()
    for rank in ALL:
        ranks.waits(rank, all_reduce(1))
    assert ranks.stuck() == []


def test_waiting_for_a_rank_that_is_gone_is_a_hang() -> None:
    """Rank 2 has returned after one all-reduce, the others wait in the second."""
    ranks = Ranks()
    for rank in ALL:
        ranks.boards[rank].finished(ranks.boards[rank].post(all_reduce(1)))
    ranks.waits(0, all_reduce(2))
    ranks.waits(1, all_reduce(2))
    stuck = ranks.stuck(gone=(2,))
    assert [blocked.rank for blocked in stuck] == [0, 1]
    assert at_fault(stuck) == 2
    assert stuck_text(stuck, ranks.notebook.snapshots(), {2: "returned"}) == (
        "rank 2 returned after 1 all_reduce; ranks 0, 1 wait in all_reduce 2 of group (0, 1, 2), float32 [4], "
        "which rank 2 never entered"
    )


def test_a_chain_of_waits_is_as_stuck_as_its_end() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which is gone: both are stuck, and rank 2 is at fault."""
    ranks = Ranks()
    ranks.waits(0, receive(1, 0))
    ranks.waits(1, receive(2, 1))
    assert [blocked.rank for blocked in ranks.stuck(gone=(2,))] == [0, 1]
    assert ranks.stuck() == []


def test_a_circle_of_sends() -> None:
    """All send first: each waits for the next."""
    ranks = Ranks()
    for rank in ALL:
        ranks.waits(rank, send(rank, (rank + 1) % 3))
    stuck = ranks.stuck()
    assert [blocked.rank for blocked in cycle(stuck)] == [0, 1, 2]
    assert at_fault(stuck) == 0


def test_ddp_waits_where_nothing_notes_it() -> None:
    """An idle rank with an unfinished all-reduce counts as waiting for it; a busy one does not."""
    ranks = Ranks()
    for rank in (0, 1):
        ranks.boards[rank].post(all_reduce(1))
    assert ranks.stuck(gone=(2,)) == []
    assert [blocked.rank for blocked in ranks.stuck(idle=(0, 1), gone=(2,))] == [0, 1]


def test_an_idle_rank_may_do_something_else() -> None:
    """It may sleep with a receive posted and send afterwards; inside a backward it can only wait."""
    ranks = Ranks()
    ranks.boards[0].post(receive(1, 0))
    ranks.waits(1, receive(0, 1))
    assert ranks.stuck(idle=(0, 1)) == []
    ranks.boards[0].in_backward(True)
    assert [blocked.rank for blocked in ranks.stuck(idle=(0, 1))] == [0, 1]


def test_another_thread_may_end_a_wait() -> None:
    """Ranks in a circle are not stuck while one of them has a second thread, but one that waits for the gone is."""
    ranks = Ranks()
    ranks.boards[0].waiting(ranks.boards[0].post(receive(1, 0)), is_crowded=True)
    ranks.waits(1, receive(0, 1))
    assert ranks.stuck() == []
    assert [blocked.rank for blocked in ranks.stuck(gone=(1,))] == [0]
    assert [b.rank for b in doomed(ranks.notebook.snapshots(), idle=(), gone=(), is_over=True)] == [0, 1]


def test_equal_and_unequal_splits_meet_in_one_all_to_all() -> None:
    """A rank whose splits are all equal notes its tensor, one with other splits none: that is no mismatch."""
    ranks = Ranks()
    ranks.boards[0].post(Operation(SpanKind.ALL_TO_ALL, "world", 0, ALL))
    ranks.boards[1].post(Operation(SpanKind.ALL_TO_ALL, "world", 0, ALL, "float32", (6,), 6))
    with pytest.raises(CollectiveMismatchError, match="float32"):
        ranks.boards[2].post(Operation(SpanKind.ALL_TO_ALL, "world", 0, ALL, "int64", (6,), 6))


def failure(text: str, filename: str, kind: str = "RuntimeError") -> Failure:
    return Failure(0, 0, (Raised(kind, text, ((filename, 1, "f"),)),))


@pytest.mark.parametrize(
    ("text", "filename", "is_late"),
    [
        ("Timed out waiting 2000ms for recv operation to complete", "/x/torch/distributed/distributed_c10d.py", True),
        ("[third_party/gloo/gloo/transport/tcp/pair.h:311] Connect timeout [none]", "<ipython-input-1>", True),
        ("the data server timed out", "<ipython-input-1>", False),
        ("DataLoader timed out after 5 seconds", "/x/torch/utils/data/dataloader.py", False),
    ],
)
def test_only_the_backend_speaks_of_other_ranks(text: str, filename: str, is_late: bool) -> None:
    """An exception of the user's own that mentions a timeout or a lost connection is a cause, not a consequence."""
    assert is_timeout(failure(text, filename)) is is_late
    assert is_consequence(failure(text, filename)) is is_late


def test_what_a_consequence_led_to_is_one_too() -> None:
    lost = Raised("RuntimeError", "Connection closed by peer", (("/x/torch/distributed/distributed_c10d.py", 1, "f"),))
    assert is_consequence(Failure(0, 0, (lost, Raised("TrainingError", "step 3 failed", (("train.py", 1, "f"),)))))


def test_a_receive_from_anybody_needs_only_one_sender() -> None:
    """It is stuck where all others are gone, not where one of them is."""
    ranks = Ranks()
    ranks.waits(0, Operation(SpanKind.RECEIVE, "world:-1>0:0", 0, (0,), "float32", (4,), 4, peer=-1))
    assert ranks.stuck(gone=(1,)) == []
    assert [blocked.rank for blocked in ranks.stuck(gone=(1, 2))] == [0]


@pytest.mark.parametrize(("odd", "order"), [(0, (0, 1, 2)), (1, (2, 1, 0)), (2, (1, 2, 0)), (0, (1, 2, 0))])
def test_the_rank_that_differs_from_all_others_is_at_fault(odd: int, order: tuple[int, ...]) -> None:
    """Whoever comes later finds the mismatch; blamed is who stands alone, in whatever order they came."""
    ranks = Ranks()
    found = []
    for rank in order:
        try:
            ranks.boards[rank].post(all_reduce(1, numel=5 if rank == odd else 4))
        except CollectiveMismatchError:
            found.append(rank)
    assert found
    first, second = (odd, min(rank for rank in ALL if rank != odd))
    shapes = {rank: 5 if rank == odd else 4 for rank in ALL}
    lower, higher = sorted((first, second))
    expected = (
        f"rank {odd} does not fit the others: in operation 1 of group (0, 1, 2), "
        f"rank {lower} passes float32 [{shapes[lower]}] but rank {higher} passes float32 [{shapes[higher]}]; "
        "the dtype and the number of elements have to be the same on each rank"
    )
    assert {misfit(rank, ranks.notebook.snapshots()) for rank in found} == {(odd, expected)}


def test_a_long_run_does_not_confuse_old_operations_with_new_ones() -> None:
    """A rank may be hundreds of operations ahead, and what it entered long ago still counts as entered."""
    ranks = Ranks(2)
    for number in range(1, 700):
        ranks.boards[0].finished(ranks.boards[0].post(all_reduce(number, (0, 1))))
    ranks.waits(1, all_reduce(1, (0, 1)))
    assert ranks.stuck(gone=(0,)) == []


@pytest.mark.parametrize(
    ("type_name", "text", "said"),
    [
        ("ValueError", "much", "rank 2 raised ValueError: much"),
        ("SystemExit", "0", "rank 2 called sys.exit(0) and has no result; return from the function instead"),
        (
            "SystemExit",
            ASKED_TO_STOP,
            "rank 2 got SIGTERM, though nobody stopped this launch, and has no result; look for what ends processes on "
            "this machine: a job's time limit, a guard of its memory, the function itself",
        ),
    ],
)
def test_a_failure_says_what_to_do_where_the_exception_does_not(type_name: str, text: str, said: str) -> None:
    """A rank that somebody outside has stopped did not call `sys.exit`."""
    assert failure_text(Failure(2, 0, (Raised(type_name, text, ()),))) == said


def test_of_ranks_that_were_stopped_only_what_is_their_own_is_told() -> None:
    """That they were stopped, and that a peer had gone, is what Stop means."""
    ends = [
        Failure(3, 0, (Raised("ValueError", "no disk", (("/home/train.py", 3, "save"),)),)),
        Failure(0, 0, (Raised("SystemExit", ASKED_TO_STOP, ()),)),
        Failure(1, 0, (Raised("RuntimeError", "gloo: Connection closed by peer", ()),)),
        Failure(2, 0, (Raised("SystemExit", "3", ()),)),
    ]
    assert own_failures_text(ends) == "; meanwhile rank 3 raised ValueError: no disk"
    assert own_failures_text(ends[1:]) == ""
