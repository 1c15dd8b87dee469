"""Checks for the exercises of a notebook: what was expected, what came, and one hint.

An exercise is four neighbouring cells. The stub raises `NotImplementedError` (or is `answer = ...`), and the check says
"not attempted yet" instead of raising, so that "Run All" on an untouched notebook succeeds:

    def ring(rank, world_size):          # tag: exercise
        raise NotImplementedError

    def is_a_ring(candidate):            # tag: check
        run = vk.launch(candidate, world_size=4)
        yield "the sum on each rank", [6, 6, 6, 6], run.results, "add what arrives before you pass it on"
        yield "bytes that rank 0 sends", at_most(24), sent_bytes(run), "send one chunk at a time"

    vk.check(ring, is_a_ring)            # last line of the check cell

    def ring_solution(rank, world_size): # tag: solution
        ...

    vk.check(ring_solution, is_a_ring, required=True)

Each `yield` is one expectation: what it is, what is expected, what came, and a hint for whoever missed it. What is
expected is a value, `near(value, within)`, `at_most(value)` or `at_least(value)`; tensors and arrays are compared by
their values. The check stops at the first expectation that is not met, since later ones often follow from it.
"""

from __future__ import annotations

import enum
import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vizkit.errors import RankFailedError, VizkitError

YOUR_TURN = "your turn"
"""The message that a stub's `NotImplementedError` may carry; with any other, the error counts as the attempt's own."""
_LONGEST_TEXT = 160

Expectation = tuple[str, Any, Any, str]
"""What it is, what is expected, what came, a hint."""


class ExerciseFailedError(VizkitError, AssertionError):
    """A solution does not pass the check of its own exercise."""


class Status(enum.StrEnum):
    """How far an attempt came; the values are what the reader sees."""

    PASSED = "passed"
    NOT_YET = "not yet"
    NOT_ATTEMPTED = "not attempted yet"


@dataclass(frozen=True)
class Verdict:
    """The answer of one check, readable as plain text and as HTML: the status, then one line for each expectation."""

    status: Status
    met: tuple[str, ...] = ()
    missed: str = ""
    hint: str = ""

    def __bool__(self) -> bool:
        return self.status is Status.PASSED

    def __repr__(self) -> str:
        hint = f"hint: {self.hint}" if self.hint else ""
        met = "; ".join(self.met)
        if self.status is Status.NOT_YET and met:
            met = f"already right: {met}"
        details = "; ".join(text for text in (self.missed, hint, met) if text)
        return f"{self.status}: {details}" if details else str(self.status)

    def _repr_html_(self) -> str:
        """A live region, so that a screen reader speaks it; words, not colours, carry the meaning."""
        rows = [f"right: {what}" for what in self.met]
        rows += [self.missed] if self.missed else []
        rows += [f"hint: {self.hint}"] if self.hint else []
        items = "".join(f"<li>{html.escape(row)}</li>" for row in rows)
        body = f"<ul>{items}</ul>" if items else ""
        style = "border-left: 4px solid currentColor; padding: 0.3em 0.8em"
        return f'<div role="status" style="{style}"><strong>{self.status}</strong>{body}</div>'


@dataclass(frozen=True)
class Bound:
    """An expectation that is met by a range of values: from `low` to `high`, both included."""

    low: float
    high: float
    text: str

    def admits(self, value: Any) -> bool:
        """Whether a number, or each number in a sequence or tensor, lies within; what is no number does not."""
        value = _plain(value)
        if isinstance(value, (list, tuple)):
            return bool(value) and all(self.admits(item) for item in value)
        return isinstance(value, (int, float)) and self.low <= value <= self.high


def near(value: float, within: float) -> Bound:
    """Any number at most `within` from `value`, in the unit of `value`.

    >>> near(0.273, within=0.001)
    Bound(low=0.272..., high=0.274..., text='0.273 ± 0.001')
    """
    return Bound(value - within, value + within, f"{_text(value)} ± {_text(within)}")


