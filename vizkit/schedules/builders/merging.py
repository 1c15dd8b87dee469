"""Puts the passes of all ranks in order at once, by numbers that say who comes first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vizkit.schedules.schedule import Schedule
from vizkit.trace import SpanKind


@dataclass(frozen=True, eq=False)
class Passes:
    """Passes of one kind: `place`, `stage` and `microbatch` broadcast to shape (ranks, passes of a rank).

    A rank does its passes in the order of `place`.
    """

    kind: SpanKind
    place: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray


def merge(
    name: str,
    passes: Sequence[Passes],
    *,
    num_microbatches: int,
    stage_ranks: Sequence[int],
    num_pipelines: int = 1,
) -> Schedule:
    """The schedule in which every rank does these passes in the order of their places; equal places keep their order.

    Every rank does the same number of passes of each kind.
    """
    num_ranks = max(stage_ranks) + 1
    shapes = [(num_ranks, np.shape(p.microbatch)[-1]) for p in passes]

    def side_by_side(values: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.broadcast_to(v, shape) for v, shape in zip(values, shapes, strict=True)], axis=1)

    place = side_by_side(p.place for p in passes)
    order = np.argsort(place, axis=1, kind="stable")

    def ordered(values: Iterable[np.ndarray]) -> np.ndarray:
        return np.take_along_axis(side_by_side(values), order, axis=1).ravel()

    return Schedule.from_columns(
        name,
        num_microbatches=num_microbatches,
        stage_ranks=stage_ranks,
        offsets=np.arange(num_ranks + 1) * place.shape[1],
        kind=ordered(np.array([[p.kind.code]], np.uint8) for p in passes),
        stage=ordered(p.stage for p in passes),
        microbatch=ordered(p.microbatch for p in passes),
        num_pipelines=num_pipelines,
    )
