"""What each action of a schedule has to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vizkit.schedules.actions import INPUT_GRADIENT_KINDS
from vizkit.schedules.schedule import Schedule
from vizkit.trace import NONE, SpanKind

ABSENT = -2
"""Stands for an action that a schedule lacks although another needs it."""


@dataclass(frozen=True, eq=False)
class Dependencies:
    """For each action of a schedule, the positions of the two that it can need; −1: none, −2: needed, but absent.

    `input` is the action of a neighbouring stage whose output it takes: the forward of the stage before, or the
    backward of the stage after. `own` is the action of its own stage that it builds on: a backward needs its forward,
    the backward for the weights needs the one for the inputs.
    """

    input: np.ndarray
    own: np.ndarray

    @classmethod
    def of(cls, schedule: Schedule) -> Dependencies:
        """Needs stages from 0 to `num_stages` − 1 and microbatches from 0 to `num_microbatches` − 1."""
        stage, microbatch, kind = schedule.stage, schedule.microbatch, schedule.kind
        width = schedule.num_microbatches
        here = stage.astype(np.int64) * width + microbatch
        forward = _mask(kind, (SpanKind.FORWARD,))
        input_gradient = _mask(kind, INPUT_GRADIENT_KINDS)
        size = schedule.num_stages * width
        forwards = _positions(size, here, forward)
        input_gradients = _positions(size, here, input_gradient)

        chain = stage % schedule.stages_per_pipeline
        inputs = np.full(len(kind), NONE, np.int64)
        needs = forward & (chain > 0)
        inputs[needs] = forwards[here[needs] - width]
        needs = input_gradient & (chain < schedule.stages_per_pipeline - 1)
        inputs[needs] = input_gradients[here[needs] + width]

        own = np.full(len(kind), NONE, np.int64)
        own[input_gradient] = forwards[here[input_gradient]]
        weight = _mask(kind, (SpanKind.BACKWARD_WEIGHT,))
        if weight.any():
            own[weight] = _positions(size, here, _mask(kind, (SpanKind.BACKWARD_INPUT,)))[here[weight]]
        return cls(inputs, own)


def _mask(codes: np.ndarray, kinds: Sequence[SpanKind]) -> np.ndarray:
    mask = codes == kinds[0].code
    for kind in kinds[1:]:
        mask |= codes == kind.code
    return mask


def _positions(size: int, here: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Where the action of each stage and microbatch stands; the first of duplicates."""
    positions = np.full(size, ABSENT, np.int64)
    found = np.flatnonzero(mask)[::-1]
    positions[here[found]] = found
    return positions
