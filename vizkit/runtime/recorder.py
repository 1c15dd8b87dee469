"""Notes what this rank does: communications, spans, backwards, optimizer steps, memory."""

from __future__ import annotations

import functools
import itertools
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
from datetime import timedelta
from threading import _active as live_threads  # type: ignore[attr-defined]
from threading import enumerate as enumerate_threads
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from vizkit.errors import InvalidInputError
from vizkit.lanes import MOST_LABELLED, Label
from vizkit.trace import NONE, Role, SpanKind

if TYPE_CHECKING:
    from vizkit.fingerprints import Fingerprint
    from vizkit.record import RankRecord
    from vizkit.runtime.board import Board
    from vizkit.runtime.live_record import LiveRecord
    from vizkit.runtime.tensor_memory import TensorTracker

CALL, WAIT, OPENED, CLOSED, BACKWARD_BEGAN, BACKWARD_ENDED, FINGERPRINT = range(7)
"""Codes of raw events: tuples of code, thread, host time and work mark on entering and on leaving, and what they tell.

A mark is None where it was not read, because the event before or after it has the same."""

_BACKWARD_KINDS = (SpanKind.BACKWARD, SpanKind.BACKWARD_INPUT, SpanKind.BACKWARD_WEIGHT)
_BACKWARD = Label(SpanKind.BACKWARD, "backward")
_OPTIMIZER = Label(SpanKind.OPTIMIZER, "optimizer step")
_SPAN_KINDS = {
    name: kind
    for kind in SpanKind
    if kind.role is Role.COMPUTE
    for name in (kind, kind.value, kind.name, kind.name.lower())
}


