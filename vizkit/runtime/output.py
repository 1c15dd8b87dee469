"""What ranks print, shown in the cell while they run: whole lines, tagged by rank, in the same order in every run.

A line is ordered by three numbers: how many communications its rank had entered when it was printed, how many lines
that rank had printed since then, and the rank. Between two communications line k of every rank thus comes before line
k + 1 of any. A line is shown as soon as no line that belongs before it can come any more.
"""

from __future__ import annotations

import io
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TextIO

TAG_START, TAG_END = b"\x1e", b"\x1f"
ENDED = 2**63


class TaggedStream(io.TextIOBase):
    """A rank's `sys.stdout` or `sys.stderr`: whole lines, each with the number of communications entered so far."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, descriptor: int, epoch: Callable[[], int]) -> None:
        self._descriptor = descriptor
        self._epoch = epoch
        self._partial = ""
        self._lock = threading.RLock()
        self.buffer = io.FileIO(descriptor, "w", closefd=False)

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._partial = (self._partial + text).split("\n")
            if lines:
                tag = TAG_START + str(self._epoch()).encode() + TAG_END
                self._send(b"".join(tag + line.encode("utf-8", "replace") + b"\n" for line in lines))
        return len(text)

    def finish(self) -> None:
        """Send what stands after the last line break as a line of its own."""
        with self._lock:
            if self._partial:
                self.write("\n")

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view.nbytes:
            view = view[os.write(self._descriptor, view) :]


class Line(NamedTuple):
    """One line of one rank, in the order in which lines are shown."""

    epoch: int
    number: int
    rank: int
    text: str
    is_error: bool


class LineReader:
    """Turns the bytes of one rank's stream into lines with their epochs."""

    def __init__(self, rank: int, is_error: bool) -> None:
        self.rank = rank
        self.is_error = is_error
        self._rest = b""
        self._epoch = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, str]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return map(self._parse, lines)

    def end(self) -> Iterator[tuple[int, str]]:
        rest, self._rest = self._rest, b""
        return iter([self._parse(rest)] if rest else [])

    def _parse(self, line: bytes) -> tuple[int, str]:
        # what a C library or a child process wrote carries no tag and belongs to the rank's last epoch
        before, start, tagged = line.partition(TAG_START)
        if start:
            number, _, after = tagged.partition(TAG_END)
            self._epoch = int(number)
            line = before + after
        text = line.decode("utf-8", "replace").rstrip("\r")
        return self._epoch, text.rsplit("\r", 1)[-1]  # of a line that rewrote itself, what was left standing


class OrderedLines:
    """Holds lines back until their place is sure.

    `logs[rank]` has all lines of a rank as they came.
    """

    def __init__(self, world_size: int) -> None:
        self._waiting: list[deque[Line]] = [deque() for _ in range(world_size)]
        self._position = [(0, 0)] * world_size  # epoch and number that the rank's next line has at the least
        self.logs: list[list[str]] = [[] for _ in range(world_size)]

    def add(self, rank: int, epoch: int, text: str, is_error: bool = False) -> None:
        self.advance(rank, epoch)
        epoch, number = self._position[rank]
        self._waiting[rank].append(Line(epoch, number, rank, text, is_error))
        self._position[rank] = (epoch, number + 1)
        self.logs[rank].append(text)

    def advance(self, rank: int, epoch: int) -> None:
        """No line of `rank` with a smaller epoch will come any more."""
        self._position[rank] = max(self._position[rank], (epoch, 0))

    def end(self, rank: int) -> None:
        """No line of `rank` will come any more."""
        self.advance(rank, ENDED)

    def ready(self) -> Iterator[Line]:
        """Lines whose place is sure, in order."""
        while True:
            heads = [queue[0] for queue in self._waiting if queue]
            if not heads:
                return
            first = min(heads)
            bound = (
                min((*position, rank) for rank, position in enumerate(self._position) if not self._waiting[rank])
                if len(heads) < len(self._waiting)
                else None
            )
            if bound is not None and bound < first[:3]:
                return
            yield self._waiting[first.rank].popleft()

    def flush(self) -> Iterator[Line]:
        """All lines that are left, in order."""
        for rank in range(len(self._waiting)):
            self.end(rank)
        yield from self.ready()


def tag(line: Line) -> str:
    """How a line stands in the cell.

    >>> tag(Line(0, 0, 3, "hello", False))
    '[rank 3] hello'
    """
    return f"[rank {line.rank}] {line.text}"


def show(lines: Iterable[Line], streams: Sequence[TextIO]) -> None:
    """Write lines to `streams`: standard output first, standard error second."""
    for line in lines:
        streams[line.is_error].write(tag(line) + "\n")
