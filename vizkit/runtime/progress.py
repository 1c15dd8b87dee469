"""A progress bar for long steps: written by ranks, shown to a person while they run, gone from what is saved."""

from __future__ import annotations

import contextlib
import enum
import html
import operator
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol, TypeVar

from vizkit.errors import InvalidInputError
from vizkit.runtime import current

Item = TypeVar("Item")
Report = tuple[int, int, str]
PATIENCE_S = 0.7
WIDTH = 30
MAX_TOTAL = 2**63 - 1


def progress(items: Iterable[Item], total: int | None = None, label: str = "") -> Iterator[Item]:
    """Go through `items` in a rank and show in the notebook how far it has come; outside a rank, just go through them.

    `total` defaults to `len(items)` where that is known; 0 means that it is not. The bar shows the slowest rank, and
    the first 32 bytes of `label`. Raises `InvalidInputError` for a total that is no count and a label that is no text.

    >>> list(progress("ab"))
    ['a', 'b']
    """
    size = _length(items) if total is None else _count(total)
    if not isinstance(label, str):
        raise InvalidInputError.because("label", label, "stands before the count as text", 'use label="step"')
    board, live = current.board(), current.live()
    if board is None:
        yield from items
        return
    board.show_progress(0, size, label)
    if live is None:
        for done, item in enumerate(items, 1):
            yield item
            board.show_progress(done, size, label)
        return
    with live.loop():
        for done, item in enumerate(items, 1):
            steps = live.steps
            yield item
            board.show_progress(done, size, label)
            if live.steps == steps:  # otherwise a loop inside this item has counted them
                live.step()


def _length(items: Iterable[object]) -> int:
    """0 where it is unknown: a loader over a stream has a `len` that raises."""
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(items) if isinstance(items, Sized) else 0
    return 0


def _count(total: Any) -> int:
    with contextlib.suppress(TypeError):
        if 0 <= (count := operator.index(total)) <= MAX_TOTAL:
            return count
    raise InvalidInputError.because("total", total, "is a number of steps", "use total=100, or 0 where it is unknown")


def log(**numbers: object) -> None:
    """Note numbers of this step by name, such as the loss, for the live view; outside a rank nothing happens.

    Numbers are whatever `float` takes, a tensor with one element included; where nobody watches they are not looked
    at. A rank notes up to 8 names, of 1 to 24 bytes that can be printed. Raises `InvalidInputError` for others, and for
    what is no number.

    >>> log(loss=0.3)
    """
    live = current.live()
    if live is not None:
        live.log(numbers)


def slowest(reports: Iterable[Report]) -> Report | None:
    """Of what the ranks report, the one that has come least far; None while no rank reports anything.

    >>> slowest([(3, 10, "step"), (2, 10, "step"), (0, 0, "")])
    (2, 10, 'step')
    """
    shown = [report for report in reports if report[0] or report[1]]
    return min(shown, key=lambda report: report[0] / (report[1] or report[0] + 1)) if shown else None


def as_text(report: Report) -> str:
    """One line for a terminal.

    >>> as_text((5, 10, "epoch"))
    'epoch [###############...............] 5/10'
    """
    done, total, label = report
    if not total:
        return f"{label} {done}".strip()
    filled = WIDTH * min(done, total) // total
    return f"{label} [{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{total}".strip()


class Bar(Protocol):
    def update(self, report: Report) -> None: ...
    def close(self) -> None: ...


class NoBar:
    def update(self, report: Report) -> None:
        pass

    def close(self) -> None:
        pass


class TerminalBar:
    """Rewrites the last line of a terminal."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._length = 0

    def update(self, report: Report) -> None:
        text = as_text(report)
        self._stream.write("\r" + text.ljust(self._length))
        self._stream.flush()
        self._length = len(text)

    def close(self) -> None:
        if self._length:
            self._stream.write("\r" + " " * self._length + "\r")
            self._stream.flush()
            self._length = 0


class NotebookBar:
    """An output that is emptied when the run ends, so that a saved notebook holds no bar."""

    def __init__(self) -> None:
        self._handle: Any = None

    def update(self, report: Report) -> None:
        from IPython.display import display

        done, total, label = report
        bar = f'<progress value="{done}" max="{total}"></progress> ' if total else ""
        data = {"text/html": f"{bar}{html.escape(as_text(report) if not total else f'{label} {done}/{total}')}"}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.update({}, raw=True)
            self._handle = None


class Place(enum.Enum):
    """Where what is shown goes."""

    WATCHED_NOTEBOOK = enum.auto()
    NOTEBOOK = enum.auto()
    TERMINAL = enum.auto()
    FILE = enum.auto()


def this_place() -> Place:
    """Whether a person watches: in a notebook that somebody executes by hand, or in a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None and hasattr(shell, "kernel"):
        # nbclient and nbval execute without standard input; a person's front end offers it
        return Place.WATCHED_NOTEBOOK if getattr(shell.kernel, "_allow_stdin", False) else Place.NOTEBOOK
    return Place.TERMINAL if sys.stderr.isatty() else Place.FILE


def bar_for_this_place() -> Bar:
    """A bar where a person watches, and none elsewhere."""
    place = this_place()
    if place is Place.WATCHED_NOTEBOOK:
        return NotebookBar()
    return TerminalBar(sys.stderr) if place is Place.TERMINAL else NoBar()


class PatientBar:
    """Shows the slowest rank's progress, and only in runs that last longer than a moment."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._started_s = time.monotonic()
        self._last: Report | None = None

    def update(self, reports: Iterable[Report]) -> None:
        report = slowest(reports)
        if report and report != self._last and time.monotonic() - self._started_s > PATIENCE_S:
            self._bar.update(report)
            self._last = report

    def close(self) -> None:
        self._bar.close()
