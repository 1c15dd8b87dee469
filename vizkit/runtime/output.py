"""What ranks print, shown in the cell while they run: whole lines, tagged by rank, in the same order in every run.

A line is ordered by three numbers: how many communications its rank had entered when it was printed, how many lines
that rank had printed since then, and the rank. Between two communications line k of every rank thus comes before line
k + 1 of any. A line is shown as soon as no line that belongs before it can come any more.
"""

from __future__ import annotations

import io
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TextIO

TAG_START, TAG_END = b"\x1e", b"\x1f"
_TAG = re.compile(TAG_START + rb"(\d+)" + TAG_END)
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

    def reconfigure(self, **options: object) -> None:
        """Scripts ask a stream for another encoding or buffering; this one stays as it is, and does no worse."""

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._partial = (self._partial + text).split("\n")
            if lines:
                tag = self._tag()
                self._send(b"".join(tag + line.encode("utf-8", "replace") + b"\n" for line in lines))
        return len(text)

    def _tag(self) -> bytes:
        return TAG_START + str(self._epoch()).encode() + TAG_END

    def finish(self) -> None:
        """Send what stands after the last line break as a line of its own."""
        with self._lock:
            if self._partial:
                self.write("\n")

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view.nbytes:
            view = view[os.write(self._descriptor, view) :]


class PlainStream(TaggedStream):
    """The same for a rank that no notebook watches: each line begins with its rank, as it stands in a cell."""

    def __init__(self, descriptor: int, rank: int) -> None:
        super().__init__(descriptor, int)
        self._prefix = f"[rank {rank}] ".encode()

    def _tag(self) -> bytes:
        return self._prefix


class Line(NamedTuple):
    """One line of one rank, in the order in which lines are shown."""

    epoch: int
    number: int
    rank: int
    text: str


class LineReader:
    """Turns the bytes of one stream of one rank into lines with their epochs."""

    def __init__(self) -> None:
        self._rest = b""
        self._epoch = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, str]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return map(self._parse, lines)

    def end(self) -> Iterator[tuple[int, str]]:
        rest, self._rest = self._rest, b""
        return map(self._parse, [rest] if rest else [])

    def _parse(self, line: bytes) -> tuple[int, str]:
        # what a C library or a child process wrote carries no tag and belongs to the rank's last epoch
        if found := _TAG.search(line):
            self._epoch = int(found[1])
            line = line[: found.start()] + line[found.end() :]
        text = line.decode("utf-8", "replace").rstrip("\r")
        return self._epoch, text.rsplit("\r", 1)[-1]  # of a line that rewrote itself, what was left standing


class OrderedLines:
    """Holds lines of one stream back until their place is sure."""

    def __init__(self, world_size: int) -> None:
        self._waiting: list[deque[Line]] = [deque() for _ in range(world_size)]
        self._position = [(0, 0)] * world_size  # epoch and number that the rank's next line has at the least

    def add(self, rank: int, epoch: int, text: str) -> None:
        self.advance(rank, epoch)
        epoch, number = self._position[rank]
        self._waiting[rank].append(Line(epoch, number, rank, text))
        self._position[rank] = (epoch, number + 1)

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


class Transcript:
    """The output of all ranks of a launch: standard output and standard error, each in its own order.

    `logs[rank]` has all lines of a rank as they came.
    """

    def __init__(self, world_size: int, streams: Sequence[TextIO]) -> None:
        self._streams = streams
        self._lines = [OrderedLines(world_size) for _ in streams]
        self._readers = [[LineReader() for _ in range(world_size)] for _ in streams]
        self.logs: list[list[str]] = [[] for _ in range(world_size)]

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Take what `rank` has written to stream 0 or 1; no data means that the stream has ended."""
        reader, lines = self._readers[stream][rank], self._lines[stream]
        for epoch, text in reader.feed(data) if data else reader.end():
            lines.add(rank, epoch, text)
            self.logs[rank].append(text)
        if not data:
            lines.end(rank)

    def advance(self, rank: int, epoch: int) -> None:
        """No line of `rank` with a smaller epoch will come any more."""
        for lines in self._lines:
            lines.advance(rank, epoch)

    def end(self, rank: int) -> None:
        """`rank` will write no more."""
        for stream in range(len(self._streams)):
            self.feed(rank, stream, b"")

    def show(self) -> None:
        """Write the lines whose place is sure."""
        for stream, lines in zip(self._streams, self._lines, strict=True):
            if text := "".join(f"{tag(line)}\n" for line in lines.ready()):
                stream.write(text)


def tag(line: Line) -> str:
    """How a line stands in the cell.

    >>> tag(Line(0, 0, 3, "hello"))
    '[rank 3] hello'
    """
    return f"[rank {line.rank}] {line.text}"
