"""What a rank tells the live view, and how the notebook reads it, within one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from vizkit.errors import InvalidInputError
from vizkit.runtime import current, live_record
from vizkit.runtime.board import Board, create_board
from vizkit.runtime.live_record import MAX_NAMES, POINTS_KEPT, STEPS_KEPT, LiveBoard, LiveRecord, Point, StopAtStep
from vizkit.runtime.progress import log, progress
from vizkit.runtime.recorder import BACKWARD_BEGAN, CALL, WAIT, blocked_in_backward_ns
from vizkit.runtime.transport import anonymous_file

MS = 1_000_000


class Clock:
    """Stands in for the system's, so that steps take what the test says."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class NoBoard:
    """A rank whose progress nobody looks at here."""

    def show_progress(self, done: int, total: int, label: str) -> None:
        pass


@pytest.fixture
def descriptor() -> Iterator[int]:
    file = anonymous_file("live")
    live_record.add_live_records(2, file)
    yield file
    os.close(file)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(live_record, "monotonic_ns", clock)
    return clock


@pytest.fixture
def rank(descriptor: int) -> Iterator[LiveRecord]:
    """This process is rank 1 of 2."""
    record = LiveRecord(descriptor, 2, 1)
    current.become(NoBoard(), record)
    yield record
    current.become(None)


def test_own_time_is_the_step_without_its_waits(descriptor: int, clock: Clock, rank: LiveRecord):
    """Steps of 10, 20 and 30 ms, 4 ms of each blocked; the first, which pays for set-up, is left out."""
    for step in (10, 20, 30):
        clock.now_ns += step * MS
        rank.blocked(4 * MS)
        rank.step()
    board = LiveBoard(descriptor, 2)
    assert board.steps_of(1) == 3
    assert board.last_steps(1) == [(2, 0.020, 0.016), (3, 0.030, 0.026)]
    assert board.last_steps(0) == []


@pytest.mark.parametrize("steps", [STEPS_KEPT - 2, STEPS_KEPT, 3 * STEPS_KEPT + 7])
def test_the_latest_steps_are_kept(descriptor: int, clock: Clock, rank: LiveRecord, steps: int):
    """A long run overwrites the oldest; numbers stay those of the run."""
    for number in range(1, steps + 1):
        clock.now_ns += number * MS
        rank.step()
    kept = LiveBoard(descriptor, 2).last_steps(1)
    assert [step.number for step in kept] == list(range(steps - len(kept) + 1, steps + 1))
    assert [step.step_s for step in kept] == pytest.approx([step.number / 1000 for step in kept])
    assert len(kept) >= STEPS_KEPT - 3


def test_a_loop_counts_its_items(rank: LiveRecord):
    """Optimizer steps and logs inside a loop of `vk.progress` are no steps of their own."""
    for _ in progress(range(3)):
        rank.optimizer_stepped()
        rank.optimizer_stepped()
        log(loss=1.0)
    assert rank.steps == 3


def test_of_nested_loops_the_innermost_counts(rank: LiveRecord):
    """Two epochs of three batches are six steps."""
    for _ in progress(range(2), label="epoch"):
        for _ in progress(range(3), label="batch"):
            pass
    assert rank.steps == 6


def test_without_a_loop_the_optimizer_counts(rank: LiveRecord):
    """A log between two optimizer steps belongs to the step just done."""
    for loss in (3.0, 2.0):
        rank.optimizer_stepped()
        log(loss=loss)
    assert rank.steps == 2


def test_a_log_before_the_first_optimizer_step_is_not_counted_twice(rank: LiveRecord):
    """Until an optimizer is seen, a log counts; the step that both belong to is one."""
    for loss in (3.0, 2.0):
        log(loss=loss)
        rank.optimizer_stepped()
    assert rank.steps == 2


def test_a_loop_that_was_left_counts_no_more(rank: LiveRecord):
    """After a break the optimizer counts again."""
    for item in progress(range(5)):
        if item == 2:
            break
    rank.optimizer_stepped()
    assert rank.steps == 3


