"""What watching costs a run: the ranks that tell, and the notebook that looks."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

import vizkit as vk
from tests.benchmarks.conftest import Compare, Row
from vizkit.runtime import current
from vizkit.runtime.board import Board, Operation, State, create_board
from vizkit.runtime.live_record import LiveBoard, LiveRecord, add_live_records
from vizkit.runtime.live_state import LiveState, LiveSummary
from vizkit.runtime.live_watch import REFRESH_S, LiveWatch
from vizkit.runtime.progress import log
from vizkit.runtime.transport import anonymous_file
from vizkit.trace import SpanKind
from vizkit.widgets import live_html

STEPS, TURNS = 10, 30
COLLECTIVES = 4
STEP_S = 0.020
SHARE = 0.03
"""Of a step of 20 ms, and of a core."""
RANKS = 4


class Unseen:
    """A view that makes ranks tell what they do."""

    stop_wanted = False

    def show(self, state: LiveState) -> None:
        pass

    def close(self, summary: LiveSummary) -> None:
        pass


def added_cpu_s() -> float:
    """CPU seconds of the main thread that watching adds to a step: its loop, four all-reduces, two numbers.

    The step computes nothing else: what the machine's other work does to 20 ms of computing is more than the share.
    """
    recorder, board, live = dist.group.WORLD.recorder, current.board(), current.live()
    payload = torch.ones(1000)

    def steps() -> None:
        for _ in vk.progress(range(STEPS)):
            for _ in range(COLLECTIVES):
                dist.all_reduce(payload)
            log(loss=0.5, accuracy=0.5)

    least = {True: float("inf"), False: float("inf")}
    for turn in range(2 * TURNS):
        is_watched = turn % 2 == 0
        recorder.live = live if is_watched else None
        current.become(board, recorder.live)
        least[is_watched] = min(least[is_watched], _cpu_s(steps) / STEPS)
    return least[True] - least[False]


def _cpu_s(function) -> float:
    started = time.thread_time()
    function()
    return time.thread_time() - started


def telling_cpu_s() -> float:
    """CPU seconds of the main thread that telling of a step takes: the loop, two numbers, four collectives' bytes."""
    live, rounds = current.live(), 500

    def tell() -> None:
        for _ in vk.progress(range(rounds)):
            for _ in range(COLLECTIVES):
                live.posted(4000)
                live.blocked(1000)
            log(loss=0.5, accuracy=0.5)

    return min(_cpu_s(tell) for _ in range(10)) / rounds


def test_a_step_is_hardly_slower_when_it_is_watched(compare: Compare) -> None:
    """At most 3 % of a 20 ms step with four collectives, on the rank's CPU-time clock."""
    (added_s,) = vk.launch(added_cpu_s, world_size=1, live=Unseen()).results
    compare(Row("what watching adds to a step (rank's CPU)", added_s * 1e6, STEP_S * 1e6, "20 ms", "µs", SHARE))


def test_telling_takes_microseconds(compare: Compare) -> None:
    """What a rank does itself for the live view in a step, against 20 ms: far below what noise lets a run show."""
    own_s = min(vk.launch(telling_cpu_s, world_size=1, live=Unseen()).results)
    compare(Row("telling of a step (rank's CPU)", own_s * 1e6, STEP_S * 1e6, "20 ms", "µs", SHARE / 5))


class Drawing(Unseen):
    """As the panel draws; what is sent is a few kB."""

    def show(self, state: LiveState) -> None:
        live_html.alert(state)
        live_html.body(state)


def test_looking_takes_little_of_a_core(compare: Compare) -> None:
    """A refresh over four ranks that wait for each other, drawn as a page: at most 3 % of the time between two."""
    file = anonymous_file("board")
    create_board(RANKS, file)
    add_live_records(RANKS, file)
    for rank in range(RANKS):
        board, live = Board(file, RANKS, rank), LiveRecord(file, RANKS, rank)
        board.enter_state(State.RUNNING)
        for number in range(600):
            operation = Operation(SpanKind.ALL_REDUCE, "world", number, tuple(range(RANKS)), "float32", (1000,), 1000)
            slot = board.post(operation)
            live.log({"loss": number})
        if rank:
            board.waiting(slot)
    watch = LiveWatch(Drawing(), Board(file, RANKS), LiveBoard(file, RANKS), RANKS)
    refreshes = []
    for _ in range(10):
        started = time.process_time()
        watch.refresh([os.getpid()] * RANKS)
        refreshes.append(time.process_time() - started)
    os.close(file)
    compare(Row("a refresh of 4 ranks (notebook's CPU)", min(refreshes) * 1e3, REFRESH_S * 1e3, "0.4 s", "ms", SHARE))
