"""How much compute precedes each event of a rank: what was measured, or what given durations say."""

from __future__ import annotations

from dataclasses import dataclass, field

from vizkit.durations import Durations
from vizkit.lanes import Label
from vizkit.record import Call, RankRecord, SpanClosed, SpanOpened, Wait
from vizkit.trace import SpanKind


def work_before_events(rank: RankRecord, durations: Durations | None = None) -> list[int]:
    """Nanoseconds of compute before each event of `rank`, and in the last entry those after the last event.

    Measured: the work clock between leaving one event and entering the next. With `durations`, every span takes what
    they say for its kind and stage, and compute outside spans takes nothing. A span's time is placed by this rule:

    - it is divided evenly among the stretches of the span that end in posting a send or a collective, and the stretch
      after the span's last wait if no communication follows that wait;
    - waits on sends, and the wait at the end of a backward, do not count: nothing is computed because of them;
    - a span inside it that posts something counts as posting it where that span opens: what an outer backward computes
      comes before the inner span of a communication hook;
    - where that leaves no stretch, all of it comes before the span's end.

    So a forward that receives, computes and sends computes between its wait and its send, and a backward that posts k
    buckets posts them at 1/k, 2/k, …, k/k of its time.
    """
    return _measured(rank) if durations is None else _given(rank, durations)


def _measured(rank: RankRecord) -> list[int]:
    work = []
    left = rank.start_ns
    for event in rank.events:
        work.append(max(event.before_ns - left, 0))
        left = max(event.after_ns, left)
    work.append(max(rank.end_ns - left, 0))
    return work


@dataclass(slots=True)
class _OpenSpan:
    label: Label
    position: int
    shares: list[int] = field(default_factory=list)
    """Positions of the events that end a stretch with a share in the span's time."""
    last_is_wait: bool = False
    has_posted: bool = False


def _given(rank: RankRecord, durations: Durations) -> list[int]:
    work = [0] * (len(rank.events) + 1)
    kinds = {call.call: call.kind for call in rank.calls}
    stack: list[_OpenSpan] = []
    for position, event in enumerate(rank.events):
        if isinstance(event, SpanOpened):
            stack.append(_OpenSpan(event.label, position))
        elif not stack:
            continue
        elif isinstance(event, SpanClosed):
            closed = stack.pop()
            if closed.last_is_wait or not closed.shares:
                closed.shares.append(position)
            total = durations.of_ns(closed.label.kind, closed.label.stage)
            parts = len(closed.shares)
            for part, share in enumerate(closed.shares):
                work[share] = total * (part + 1) // parts - total * part // parts
        elif isinstance(event, Call):
            stack[-1].last_is_wait = False
            if event.kind is not SpanKind.RECEIVE:
                stack[-1].shares.append(position)
                _tell_outer_spans(stack)
        elif isinstance(event, Wait) and not event.implicit:
            stack[-1].last_is_wait |= any(kinds.get(call) is not SpanKind.SEND for call in event.calls)
    return work


def _tell_outer_spans(stack: list[_OpenSpan]) -> None:
    for outer, inner in zip(stack[-2::-1], stack[:0:-1], strict=True):
        if inner.has_posted:
            break
        inner.has_posted = True
        outer.shares.append(inner.position)
