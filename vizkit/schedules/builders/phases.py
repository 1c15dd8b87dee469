"""Lays out a schedule from its phases: a few passes in turn, repeated as often as each rank needs it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vizkit.schedules.actions import INPUT_GRADIENT_KINDS
from vizkit.schedules.schedule import Schedule
from vizkit.trace import SpanKind

IN_TURN = -1
"""The slot of a pass that names none."""
_PASS = re.compile(r"([ +]?)([FBIW])(\d?)")


@dataclass(frozen=True, eq=False)
class Phase:
    """Passes such as "F0 F1+B0", done `times` times; `times` is one number, or one for each rank.

    A pass is a letter and a slot: the position of the stage among those of its rank. "+" joins two that overlap.
    A pass that names no slot takes the next turn of the schedule, or the only slot; W without a slot follows the oldest
    I without a W.
    """

    pattern: str
    times: np.ndarray | int


@dataclass(frozen=True, eq=False)
class Turns:
    """Slot and microbatch of the k-th forward, or of the k-th backward, of every rank."""

    slot: np.ndarray
    microbatch: np.ndarray


def lay_out(
    name: str,
    phases: Sequence[Phase],
    stages: np.ndarray,
    num_microbatches: int,
    *,
    forwards: Turns | None = None,
    backwards: Turns | None = None,
    first_microbatch: np.ndarray | None = None,
    num_pipelines: int = 1,
) -> Schedule:
    """The schedule in which each rank goes through these phases; `stages` has shape (ranks, slots).

    The microbatches of a slot come in order, from `first_microbatch` of that rank and slot on (0 where it is left out);
    passes without a slot follow `forwards` and `backwards`. A slot has equally many forwards, and as many backwards, on
    every rank.

    >>> rank = np.arange(2)
    >>> warm_up = 1 - rank
    >>> phases = [Phase("F0", warm_up), Phase("F0 B0", 3 - warm_up), Phase("B0", warm_up)]
    >>> print(lay_out("1F1B", phases, stages=rank[:, None], num_microbatches=3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    num_ranks = len(stages)
    table = _PassTable.of(tuple(phase.pattern for phase in phases))
    offsets, entry = _unroll(table.lengths, phases, num_ranks)
    stage, microbatch = np.empty((2, len(entry)), np.int32)
    for by_slot, turns in ((table.forwards, forwards), (table.backwards, backwards)):
        for slot, passes in by_slot.items():
            grid = np.flatnonzero(passes[entry]).reshape(num_ranks, -1)
            now = turns if turns and slot == IN_TURN else Turns(np.array([slot]), np.arange(grid.shape[1]))
            stage[grid] = stages[:, now.slot]
            microbatch[grid] = now.microbatch
            if first_microbatch is not None:
                microbatch[grid] += first_microbatch[:, now.slot]
    for slot, passes in table.weights.items():
        weights, inputs = np.flatnonzero(passes[entry]), np.flatnonzero(table.inputs[slot][entry])
        stage[weights], microbatch[weights] = stage[inputs], microbatch[inputs]
    stage_ranks = np.empty(stages.size, np.int64)
    stage_ranks[stages] = np.arange(num_ranks)[:, None]
    return Schedule.from_columns(
        name,
        num_microbatches=num_microbatches,
        stage_ranks=stage_ranks.tolist(),
        offsets=offsets,
        kind=table.kind[entry],
        stage=stage,
        microbatch=microbatch,
        joined=table.joined[entry] if table.joined.any() else None,
        num_pipelines=num_pipelines,
    )


def late_weights(warm_up: np.ndarray, delay: np.ndarray, total: int) -> list[Phase]:
    """`warm_up` forwards, then F, I and W in turn with W `delay` passes behind I; of each kind `total` at most.

    >>> print(lay_out("late", late_weights(np.array([1, 0]), np.array([0, 1]), 2), np.array([[0], [1]]), 2))
    0F0 0F1 0I0 0W0 0I1 0W1
    1F0 1I0 1F1 1I1 1W0 1W1
    """
    warm_up, delay = np.minimum(warm_up, total), np.minimum(delay, total)
    alone = np.minimum(delay, total - warm_up)
    return [
        Phase("F", warm_up),
        Phase("F I", alone),
        Phase("F I W", total - warm_up - alone),
        Phase("I", delay - alone),
        Phase("I W", warm_up - (delay - alone)),
        Phase("W", delay),
    ]


@dataclass(frozen=True, eq=False)
class _PassTable:
    """The passes of some patterns, one pattern after the other; `lengths` holds each pattern's number of passes.

    The others are masks of the table's entries by slot: forwards, backwards of both kinds, W, and the I that W follow.
    """

    kind: np.ndarray
    joined: np.ndarray
    lengths: np.ndarray
    forwards: dict[int, np.ndarray]
    backwards: dict[int, np.ndarray]
    weights: dict[int, np.ndarray]
    inputs: dict[int, np.ndarray]

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, patterns: tuple[str, ...]) -> _PassTable:
        rows = [_PASS.findall(pattern) for pattern in patterns]
        signs, letters, digits = zip(*(found for row in rows for found in row), strict=True)
        kind = np.array([SpanKind(letter).code for letter in letters], np.uint8)
        slots = np.array([int(digit) if digit else IN_TURN for digit in digits])

        def by_slot(*kinds: SpanKind) -> dict[int, np.ndarray]:
            mask = np.isin(kind, [each.code for each in kinds])
            return {slot: mask & (slots == slot) for slot in np.unique(slots[mask]).tolist()}

        inputs = by_slot(SpanKind.BACKWARD_INPUT)
        return cls(
            kind,
            np.array(signs) == "+",
            np.array([len(row) for row in rows]),
            by_slot(SpanKind.FORWARD),
            by_slot(*INPUT_GRADIENT_KINDS),
            by_slot(SpanKind.BACKWARD_WEIGHT),
            {**inputs, IN_TURN: kind == SpanKind.BACKWARD_INPUT.code},
        )


def _unroll(lengths: np.ndarray, phases: Sequence[Phase], num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each rank's passes begin, and each pass's entry in the table."""
    times = np.empty((num_ranks, len(phases)), np.int64)
    for column, phase in enumerate(phases):
        times[:, column] = phase.times
    passes = (times * lengths).ravel()
    ends = passes.cumsum()
    offsets = np.concatenate(([0], ends[len(phases) - 1 :: len(phases)]))
    run = np.repeat(np.arange(len(passes), dtype=np.int32), passes)
    position = np.arange(len(run), dtype=np.int32) - (ends - passes).astype(np.int32)[run]
    first = (np.cumsum(lengths) - lengths).astype(np.int32)
    return offsets, np.tile(first, num_ranks)[run] + position % np.tile(lengths.astype(np.int32), num_ranks)[run]
