"""Looks at the ranks of a launch while they run, and shows a live view what there is to see."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from vizkit.metrics import SlowRank, slow_ranks
from vizkit.runtime import diagnosis
from vizkit.runtime.board import Board, State
from vizkit.runtime.live_record import LiveBoard, Point, Step, add_live_records
from vizkit.runtime.live_state import Curve, LiveState, LiveSummary, LiveView, RankNow, SlowEpisode, WaitNow
from vizkit.runtime.processes import processor_ticks, resident_bytes
from vizkit.runtime.progress import slowest

REFRESH_S = 0.4
"""A view that changes twice or three times a second reads as live, and over a slow link it is a few kB a second."""
WINDOW = 32
"""Steps that "a step takes" looks back on, and in which a slow rank has to be slow."""
MOST_POINTS = 400
FIRST_STEP_S = 0.25
"""Where no step is done yet, a step is taken to last so long."""
STOP_MARGIN_S = 0.1
"""Fast ranks go on while they are told to stop: they stop at a step that none has come to yet."""


class LiveWatch:
    """Shows `view` the ranks of one launch; whatever the view raises ends the view and not the run."""

    def __init__(self, view: LiveView, board: Board, live: LiveBoard, world_size: int) -> None:
        self._view = view
        self._board = board
        self._live = live
        self._size = world_size
        self._began_s = self._shown_s = time.monotonic()
        self._waits: list[tuple[tuple[int, int] | None, float]] = [(None, self._began_s)] * world_size
        self._ticks = [-1] * world_size
        self._peaks: list[int | None] = [None] * world_size
        self._posted = (self._began_s, 0)
        self._rate = 0.0
        self._seen: dict[int, dict[str, int]] = {rank: {} for rank in range(world_size)}
        self._curves: dict[str, Curve] = {}
        self._episodes: dict[int, SlowEpisode] = {}
        self._past: list[SlowEpisode] = []
        self._looks = 0
        self._trouble = ""
        self._stop_after: int | None = None

    def look(self, pids: Sequence[int | None]) -> None:
        """Called often; shows something where it is time to."""
        now = time.monotonic()
        for rank in range(self._size):
            wait = self._board.wait_of(rank)
            if wait != self._waits[rank][0]:
                self._waits[rank] = wait, now
        if now - self._shown_s >= REFRESH_S and not self._trouble:
            self._shown_s = now
            self.refresh(pids)

    def refresh(self, pids: Sequence[int | None]) -> None:
        """Shows what there is to see at this moment."""
        try:
            self._view.show(self._state(pids))
            self._looks += 1
        except Exception as error:
            self._trouble = _said(error)

    @property
    def is_stop_wanted(self) -> bool:
        """Whether somebody has pressed Stop."""
        try:
            return bool(self._view.stop_wanted)
        except Exception as error:
            self._trouble = _said(error)
            return False

    def ask_to_stop(self) -> float:
        """Tell the ranks after which step to stop; returns the seconds that this may take."""
        steps = [self._live.last_steps(rank, WINDOW) for rank in range(self._size)]
        typical_s = max((median(step.step_s for step in of_rank) for of_rank in steps if of_rank), default=FIRST_STEP_S)
        ahead = 1 + int(STOP_MARGIN_S / max(typical_s, 1e-6))
        self._stop_after = max(self._live.steps_of(rank) for rank in range(self._size)) + ahead
        self._live.stop_after(self._stop_after)
        return min(5.0, 0.5 + 2 * ahead * typical_s)

    def has_stopped(self, rank: int) -> bool:
        """Whether `rank` has done the last step, or all of its work, and only has to hand over what it recorded."""
        is_running = self._board.state_of(rank) in (State.STARTING, State.RUNNING)
        return not is_running or self._live.steps_of(rank) >= (self._stop_after or 0)

    def close(self) -> LiveSummary:
        """The end: the view is left with the summary."""
        summary = self._summary()
        try:
            self._view.close(summary)
        except Exception as error:
            return replace(summary, trouble=self._trouble or _said(error))
        return summary

    # ---- what there is to see --------------------------------------------------------------------------------------

    def _state(self, pids: Sequence[int | None]) -> LiveState:
        now = time.monotonic()
        steps = [self._live.last_steps(rank, WINDOW) for rank in range(self._size)]
        self._gather_curves()
        ticks = [processor_ticks(pid) for pid in pids]
        idle = [rank for rank, used in enumerate(ticks) if used == self._ticks[rank]]
        self._ticks = ticks
        waits = self._waits_now(now, idle)
        posted = sum(map(self._live.posted_bytes_of, range(self._size)))
        self._note_rate(now, posted)
        done, total, label = self._progress()
        slow = self._slow_now(steps)
        return LiveState(
            elapsed_s=now - self._began_s,
            done=done,
            total=total,
            label=label,
            ranks=tuple(self._rank_now(rank, steps[rank], waits.get(rank), pids[rank]) for rank in range(self._size)),
            curves=tuple(self._curves.values()),
            bytes_per_s=self._rate,
            slow=slow,
            is_stopping=self._stop_after is not None,
        )

    def _rank_now(self, rank: int, steps: Sequence[Step], wait: WaitNow | None, pid: int | None) -> RankNow:
        memory = resident_bytes(pid)
        if memory is not None:
            self._peaks[rank] = max(memory, self._peaks[rank] or 0)
        return RankNow(
            rank=rank,
            state=diagnosis.STATE_WORDS[self._board.state_of(rank)],
            steps=self._live.steps_of(rank),
            step_s=_median(step.step_s for step in steps),
            own_s=_median(step.own_s for step in steps),
            wait=wait,
            posted_bytes=self._live.posted_bytes_of(rank),
            memory_bytes=memory,
        )

    def _waits_now(self, now: float, idle: Sequence[int]) -> dict[int, WaitNow]:
        """Who is blocked on what, and for whom; DDP's waits inside C++ show as a backward that uses no processor."""
        waits = {}
        for rank in range(self._size):
            operation = self._board.waiting_of(rank)
            if operation is None and rank in idle and (snapshot := self._board.snapshot(rank)).in_backward:
                operation = diagnosis.awaited(snapshot, idle=True)
            if operation is not None:
                others = range(self._size) if operation.is_from_anybody else operation.members
                missing = [r for r in others if r != rank and not self._board.has_entered(r, operation)]
                name = f"{operation.kind.value} {operation.sequence + 1}"
                waits[rank] = WaitNow(name, now - self._waits[rank][1], tuple(missing))
        return waits

    def _progress(self) -> tuple[int, int, str]:
        report = slowest(self._board.progress_of(rank) for rank in range(self._size))
        return report or (min(self._live.steps_of(rank) for rank in range(self._size)), 0, "")

    def _note_rate(self, now: float, posted: int) -> None:
        before_s, before = self._posted
        if now > before_s:
            self._rate = (posted - before) / (now - before_s)
        self._posted = now, posted

    def _gather_curves(self) -> None:
        for rank in range(self._size):
            for name, points in self._live.points_of(rank, self._seen[rank]).items():
                known = self._curves.get(name)
                if points and (known is None or known.rank >= rank):
                    before = known.points if known and known.rank == rank else ()
                    self._curves[name] = Curve(name, rank, thinned((*before, *points)))

    def _slow_now(self, steps: Sequence[Sequence[Step]]) -> tuple[SlowRank, ...]:
        first = max((of_rank[0].number if of_rank else 0 for of_rank in steps), default=0)
        last = min((of_rank[-1].number if of_rank else 0 for of_rank in steps), default=0)
        own_s = [[step.own_s for step in of_rank if first <= step.number <= last] for of_rank in steps]
        slow = slow_ranks(own_s)
        for found in slow:
            episode = SlowEpisode(max(first, last - found.steps + 1), last, found)
            before = self._episodes.get(found.rank)
            if before and episode.first_step - before.last_step > 1:
                self._past.append(before)
            elif before:
                worst = max(before.worst, found, key=lambda slow: slow.ratio)
                episode = SlowEpisode(before.first_step, last, worst)
            self._episodes[found.rank] = episode
        return slow

    def _summary(self) -> LiveSummary:
        self._gather_curves()
        steps = [self._live.last_steps(rank) for rank in range(self._size)]
        self._slow_now([of_rank[-WINDOW:] for of_rank in steps])
        done, total, label = self._progress()
        return LiveSummary(
            progress=f"{label or 'step'} {done}" + (f" of {total}" if total else ""),
            seconds=time.monotonic() - self._began_s,
            steps=tuple(map(self._live.steps_of, range(self._size))),
            step_s=tuple(_median(step.step_s for step in of_rank) for of_rank in steps),
            own_s=tuple(_median(step.own_s for step in of_rank) for of_rank in steps),
            posted_bytes=tuple(map(self._live.posted_bytes_of, range(self._size))),
            peak_memory_bytes=tuple(self._peaks),
            slow=tuple(sorted([*self._past, *self._episodes.values()], key=lambda episode: episode.first_step)),
            curves={name: curve.points for name, curve in self._curves.items()},
            looks=self._looks,
            trouble=self._trouble,
        )


def watch_of(view: LiveView, board: Board, board_file: int, world_size: int) -> LiveWatch:
    """The watch over a launch whose board stands in the file `board_file`; makes room there for what ranks tell."""
    add_live_records(world_size, board_file)
    return LiveWatch(view, board, LiveBoard(board_file, world_size), world_size)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def thinned(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Every second of the points where there are more than a screen shows; the first and the latest stay.

    >>> len(thinned(tuple(Point(n, 0.0) for n in range(MOST_POINTS + 1))))
    201
    """
    return points if len(points) <= MOST_POINTS else (*points[:-1:2], points[-1])


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
