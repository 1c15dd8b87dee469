"""The record of a rank that still runs, taken from another thread."""

from __future__ import annotations

import copy
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from vizkit.record import RankRecord
from vizkit.runtime.recorder import CALL, CLOSED, WAIT, Recorder

if TYPE_CHECKING:
    from vizkit.runtime.clocks import CpuClock, CudaClock

_BLOCKED_SHARE = 0.5
"""A thread that has computed for less than this share of a stretch of time is said to have waited in it."""


def snapshot(recorder: Recorder) -> RankRecord:
    """What was recorded up to now, as if the function ended here; open spans end, and a wait that goes on is noted."""
    from vizkit.runtime.harvest import rank_record

    clock: CpuClock | CudaClock = recorder.clock  # type: ignore[assignment]
    seen = copy.copy(recorder)
    seen.events = list(recorder.events)
    seen.done_ns = dict(recorder.done_ns)
    now, mark = monotonic_ns(), clock.read_of(recorder.thread)
    seen.events += _unfinished_wait(seen, now, mark)
    seen.events += [(CLOSED, recorder.thread, now, mark, now, mark, None)] * len(recorder._open)
    seen.stopped = (now, mark)
    return rank_record(seen)


def _unfinished_wait(recorder: Recorder, now: int, mark: Any) -> list[tuple[Any, ...]]:
    """The wait for calls that are not over, if the thread is blocked: it is noted only when it ends."""
    mine = [event for event in recorder.events if event[1] == recorder.thread]
    awaited = {call for event in mine if event[0] == WAIT for call in event[6]}
    pending = tuple(
        event[6][0]
        for event in mine
        if event[0] == CALL and event[6][0] not in recorder.done_ns and event[6][0] not in awaited
    )
    if not pending:
        return []
    since, last_mark = (
        mine[-1][4],
        next((m for event in reversed(mine) for m in (event[5], event[3]) if m is not None), mark),
    )
    work = recorder.clock.work_ns(mark) - recorder.clock.work_ns(last_mark)
    if work >= _BLOCKED_SHARE * (now - since):
        return []
    return [(WAIT, recorder.thread, since, mark, now, mark, pending)]