def at_most(value: float) -> Bound:
    """Any number up to `value`, itself included."""
    return Bound(-math.inf, value, f"at most {_text(value)}")


def at_least(value: float) -> Bound:
    """Any number from `value` up, itself included."""
    return Bound(value, math.inf, f"at least {_text(value)}")


def check(attempt: Any, expectations: Callable[[Any], Iterable[Expectation]], *, required: bool = False) -> Verdict:
    """Tries an attempt, a function or a value, against what `expectations(attempt)` yields; see the module's text.

    An attempt that is or returns `...`, or that raises a bare `NotImplementedError` (here or on a rank), is "not
    attempted yet". Any other exception is reported as "not yet". With `required=True`, the form for solutions, the
    exception is left to pass, and an expectation that is not met raises `ExerciseFailedError`.

    >>> def doubles(candidate):
    ...     yield "twice 3", 6, candidate(3), "add the number to itself"
    >>> def stub(x):
    ...     raise NotImplementedError
    >>> check(stub, doubles)
    not attempted yet
    >>> check(lambda x: x * x, doubles)
    not yet: twice 3: expected 6, got 9; hint: add the number to itself
    >>> check(lambda x: 2 * x, doubles, required=True)
    passed: twice 3
    """
    try:
        verdict = _judge(attempt, expectations)
    except ExerciseFailedError:
        raise
    except Exception as error:
        if _is_stub(error):
            verdict = Verdict(Status.NOT_ATTEMPTED)
        elif required:
            raise
        else:
            verdict = Verdict(Status.NOT_YET, missed=f"it raised {_describe(error)}")
    if required and not verdict:
        raise ExerciseFailedError(f"the solution does not pass its own check: {verdict!r}")
    return verdict


def _judge(attempt: Any, expectations: Callable[[Any], Iterable[Expectation]]) -> Verdict:
    if attempt is ...:
        return Verdict(Status.NOT_ATTEMPTED)
    met: list[str] = []
    for what, expected, got, hint in expectations(attempt):
        if _is_blank(got):
            return Verdict(Status.NOT_ATTEMPTED)
        if not _matches(expected, got):
            wanted = expected.text if isinstance(expected, Bound) else _text(expected)
            missed = f"{what}: expected {wanted}, got {_text(got)}"
            return Verdict(Status.NOT_YET, tuple(met), missed, hint)
        met.append(what)
    if not met:
        raise ExerciseFailedError(
            f"{getattr(expectations, '__name__', expectations)} yields no expectation, so it checks nothing"
        )
    return Verdict(Status.PASSED, tuple(met))


def _is_stub(error: BaseException) -> bool:
    if isinstance(error, NotImplementedError):
        return str(error) in ("", YOUR_TURN)
    if isinstance(error, RankFailedError):
        lines = error.remote_traceback.strip().splitlines()
        return bool(lines) and lines[-1].strip() in ("NotImplementedError", f"NotImplementedError: {YOUR_TURN}")
    return False


def _is_blank(got: Any) -> bool:
    """Nothing but the stub's `...`: on its own, or on every rank."""
    return got is ... or (isinstance(got, (list, tuple)) and bool(got) and all(item is ... for item in got))


def _matches(expected: Any, got: Any) -> bool:
    if isinstance(expected, Bound):
        return expected.admits(got)
    return bool(_plain(expected) == _plain(got))


def _plain(value: Any) -> Any:
    """Tensors and arrays, also inside lists, tuples and dicts, as Python numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _text(value: Any) -> str:
    """Short and the same in every run: floats to six digits, long values cut."""
    value = _plain(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if type(value) in (list, tuple):
        ends = "[]" if isinstance(value, list) else "()"
        text = f"{ends[0]}{', '.join(_text(item) for item in value)}{ends[1]}"
    else:
        text = repr(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def _describe(error: Exception) -> str:
    first_line: Sequence[str] = str(error).strip().splitlines()[:1]
    return ": ".join([type(error).__name__, *first_line])
