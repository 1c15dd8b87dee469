"""What each rank tells the live view while it runs: ends of steps, time blocked, bytes posted, named numbers.

It stands behind the boards in the file that the notebook and all ranks share. A rank writes only its own part: a
struct or two for each step, so that telling costs microseconds, and the notebook reads as often as it likes. The
notebook writes one number for all: after which step the ranks are to stop.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import NamedTuple

from vizkit.errors import InvalidInputError
from vizkit.runtime.board import RECORD_BYTES
from vizkit.trace import NS_PER_S

STEPS_KEPT = 256
POINTS_KEPT = 256
MAX_NAMES = 8
NAME_BYTES = 24

_COUNT = struct.Struct("<Q")
_STEP = struct.Struct("<QQ")  # when it ended, and how long the main thread had been blocked until then
_NAME = struct.Struct(f"<{NAME_BYTES}sQ")  # a name, and how many values it has had
_POINT = struct.Struct("<Qd")  # step, value
_STEPS_AT, _POSTED_BYTES_AT, _RING_AT = 0, 8, 64
_NAMES_AT = _RING_AT + STEPS_KEPT * _STEP.size
_POINTS_AT = _NAMES_AT + MAX_NAMES * _NAME.size
_CONTROL_BYTES = 64
LIVE_BYTES = _POINTS_AT + MAX_NAMES * POINTS_KEPT * _POINT.size


class StopAtStep(SystemExit):
    """Raised in a rank that has come to the step after which the notebook wants it to stop."""


class Step(NamedTuple):
    """One step of a rank: its number from 1 on, what it took, and what of that the rank itself worked."""

    number: int
    step_s: float
    own_s: float


class Point(NamedTuple):
    """One value of a named number."""

    step: int
    value: float


def add_live_records(world_size: int, descriptor: int) -> None:
    """Make room behind the boards of `world_size` ranks in the file behind `descriptor`, filled with zeros."""
    os.ftruncate(descriptor, _base(world_size, world_size))


def _base(world_size: int, rank: int) -> int:
    return world_size * RECORD_BYTES + _CONTROL_BYTES + rank * LIVE_BYTES


class LiveRecord:
    """One rank's part, which that rank writes.

    `blocked_ns` is the time that its main thread has waited for others. A step is what `vizkit.progress` goes through,
    of nested loops the innermost; without such a loop what an optimizer does, and without an optimizer a call of `log`.
    """

    def __init__(self, descriptor: int, world_size: int, rank: int) -> None:
        self._memory = mmap.mmap(descriptor, _base(world_size, world_size))
        self._control = world_size * RECORD_BYTES
        self._base = _base(world_size, rank)
        self._posted_bytes = 0
        self._names: dict[str, list[int]] = {}  # where the name stands, and how many values it has had
        self._adding_name = threading.Lock()  # threads of a rank may log, too
        self._has_optimizer = False
        self._log_has_counted = False  # the step that is going on
        self.open_loops = 0
        self.steps = 0
        self.blocked_ns = 0

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Inside, the one who goes through the loop counts the steps."""
        self.open_loops += 1
        try:
            yield
        finally:
            self.open_loops -= 1

    def step(self) -> None:
        """A step has ended; raises `StopAtStep` where it was the last one wanted."""
        memory, base = self._memory, self._base
        self.steps = number = self.steps + 1
        at = base + _RING_AT + number % STEPS_KEPT * _STEP.size
        _STEP.pack_into(memory, at, monotonic_ns(), self.blocked_ns)
        _COUNT.pack_into(memory, base + _STEPS_AT, number)
        last = _COUNT.unpack_from(memory, self._control)[0]
        if last and number >= last:
            raise StopAtStep(f"stopped by the notebook after step {number}")

    def optimizer_stepped(self) -> None:
        is_counted, self._log_has_counted, self._has_optimizer = self._log_has_counted, False, True
        if not self.open_loops and not is_counted:
            self.step()

    def blocked(self, duration_ns: int) -> None:
        """The main thread has waited so long for other ranks."""
        self.blocked_ns += duration_ns

    def posted(self, payload_bytes: int) -> None:
        """A communication with this payload was posted."""
        self._posted_bytes += payload_bytes
        _COUNT.pack_into(self._memory, self._base + _POSTED_BYTES_AT, self._posted_bytes)

    def log(self, numbers: dict[str, object]) -> None:
        """Notes named numbers for the step that is going on, or, where steps are counted as they end, the latest."""
        is_own_step = not self.open_loops and not self._has_optimizer
        step = self.steps + (is_own_step or self.open_loops > 0)
        for name, value in numbers.items():
            entry = self._names.get(name) or self._add_name(name)
            index, count = entry
            at = self._base + _POINTS_AT + (index * POINTS_KEPT + count % POINTS_KEPT) * _POINT.size
            _POINT.pack_into(self._memory, at, step, _number(name, value))
            entry[1] = count + 1
            count_at = self._base + _NAMES_AT + index * _NAME.size + NAME_BYTES
            _COUNT.pack_into(self._memory, count_at, count + 1)
        if is_own_step:
            self._log_has_counted = True
            self.step()

    def _add_name(self, name: str) -> list[int]:
        if not name.isprintable() or not name:
            raise InvalidInputError.because(
                "log", name, "a name stands beside its curve, in one line", "use letters, such as vk.log(loss=0.3)"
            )
        with self._adding_name:
            return self._names.get(name) or self._add_printable(name)

    def _add_printable(self, name: str) -> list[int]:
        if len(self._names) == MAX_NAMES:
            known = ", ".join(self._names)
            raise InvalidInputError.because(
                "log", name, f"a rank notes up to {MAX_NAMES} names and has {known}", "log fewer, return the others"
            )
        if len(name.encode()) > NAME_BYTES:
            raise InvalidInputError.because(
                "log",
                name,
                f"a name has up to {NAME_BYTES} bytes",
                f"use {name.encode()[:NAME_BYTES].decode(errors='ignore')}",
            )
        entry = [len(self._names), 0]
        at = self._base + _NAMES_AT + entry[0] * _NAME.size
        _NAME.pack_into(self._memory, at, name.encode(), 0)
        self._names[name] = entry
        return entry

    @property
    def is_stop_wanted(self) -> bool:
        """Whether the notebook wants all ranks to stop."""
        return bool(_COUNT.unpack_from(self._memory, self._control)[0])


