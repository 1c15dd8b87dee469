"""Hypothesis strategies: any trace that the type allows, and traces drawn as text."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from vizkit.collectives import Algorithm
from vizkit.schedules import Action, Schedule
from vizkit.trace import NONE, NS_PER_S, Clock, Counter, Span, SpanKind, Trace

RANKS = 4
_optional = st.one_of(st.just(NONE), st.integers(0, RANKS - 1))


@st.composite
def spans(draw: st.DrawFn, longest_ns: int = 10**12) -> Span:
    """Any span of `RANKS` ranks within `longest_ns` nanoseconds."""
    start, end = sorted((draw(st.integers(0, longest_ns)), draw(st.integers(0, longest_ns))))
    return Span(
        rank=draw(st.integers(0, RANKS - 1)),
        kind=draw(st.sampled_from(SpanKind)),
        start_ns=start,
        end_ns=end,
        name=draw(st.text(max_size=5)),
        stage=draw(_optional),
        microbatch=draw(_optional),
        payload_bytes=draw(st.integers(0, 2**40)),
        peer=draw(_optional),
        group=draw(st.sampled_from([(), (0, 1), (0, 1, 2, 3)])),
        operation=draw(st.integers(NONE, 5)),
        algorithm=draw(st.sampled_from(["", *Algorithm])),
        split_bytes=draw(st.sampled_from([(), (1, 2)])),
    )


@st.composite
def counters(draw: st.DrawFn) -> Counter:
    """A counter with whole or fractional, also infinite, samples."""
    times = sorted(draw(st.lists(st.integers(0, 10**12), max_size=4)))
    sample, dtype = draw(st.sampled_from([(st.integers(0, 2**40), np.int64), (st.floats(allow_nan=False), np.float64)]))
    values = np.array([draw(sample) for _ in times], dtype)
    return Counter(draw(st.text(max_size=5)), draw(st.integers(0, RANKS - 1)), np.array(times, np.int64), values)


@st.composite
def traces(draw: st.DrawFn, clock: Clock | None = None, longest_ns: int = 10**12, max_spans: int = 12) -> Trace:
    """Any trace, on this clock or any."""
    return Trace.from_spans(
        draw(st.lists(spans(longest_ns), max_size=max_spans)),
        clock=clock or draw(st.sampled_from(Clock)),
        world_size=draw(st.integers(RANKS, RANKS + 2)),
        counters=draw(st.lists(counters(), max_size=2)),
        notes=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)),
    )


def drawn(rows: list[str], cell_ns: int = NS_PER_S) -> Trace:
    """The trace that `as_grid` would draw like this: a kind and a microbatch in each cell, `.` for nothing."""
    return Trace.from_spans(
        [
            Span(rank, SpanKind(cell[0]), at * cell_ns, (at + 1) * cell_ns, microbatch=int(cell[1:]))
            for rank, row in enumerate(rows)
            for at, cell in enumerate(row.split())
            if cell != "."
        ],
        clock=Clock.IDEAL,
    )


@st.composite
def schedules(draw: st.DrawFn, overlaps: bool = True, max_ranks: int = 4) -> Schedule:
    """Any schedule that can run: stages anywhere, actions in any order that their inputs allow, some in one cell."""
    num_ranks, num_stages = sorted((draw(st.integers(1, max_ranks)), draw(st.integers(1, 6))))
    owners = [*range(num_ranks), *(draw(st.integers(0, num_ranks - 1)) for _ in range(num_stages - num_ranks))]
    stage_ranks = draw(st.permutations(owners))
    num_microbatches = draw(st.integers(1, 4))
    trains, splits = draw(st.booleans()), draw(st.booleans())
    rows: list[list[tuple[Action, ...]]] = [[] for _ in range(num_ranks)]
    done: set[Action] = set()
    kinds = ("F",) if not trains else ("F", "I", "W") if splits else ("F", "B")
    left = {
        Action(stage, SpanKind(kind), microbatch)
        for stage in range(num_stages)
        for kind in kinds
        for microbatch in range(num_microbatches)
    }
    while left:
        ready = sorted(action for action in left if all(need in done for need in needs_of(action, num_stages, splits)))
        action = draw(st.sampled_from(ready))
        rows[stage_ranks[action.stage]].append((action,))
        left.discard(action)
        done.add(action)
    if overlaps and trains:
        _overlap(draw, rows)
    return Schedule.from_rows(rows)


def _overlap(draw: st.DrawFn, rows: list[list[tuple[Action, ...]]]) -> None:
    """Joins some forwards with the backward after them, where the schedule can still run."""
    for row in rows:
        at = 0
        while at + 1 < len(row):
            (first,), (second,) = row[at], row[at + 1]
            if first.kind == "F" and second.kind in ("B", "I") and draw(st.booleans()):
                row[at : at + 2] = [(first, second)]
                if Schedule.from_rows(rows).check():
                    row[at : at + 1] = [(first,), (second,)]
            at += 1


def needs_of(action: Action, num_stages: int, splits: bool) -> list[Action]:
    """The actions that have to come before this one."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind == "F":
        return [Action(stage - 1, kind, microbatch)] if stage else []
    if kind == "W":
        return [Action(stage, SpanKind.BACKWARD_INPUT, microbatch)]
    after = [Action(stage + 1, kind, microbatch)] if stage < num_stages - 1 else []
    return [Action(stage, SpanKind.FORWARD, microbatch), *after]
