"""Turns a recorder's raw tuples into a `RankRecord`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from vizkit.collectives import BACKEND_ALGORITHMS
from vizkit.record import Call, Event, Fingerprinted, RankRecord, SpanClosed, SpanOpened, Wait
from vizkit.runtime.recorder import BACKWARD_BEGAN, BACKWARD_ENDED, CALL, CLOSED, FINGERPRINT, OPENED, WAIT
from vizkit.trace import NONE

if TYPE_CHECKING:
    from vizkit.runtime.recorder import Recorder

NS_PER_MS = 1_000_000
Raw = tuple[Any, ...]


def rank_record(recorder: Recorder) -> RankRecord:
    """The record of everything between `recorder.start()` and `recorder.stop()`."""
    assert recorder.stopped is not None
    clock = recorder.clock
    clock.settle()

    def resolved(wall: int, mark: Any) -> tuple[int, int]:
        return clock.wall_ns(mark, wall), clock.work_ns(mark)

    start_wall, start = resolved(*recorder.started)
    end_wall, end = resolved(*recorder.stopped)
    raw = [
        (code, thread, *resolved(wall_in, mark_in), *resolved(wall_out, mark_out), told)
        for code, thread, wall_in, mark_in, wall_out, mark_out, told in _with_all_marks(list(recorder.events))
        if wall_in <= recorder.stopped[0]
    ]
    raw = _on_one_thread(raw, recorder.thread, (start_wall, start), (end_wall, end))
    done = _completions(raw, recorder)
    memory = recorder.memory.samples if recorder.memory is not None else []
    tracker = recorder.tensors
    return RankRecord(
        rank=recorder.rank,
        events=tuple(_events(raw, recorder, done)),
        start_ns=start,
        end_ns=end,
        start_wall_ns=start_wall,
        end_wall_ns=end_wall,
        memory_wall_ns=tuple(wall for wall, _ in memory if wall >= recorder.started[0]),
        memory_bytes=tuple(value for wall, value in memory if wall >= recorder.started[0]),
        tensors=None if tracker is None else tracker.samples(recorder.started[0], recorder.stopped[0]),
    )


def _with_all_marks(events: list[Raw]) -> Iterator[Raw]:
    """Fills in marks that were not read: a call and the wait that follows it at once lie between two readings."""
    last: dict[int, Any] = {}
    for code, thread, wall_in, mark_in, wall_out, mark_out, told in events:
        if mark_in is None:
            mark_in = last.get(thread, mark_out)
        if mark_out is None:
            mark_out = mark_in
        last[thread] = mark_out
        yield code, thread, wall_in, mark_in, wall_out, mark_out, told


def _on_one_thread(raw: list[Raw], thread: int, start: tuple[int, int], end: tuple[int, int]) -> list[Raw]:
    """All events in order of time, with those of other threads where they fall among those of the recorded thread.

    Another thread's clock means nothing to this one, so its calls get the work that this thread had done by then, and
    cost nothing. They keep their place in the record; their waits stop nobody here.
    """
    if all(event[1] == thread for event in raw):
        return raw
    mine = [(event[2], event[3]) for event in raw if event[1] == thread]
    walls, works = (np.array(column) for column in zip(start, *mine, end, strict=True))
    moved = []
    for event in raw:
        if event[1] != thread:
            work = int(np.interp(event[2], walls, np.maximum.accumulate(works)))
            event = (*event[:3], work, event[4], work, event[6])
        moved.append(event)
    # what another thread did during a wait did not wait for it to end, and may have been what ended it
    return sorted(moved, key=lambda event: event[4] if event[0] == WAIT else event[2])


def _completions(raw: list[Raw], recorder: Recorder) -> dict[int, int]:
    """When each call was over: no later than the first wait for it returned."""
    if recorder.device_works:
        return _device_completions(raw, recorder)
    done = dict(recorder.done_ns)
    for code, _, _, _, wall_out, _, told in raw:
        if code == WAIT:
            for call in told:
                done[call] = min(done.get(call, wall_out), wall_out)
    return done


def _device_completions(raw: list[Raw], recorder: Recorder) -> dict[int, int]:
    """From the durations that NCCL's timing gives: one communication of a group follows the other."""
    done: dict[int, int] = {}
    free: dict[object, int] = defaultdict(int)
    for code, _, wall_in, _, _, _, told in raw:
        if code == CALL and (work := recorder.device_works.get(told[0])) is not None:
            group = told[2]
            free[group] = max(wall_in, free[group]) + round(work._get_duration() * NS_PER_MS)
            done[told[0]] = free[group]
    return done


def _events(raw: list[Raw], recorder: Recorder, done: dict[int, int]) -> Iterator[Event]:
    awaited = {call for event in raw if event[0] == WAIT for call in event[6]}
    known: set[int] = set()
    in_backward: list[int] | None = None
    for code, thread, wall_in, work_in, wall_out, work_out, told in raw:
        stamps = {"start_wall_ns": wall_in, "end_wall_ns": wall_out, "before_ns": work_in, "after_ns": work_out}
        if code == CALL:
            call, kind, group, payload_bytes, peer, tag, split_bytes = told
            known.add(call)
            if in_backward is not None and call not in awaited:
                in_backward.append(call)
            yield Call(
                call=call,
                kind=kind,
                group=group.name,
                members=group.members,
                payload_bytes=payload_bytes,
                peer=recorder.sources.get(call, peer),
                tag=tag,
                algorithm=str(BACKEND_ALGORITHMS.get((recorder.backend, kind), "")),
                split_bytes=split_bytes,
                done_wall_ns=done.get(call, NONE),
                **stamps,
            )
        elif code == WAIT:
            calls = tuple(call for call in told if call in known)
            if thread == recorder.thread and (calls or not told):
                yield Wait(calls=calls, **stamps)
        elif code == OPENED:
            yield SpanOpened(label=told, **stamps)
        elif code == CLOSED:
            yield SpanClosed(**stamps)
        elif code == FINGERPRINT:
            yield Fingerprinted(fingerprint=told, **stamps)
        elif code == BACKWARD_BEGAN:
            in_backward = []
        elif code == BACKWARD_ENDED:
            if in_backward:
                yield Wait(calls=tuple(in_backward), implicit=True, **stamps)
            in_backward = None