class Recorder:
    """Records one rank; `install` before `init_process_group`, `start` and `stop` around the user's function.

    The hot path appends one tuple for each event; `harvest` turns them into a `RankRecord`. Spans count where they are
    opened on the thread that called `start`; communications count from any thread.
    """

    def __init__(
        self,
        rank: int,
        board: Board | None = None,
        sample_memory: bool = False,
        backend: str = "gloo",
        timeout_s: float | None = None,
        live: LiveRecord | None = None,
    ) -> None:
        from vizkit.runtime.clocks import CpuClock, CudaClock, WorkClock
        from vizkit.runtime.memory import MemorySampler, memory_reader

        self.rank = rank
        self.board = board
        self.live = live
        self.backend = backend
        self.timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self.futures_tell_time = backend != "nccl"
        self.clock: WorkClock = CudaClock() if backend == "nccl" else CpuClock()
        self.read_clock = self.clock.read
        self.numbers = itertools.count()
        self.events: list[tuple[Any, ...]] = []
        self.done_ns: dict[int, int] = {}
        self.sources: dict[int, int] = {}
        self.device_works: dict[int, Any] = {}
        self.memory = MemorySampler(memory_reader(backend == "nccl")) if sample_memory else None
        self.tensors: TensorTracker | None = None
        self.thread = get_ident()
        self._num_threads = len(live_threads)
        self.started: tuple[int, Any] = (0, None)
        self.stopped: tuple[int, Any] | None = None
        self._open: list[SpanKind] = []
        self._backward_depth = 0
        self._optimizer_depths: list[int] = []
        self._fingerprints: Counter[str] = Counter()
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Puts recording process groups in the place of torch's, and marks backwards and optimizer steps."""
        import torch.distributed.distributed_c10d as c10d
        from torch import autograd, distributed
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        from vizkit.runtime.process_group import batching, recording_class

        os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
        for backend, name in (("gloo", "ProcessGroupGloo"), ("nccl", "ProcessGroupNCCL")):
            if real := getattr(c10d, name, None):
                self._replace(c10d, name, recording_class(self, backend, real))
        batched = batching(c10d.batch_isend_irecv)
        for module in (c10d, distributed):
            self._replace(module, "batch_isend_irecv", batched)
        for name in ("backward", "grad"):
            self._replace(autograd, name, self._marking_backward(getattr(autograd, name)))
        for handle in (
            register_optimizer_step_pre_hook(lambda *_: self._begin_optimizer_step()),
            register_optimizer_step_post_hook(lambda *_: self._end_optimizer_step()),
        ):
            self._undo.append(handle.remove)
        _Current.recorder = self

    def uninstall(self) -> None:
        """Takes back what `install` did."""
        while self._undo:
            self._undo.pop()()
        if _Current.recorder is self:
            _Current.recorder = None

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def start(self) -> None:
        """Forgets what came before: the user's function begins on this thread."""
        self.thread = get_ident()
        self._num_threads = len(live_threads)
        self.clock.start()
        for table in (self.events, self.done_ns, self.sources, self.device_works, self._open, self._optimizer_depths):
            table.clear()
        self._backward_depth = 0
        self._fingerprints.clear()
        self.tensors = None
        self.stopped = None
        self.started = (monotonic_ns(), self.read_clock())
        self._sample_memory(self.started[0])

    def stop(self) -> None:
        """The user's function has ended."""
        self.close(0)
        self.stopped = (monotonic_ns(), self.read_clock())
        self._sample_memory(self.stopped[0])

    def harvest(self) -> RankRecord:
        """What was recorded between `start` and `stop`, as plain data; raises `InvalidInputError` before `stop`."""
        from vizkit.runtime.harvest import rank_record

        if self.stopped is None:
            raise InvalidInputError.because("stopped", None, "a record is complete only after stop()", "call stop()")
        return rank_record(self)

    # What the process groups, their works and the spans call, in the hot path.

    def note_call(self, call: tuple[Any, ...], work: Any, wall: int, mark: Any, read_again: bool) -> None:
        """A call was posted: its number, kind, group, payload bytes, peer, tag and split bytes."""
        if not self.futures_tell_time:
            self.device_works[call[0]] = work
        now = monotonic_ns()
        self.events.append((CALL, get_ident(), wall, mark, now, self.read_clock() if read_again else None, call))
        if self.memory is not None:
            self.memory.sample(now)
        if self.tensors is not None:
            self.tensors.look()
        if self.live is not None:
            self.live.posted(call[3])

    def note_wait(self, calls: tuple[int, ...], wall: int, mark: Any) -> None:
        """The thread has waited for these calls since `wall`."""
        thread, now = get_ident(), monotonic_ns()
        self.events.append((WAIT, thread, wall, mark, now, self.read_clock(), calls))
        if self.live is not None and thread == self.thread:
            self.live.blocked(now - wall)

    def note_done(self, call: int, slot: int) -> None:
        """A communication is over; called from any thread."""
        self.done_ns[call] = monotonic_ns()
        if self.board is not None and slot != NONE:
            self.board.finished(slot)

    def note_fingerprint(self, fingerprint: Fingerprint, wall: int, mark: Any) -> None:
        """A hash of what the rank holds was taken since `wall`."""
        self.events.append((FINGERPRINT, self.thread, wall, mark, monotonic_ns(), self.read_clock(), fingerprint))

    def count_fingerprint(self, name: str) -> int:
        """How many fingerprints of this name there were before."""
        self._fingerprints[name] += 1
        return self._fingerprints[name] - 1

    @property
    def is_in_backward(self) -> bool:
        return bool(self._backward_depth)

    def leave_out_own_time(self) -> None:
        """From now on, what vizkit says to have spent itself (`clock.leave_out`) does not count as work."""
        self.clock.leave_out(0)
        self.read_clock = self.clock.read

    def is_crowded(self) -> bool:
        """Whether other threads of the user's program are alive, which may do what this one waits for."""
        if len(live_threads) == self._num_threads:  # active_count() takes a lock, too dear in the hot path
            return False
        return any(not thread.daemon and thread.ident != self.thread for thread in enumerate_threads())

    def open(self, label: Label) -> int:
        """Opens a span on the recorded thread; the number returned closes it."""
        if get_ident() != self.thread:
            return NONE
        self._note(OPENED, label)
        self._open.append(label.kind)
        return len(self._open) - 1

    def close(self, depth: int) -> None:
        """Closes the span that `open` gave this number, and those inside it that an exception left open."""
        if depth >= 0 and get_ident() == self.thread:
            while len(self._open) > depth:
                self._open.pop()
                self._note(CLOSED)

    def _note(self, code: int, told: Any = None) -> None:
        wall, mark = monotonic_ns(), self.read_clock()
        if self.memory is not None:
            self.memory.sample(wall)
        self.events.append((code, self.thread, wall, mark, wall, mark, told))
        if self.tensors is not None:
            self.tensors.look(code == CLOSED)

    def _sample_memory(self, now: int) -> None:
        if self.memory is not None:
            self.memory.sample(now)

    def _marking_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self.thread or self._backward_depth:
                return function(*args, **kwargs)
            self._backward_depth = 1
            is_labelled = bool(self._open) and self._open[-1] in _BACKWARD_KINDS
            depth = NONE if is_labelled else self.open(_BACKWARD)
            self._note(BACKWARD_BEGAN)
            if self.board is not None:
                self.board.in_backward(True)
            try:
                return function(*args, **kwargs)
            finally:
                self._backward_depth = 0
                if self.board is not None:
                    self.board.in_backward(False)
                self._note(BACKWARD_ENDED)
                if self.live is not None:
                    self.live.blocked(blocked_in_backward_ns(self.events))
                self.close(depth)

        return marked

    def _begin_optimizer_step(self) -> None:
        is_labelled = bool(self._open) and self._open[-1] is SpanKind.OPTIMIZER
        self._optimizer_depths.append(NONE if is_labelled else self.open(_OPTIMIZER))
        if is_labelled and self.tensors is not None:
            self.tensors.look(True)

    def _end_optimizer_step(self) -> None:
        if self._optimizer_depths:
            self.close(self._optimizer_depths.pop())
        if self.tensors is not None:
            self.tensors.look(True)
        if self.live is not None:
            self.live.optimizer_stepped()


