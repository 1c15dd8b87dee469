"""One rank's thread over time: stretches labelled by the innermost open span, and the waits between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vizkit.trace import NONE, Span, SpanKind

MOST_LABELLED = 2**31
"""Stages and microbatches of a label stay below it: traces hold them in 32 bits."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a user's or an automatic span says about the compute inside it."""

    kind: SpanKind = SpanKind.COMPUTE
    name: str = ""
    stage: int = NONE
    microbatch: int = NONE


class _OpenSpan:
    __slots__ = ("has_content", "label")

    def __init__(self, label: Label) -> None:
        self.label = label
        self.has_content = False


class Lane:
    """Builds the compute and wait spans of one rank, fed in order of time.

    A stretch of compute belongs to the innermost open span. Stretches of one span that touch become one `Span`; a span
    in which nothing was computed, and no other span was opened, leaves one of zero length.

    >>> spans = []
    >>> lane = Lane(rank=0, emit=spans.append)
    >>> lane.open(Label(SpanKind.FORWARD)); lane.compute(0, 4); lane.compute(4, 6); lane.wait(6, 9, "wait")
    >>> lane.close(9)
    >>> lane.finish()
    >>> [(s.kind.value, s.start_ns, s.end_ns) for s in spans]
    [('F', 0, 6), ('wait', 6, 9)]
    """

    def __init__(self, rank: int, emit: Callable[[Span], None]) -> None:
        self._rank = rank
        self._emit = emit
        self._stack = [_OpenSpan(Label())]
        self._current = self._stack[0]
        self._start_ns = self._end_ns = 0

    def compute(self, start_ns: int, end_ns: int) -> None:
        if end_ns <= start_ns:
            return
        top = self._stack[-1]
        if self._current is not top or self._end_ns != start_ns:
            self._flush()
            self._current, self._start_ns = top, start_ns
        self._end_ns = end_ns
        top.has_content = True

    def wait(self, start_ns: int, end_ns: int, name: str, operation: int = NONE) -> None:
        if end_ns > start_ns:
            self._flush()
            self._emit(Span(self._rank, SpanKind.WAIT, start_ns, end_ns, name, operation=operation))

    def open(self, label: Label) -> None:
        self._stack.append(_OpenSpan(label))

    def close(self, now_ns: int) -> None:
        closed = self._stack.pop()
        self._stack[-1].has_content = True
        if not closed.has_content:
            self._flush()
            self._emit_compute(closed.label, now_ns, now_ns)

    def finish(self) -> None:
        """Ends the lane: what is still pending becomes a span."""
        self._flush()

    def _flush(self) -> None:
        if self._end_ns > self._start_ns:
            self._emit_compute(self._current.label, self._start_ns, self._end_ns)
        self._start_ns = self._end_ns

    def _emit_compute(self, label: Label, start_ns: int, end_ns: int) -> None:
        self._emit(Span(self._rank, label.kind, start_ns, end_ns, label.name, label.stage, label.microbatch))