def test_without_either_a_log_counts(descriptor: int, rank: LiveRecord):
    """Plain loops that log once a step have steps too."""
    for loss in (3.0, 2.0, 1.0):
        log(loss=loss)
    assert rank.steps == 3
    points = LiveBoard(descriptor, 2).points_of(1, {})
    assert points == {"loss": [Point(1, 3.0), Point(2, 2.0), Point(3, 1.0)]}


def test_only_new_points_are_read(descriptor: int, rank: LiveRecord):
    """The notebook remembers how many of each name it has; what the ring has lost meanwhile is skipped."""
    board, seen = LiveBoard(descriptor, 2), {}
    log(loss=1.0, accuracy=0.5)
    assert board.points_of(1, seen) == {"loss": [(1, 1.0)], "accuracy": [(1, 0.5)]}
    assert board.points_of(1, seen) == {"loss": [], "accuracy": []}
    for value in range(2 * POINTS_KEPT):
        log(loss=value)
    late = board.points_of(1, seen)["loss"]
    assert late[-1].value == 2 * POINTS_KEPT - 1
    assert len(late) == POINTS_KEPT - 1


@pytest.mark.parametrize(
    ("value", "noted"),
    [
        (1, 1.0),
        (True, 1.0),
        (torch.tensor([0.5]), 0.5),
        (torch.tensor(2, dtype=torch.int8), 2.0),
        (1e400, float("inf")),
    ],
)
def test_a_number_is_what_float_takes(descriptor: int, rank: LiveRecord, value: object, noted: float):
    """Tensors with one element too, and losses that have become infinite."""
    log(loss=value)
    assert LiveBoard(descriptor, 2).points_of(1, {})["loss"] == [(1, noted)]


@pytest.mark.parametrize("value", [torch.ones(2), "much", None, [1.0], 10**400])
def test_what_is_no_number_is_refused(rank: LiveRecord, value: object):
    """The message names the number and its type."""
    with pytest.raises(InvalidInputError) as refused:
        log(loss=value)
    assert str(refused.value) == f"loss='{type(value).__name__}': is not one number; use vk.log(loss=loss.item())"


def test_a_rank_notes_a_small_set_of_names(rank: LiveRecord):
    """Eight names, of up to 24 bytes."""
    names = [f"n{i}" for i in range(MAX_NAMES)]
    log(**dict.fromkeys(names, 0.0))
    with pytest.raises(InvalidInputError) as refused:
        log(one_more=1.0)
    assert str(refused.value) == (
        f"log='one_more': a rank notes up to 8 names and has {', '.join(names)}; log fewer, return the others"
    )


def test_a_long_name_is_refused(rank: LiveRecord):
    """The remedy is a name that fits."""
    with pytest.raises(InvalidInputError) as refused:
        log(**{"é" * 13: 1.0})
    assert str(refused.value) == f"log={'é' * 13!r}: a name has up to 24 bytes; use {'é' * 12}"


@pytest.mark.parametrize("name", ["", "a\0", "two\nlines", "\ud800"])
def test_a_name_can_be_printed(descriptor: int, rank: LiveRecord, name: str):
    """An empty name would hide those after it, and a line break would tear the summary."""
    with pytest.raises(InvalidInputError) as refused:
        log(**{name: 1.0})
    assert str(refused.value) == (
        f"log={name!r}: a name stands beside its curve, in one line; use letters, such as vk.log(loss=0.3)"
    )
    log(loss=1.0)
    assert LiveBoard(descriptor, 2).points_of(1, {}) == {"loss": [(1, 1.0)]}


def test_a_loss_that_is_to_be_differentiated_is_logged_without_a_warning(
    descriptor: int, rank: LiveRecord, recwarn: pytest.WarningsRecorder
):
    """`vk.log(loss=loss)` before the backward is the usual thing to write."""
    log(loss=torch.ones(1, requires_grad=True).sum() * 2)
    assert LiveBoard(descriptor, 2).points_of(1, {}) == {"loss": [(1, 2.0)]}
    assert not recwarn.list