def blocked_in_backward_ns(events: Sequence[tuple[Any, ...]]) -> int:
    """How long a backward that just ended was blocked at its end where nothing noted it: DDP waits inside C++.

    After the last communication that it posted nothing is left to compute, so the time that the thread used no
    processor since then went into waiting. On a GPU the host does not wait.
    """
    _, _, _, _, end, end_mark, _ = events[-1]
    for code, _, _, _, posted, mark, _ in reversed(events):
        if code in (WAIT, BACKWARD_BEGAN):
            return 0
        if code == CALL:
            return max(0, (end - posted) - (end_mark - mark)) if isinstance(mark, int) else 0
    return 0


class _Current:
    """The recorder of this process, if it is a rank."""

    recorder: Recorder | None = None


def current_recorder() -> Recorder | None:
    """The recorder of this process, if it is a rank, on the thread that it records."""
    recorder = _Current.recorder
    return recorder if recorder is not None and get_ident() == recorder.thread else None


@contextmanager
def unrecorded() -> Iterator[None]:
    """What happens inside is vizkit's own: a wait on the wall clock, and nothing on the virtual one."""
    recorder = current_recorder()
    if recorder is None:
        yield
        return
    first, wall, mark = len(recorder.events), monotonic_ns(), recorder.read_clock()
    yield
    del recorder.events[first:]
    recorder.note_wait((), wall, mark)


def _number(what: str, value: Any) -> int:
    """A stage or microbatch as traces and files hold it: 32 bits."""
    try:
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises any of them for what is no whole number
        number = None
    if number is None or not -MOST_LABELLED <= number < MOST_LABELLED:
        raise InvalidInputError.because(
            what, value, "is no whole number of 32 bits", f"count from 0, or leave {what} out where it does not apply"
        )
    return number


class span(ContextDecorator):  # noqa: N801 - reads as a statement: with vk.span(...)
    """Labels the compute inside it on this rank's timeline; outside a rank it does nothing.

    `kind` is the value or name of a compute kind of `SpanKind`: "F", "B", "I", "W", "optimizer", "data", "compute".
    `stage` and `microbatch` are numbers for pipelines, −1 where they do not apply. Spans nest: time belongs to the
    innermost. Raises `InvalidInputError` for another kind, and for a `stage` or `microbatch` that is no whole number.

    >>> with span("forward", kind="F", microbatch=2, stage=1):
    ...     pass
    >>> span("exchange", kind="all_reduce")
    Traceback (most recent call last):
    vizkit.errors.InvalidInputError: kind='all_reduce': is not a kind of compute; use one of F, B, I, W, ...
    """

    __slots__ = ("_depths", "_label")

    def __init__(self, name: str = "", kind: str | SpanKind = "compute", stage: int = NONE, microbatch: int = NONE):
        known = _SPAN_KINDS.get(kind)
        if known is None:
            valid = ", ".join(kind.value for kind in dict.fromkeys(_SPAN_KINDS.values()))
            raise InvalidInputError.because("kind", kind, "is not a kind of compute", f"use one of {valid}")
        name = str(name)
        if not name.isascii():  # a lone surrogate has no place in a file or on a page
            name = name.encode("utf-8", "backslashreplace").decode()
        self._label = Label(known, name, _number("stage", stage), _number("microbatch", microbatch))
        self._depths: list[int] = []

    def __enter__(self) -> span:
        recorder = _Current.recorder
        self._depths.append(NONE if recorder is None else recorder.open(self._label))
        return self

    def __exit__(self, *exception: object) -> None:
        depth = self._depths.pop()
        if depth != NONE and _Current.recorder is not None:
            _Current.recorder.close(depth)