def _number(name: str, value: object) -> float:
    try:
        if getattr(value, "requires_grad", False):
            value = value.detach()  # type: ignore[attr-defined]  # torch warns of the number of a loss otherwise
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):  # torch raises RuntimeError for several elements
        kind = type(value).__name__
        raise InvalidInputError.because(name, kind, "is not one number", f"use vk.log({name}={name}.item())") from None


class LiveBoard:
    """What all ranks tell, as the notebook reads it."""

    def __init__(self, descriptor: int, world_size: int) -> None:
        self._memory = mmap.mmap(descriptor, _base(world_size, world_size))
        self._world_size = world_size

    def stop_after(self, step: int) -> None:
        """Ask the ranks to stop when they have done so many steps."""
        _COUNT.pack_into(self._memory, self._world_size * RECORD_BYTES, step)

    def steps_of(self, rank: int) -> int:
        """Number of steps that `rank` has done."""
        return self._count(rank, _STEPS_AT)

    def posted_bytes_of(self, rank: int) -> int:
        """Payload bytes of all communications that `rank` has posted."""
        return self._count(rank, _POSTED_BYTES_AT)

    def last_steps(self, rank: int, most: int = STEPS_KEPT - 2) -> list[Step]:
        """The latest steps of `rank`, oldest first; the first of all is left out, which pays for all set-up."""
        done = self.steps_of(rank)
        first = max(1, done - min(most, STEPS_KEPT - 2))  # one more than is looked at may be overwritten meanwhile
        at = _base(self._world_size, rank) + _RING_AT
        ends = [_STEP.unpack_from(self._memory, at + n % STEPS_KEPT * _STEP.size) for n in range(first, done + 1)]
        return [
            Step(number, (end - begin) / NS_PER_S, max(0, end - begin - blocked + before) / NS_PER_S)
            for number, (begin, before), (end, blocked) in zip(range(first + 1, done + 1), ends, ends[1:], strict=False)
        ]

    def points_of(self, rank: int, seen: dict[str, int]) -> dict[str, list[Point]]:
        """Values that `rank` has noted since `seen`, by name; `seen` then says how many each name has had."""
        found = {}
        base = _base(self._world_size, rank)
        for index in range(MAX_NAMES):
            raw, count = _NAME.unpack_from(self._memory, base + _NAMES_AT + index * _NAME.size)
            name = raw.rstrip(b"\0").decode(errors="ignore")
            if not name:
                break
            first = max(seen.get(name, 0), count - POINTS_KEPT + 1)
            at = base + _POINTS_AT + index * POINTS_KEPT * _POINT.size
            found[name] = [
                Point(*_POINT.unpack_from(self._memory, at + n % POINTS_KEPT * _POINT.size))
                for n in range(first, count)
            ]
            seen[name] = count
        return found

    def _count(self, rank: int, at: int) -> int:
        return int(_COUNT.unpack_from(self._memory, _base(self._world_size, rank) + at)[0])