class Stream(IterableDataset):
    """Samples without a number."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_loader_over_a_stream_has_an_unknown_total(rank: LiveRecord):
    """It has a `len` that raises."""
    with pytest.raises(TypeError):
        len(DataLoader(Stream()))
    assert sum(1 for _ in progress(DataLoader(Stream()))) == 3
    assert rank.steps == 3


@pytest.mark.parametrize("total", [-1, 2.5, "many", 2**63])
def test_a_total_is_a_count(rank: LiveRecord, total: object):
    """The message has the value, the rule and the remedy; 0 stands for a total that nobody knows."""
    with pytest.raises(InvalidInputError) as refused:
        next(progress("ab", total=total))  # type: ignore[arg-type]
    assert str(refused.value) == f"total={total!r}: is a number of steps; use total=100, or 0 where it is unknown"
    assert list(progress("ab", total=0)) == ["a", "b"]


def test_a_label_is_text(rank: LiveRecord):
    """Refused before the first step."""
    with pytest.raises(InvalidInputError) as refused:
        next(progress("ab", label=None))  # type: ignore[arg-type]
    assert str(refused.value) == 'label=None: stands before the count as text; use label="step"'


@pytest.mark.parametrize(("label", "shown"), [("é" * 17, "é" * 16), ("x" + "é" * 16, "x" + "é" * 15), ("\ud800", "?")])
def test_a_long_label_ends_with_a_whole_letter(label: str, shown: str):
    """32 bytes are kept, and half a letter is none."""
    file = anonymous_file("board")
    create_board(1, file)
    board = Board(file, 1, 0)
    board.show_progress(1, 2, label)
    assert board.progress_of(0) == (1, 2, shown)
    os.close(file)


def test_threads_that_log_new_names_at_once_get_a_place_each(descriptor: int, rank: LiveRecord):
    """Two names in one place would mix their curves."""
    start = threading.Barrier(MAX_NAMES)

    def log_own(index: int) -> None:
        start.wait()
        log(**{f"n{index}": index})

    threads = [threading.Thread(target=log_own, args=(index,)) for index in range(MAX_NAMES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    points = LiveBoard(descriptor, 2).points_of(1, {})
    assert {name: point.value for name, (point,) in points.items()} == {f"n{i}": i for i in range(MAX_NAMES)}


def test_outside_a_rank_nothing_happens():
    """Nor is anything looked at, so that a cell runs as it stands without a launch."""
    log(loss=object())
    assert list(progress(range(2))) == [0, 1]


def test_ranks_stop_after_the_step_that_the_notebook_names(descriptor: int, rank: LiveRecord):
    """Not before; and a rank that has been told says so of itself."""
    LiveBoard(descriptor, 2).stop_after(2)
    assert rank.is_stop_wanted
    rank.step()
    with pytest.raises(StopAtStep, match="stopped by the notebook after step 2"):
        rank.step()
    assert LiveBoard(descriptor, 2).steps_of(1) == 2


def test_bytes_add_up(descriptor: int, rank: LiveRecord):
    """Payload of all communications posted."""
    for payload in (100, 0, 28):
        rank.posted(payload)
    assert LiveBoard(descriptor, 2).posted_bytes_of(1) == 128


CALLED = (CALL, 1, 0, 0, 10 * MS, 2 * MS, ())
ENDED = (BACKWARD_BEGAN + 1, 1, 30 * MS, 5 * MS, 30 * MS, 5 * MS, None)
BEGAN = (BACKWARD_BEGAN, 1, 0, 0, 0, 0, None)
WAITED = (WAIT, 1, 10 * MS, 2 * MS, 28 * MS, 2 * MS, ())


@pytest.mark.parametrize(
    ("events", "blocked_ms"),
    [
        ([BEGAN, CALLED, ENDED], 17),  # 20 ms since the last bucket was posted, 3 ms of them on the processor
        ([BEGAN, CALLED, WAITED, ENDED], 0),  # noted as a wait already
        ([CALLED, BEGAN, ENDED], 0),  # posted before: not what this backward waits for
        ([BEGAN, ENDED], 0),
        ([BEGAN, (*CALLED[:5], object(), ()), ENDED], 0),  # a mark on a GPU's stream
    ],
)
def test_what_ddp_waits_inside_cpp_is_told_from_the_processor_time(events: list[tuple[object, ...]], blocked_ms: int):
    """After its last bucket a backward computes no more, so that time without the processor was a wait."""
    assert blocked_in_backward_ns(events) == blocked_ms * MS
