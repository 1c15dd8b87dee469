"""The handle of a posted communication: it passes everything on, and notes who waited for how long."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torch.distributed import Work

if TYPE_CHECKING:
    from vizkit.runtime.recorder import Recorder


class RecordedWork(Work):
    """Stands for the calls `calls` of the recorder, which hold `slots` on the board."""

    on_arrival: Callable[[int], None] | None = None
    """What to do with the source of a receive from anybody."""
    _is_watched = False

    def __init__(self, work: Any, recorder: Recorder, calls: tuple[int, ...], slots: tuple[int, ...]) -> None:
        super().__init__()
        self._work = work
        self._recorder = recorder
        self._calls = calls
        self._slots = slots

    def watch(self) -> None:
        """Notes the completion when it happens, from the backend's own thread."""
        self._is_watched = True
        recorder, (call,), (slot,) = self._recorder, self._calls, self._slots
        self._work.get_future().add_done_callback(lambda future: recorder.note_done(call, slot))

    def wait(self, timeout: timedelta | None = None) -> bool:
        recorder, work = self._recorder, self._work
        board = recorder.board
        wall, mark = monotonic_ns(), recorder.read_clock()
        if get_ident() != recorder.thread:
            board = None  # the notebook watches the main thread
        if board is not None:
            board.waiting(self._slots[0], recorder.is_crowded())
        try:
            result = work.wait(timeout) if timeout else work.wait()
            self._complete()
            return result
        finally:
            if board is not None:
                board.resumed()
            recorder.note_wait(self._calls, wall, mark)

    def is_completed(self) -> bool:
        """A program that has learned of the completion depends on it as if it had waited."""
        wall, mark = monotonic_ns(), self._recorder.read_clock()
        completed = self._work.is_completed()
        if completed:
            self._complete()
            self._recorder.note_wait(self._calls, wall, mark)
        return completed

    def synchronize(self) -> None:
        wall, mark = monotonic_ns(), self._recorder.read_clock()
        self._work.synchronize()
        self._recorder.note_wait(self._calls, wall, mark)

    def _complete(self) -> None:
        if self._is_watched:
            return
        self._is_watched = True
        if self.on_arrival is not None:
            self.on_arrival(self._work._source_rank())
        for call, slot in zip(self._calls, self._slots):  # noqa: B905 - strict costs in the hot path
            self._recorder.note_done(call, slot)


def _passing_on(name: str) -> Callable[..., Any]:
    def method(self: RecordedWork, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._work, name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    "_get_duration",
    "_get_op_type",
    "_source_rank",
    "block_current_stream",
    "exception",
    "get_future",
    "get_future_result",
    "is_success",
    "result",
    "source_rank",
):
    setattr(RecordedWork, _name, _passing_on(_name))
