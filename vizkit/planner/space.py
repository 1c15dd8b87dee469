"""Which layouts there are for a model, a number of devices and a batch: all that divide as they must."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.layout import CONTEXT_WAYS
from vizkit.memory.states import Precision, precision_of, zero_stage_of
from vizkit.planner.columns import NUMBERS, RECOMPUTE, SCHEDULES, Columns
from vizkit.planner.stages import check_schedule
from vizkit.schedules.catalogue import recipe
from vizkit.schedules.recipe import MOST_PASSES
from vizkit.sizes import whole_number, yes_or_no
from vizkit.transformer import Recompute, Transformer

LEAST_CONTEXT = 4096
"""Tokens of a sequence that context parallelism leaves each rank at least, where nothing else is asked for."""
LARGEST_MICROBATCH = 32
MESH = 5
"""The first columns of a row are dp, tp, pp, cp, ep."""
_SIZES = ("tp", "pp", "cp", "ep", "microbatches", "stages_per_rank")
_CHUNK_ROWS = 40_000


@dataclass(frozen=True, kw_only=True)
class Space:
    """What may vary; None allows all sizes that divide. Raises `InvalidInputError` for values that cannot be."""

    schedules: Sequence[str] = ("1F1B", "Interleaved1F1B", "ZB-H1")
    zero_stages: Sequence[int] = (0, 1, 2, 3)
    recompute: Sequence[str | Recompute] = ("none", "selective", "full")
    sequence_parallel: Sequence[bool] = (False, True)
    tp: Sequence[int] | None = None
    pp: Sequence[int] | None = None
    cp: Sequence[int] | None = None
    ep: Sequence[int] | None = None
    microbatches: Sequence[int] | None = None
    stages_per_rank: Sequence[int] | None = None
    context_by: str = "ring"
    precision: str | Precision = "mixed_adam"

    def __post_init__(self) -> None:
        precision_of(self.precision)
        if self.context_by not in CONTEXT_WAYS:
            raise InvalidInputError.unknown("context_by", self.context_by, "is no way to see all keys", CONTEXT_WAYS)
        checks = {
            "schedules": _schedule,
            "zero_stages": zero_stage_of,
            "recompute": Recompute.parse,
            "sequence_parallel": lambda value: yes_or_no("sequence_parallel", value),
            **{name: _whole(name) for name in _SIZES},
        }
        for name, check in checks.items():
            values = getattr(self, name)
            if values is None and name in _SIZES:
                continue
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise InvalidInputError.because(name, values, "must be one or more values", f"use {name}=[…]")
            object.__setattr__(self, name, tuple(dict.fromkeys(map(check, values))))

    def chunks(self, model: Transformer, num_devices: int, global_batch: int) -> Iterator[Columns]:
        """All layouts that fit the model and use all devices, some ten thousand at a time."""
        tables: list[np.ndarray] = []
        for mesh in self.meshes(model, num_devices, global_batch):
            tables.append(self._variants(model, global_batch, *mesh))
            if sum(map(len, tables)) >= _CHUNK_ROWS:
                yield self._columns(tables)
                tables = []
        if any(map(len, tables)):
            yield self._columns(tables)

    def is_empty(self, model: Transformer, num_devices: int, global_batch: int) -> bool:
        """Whether there is no layout at all."""
        meshes = self.meshes(model, num_devices, global_batch)
        return not any(len(self._variants(model, global_batch, *mesh)) for mesh in meshes)

    def meshes(
        self, model: Transformer, num_devices: int, global_batch: int
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """dp, tp, pp, cp and ep whose ranks are all devices, and whose replicas have equal parts of the batch."""
        shared = math.gcd(model.heads, model.key_value_heads, model.expert_width)
        contexts = [
            c
            for c in divisors(math.gcd(model.seq, num_devices))
            if self.cp or model.seq // c >= LEAST_CONTEXT or c == 1
        ]
        sizes = (
            _allowed(divisors(math.gcd(shared, num_devices)), self.tp),
            _allowed(divisors(math.gcd(model.num_layers, num_devices)), self.pp),
            _allowed(contexts, self.cp),
        )
        for tp, pp, cp in itertools.product(*sizes):
            dp, rest = divmod(num_devices, tp * pp * cp)
            ulysses = self.context_by == "ulysses" and (model.key_value_heads // tp) % cp
            if rest or global_batch % dp or ulysses:
                continue
            experts = math.gcd(model.experts.count, dp * cp) if model.experts else 1
            for ep in _allowed(divisors(experts), self.ep):
                yield dp, tp, pp, cp, ep

    def _variants(
        self, model: Transformer, global_batch: int, dp: int, tp: int, pp: int, cp: int, ep: int
    ) -> np.ndarray:
        """A row for each way to fill this mesh, columns as in `NUMBERS`."""
        share = global_batch // dp
        microbatches = sorted(self.microbatches or range(1, LARGEST_MICROBATCH + 1))
        pipelines = [
            (b, share // b, v, SCHEDULES.index(name))
            for b in microbatches
            if share % b == 0
            for name, v in self._stages(model, pp)
            if pp * (share // b) * v <= MOST_PASSES and (v == 1 or (share // b) % pp == 0)
        ]
        splits = (False,) if tp == 1 or (model.seq // cp) % tp else self.sequence_parallel
        zero_stages = self.zero_stages if dp * cp > 1 else self.zero_stages[:1]
        recompute = [RECOMPUTE.index(way) for way in self.recompute]
        rows = [
            (dp, tp, pp, cp, ep, zero, split, b, m, v, name, way)
            for (b, m, v, name), zero, split, way in itertools.product(pipelines, zero_stages, splits, recompute)
        ]
        return np.array(rows, float).reshape(-1, len(NUMBERS))

    def _stages(self, model: Transformer, pp: int) -> Iterator[tuple[str, int]]:
        """Schedules, and stages on a rank; without a pipeline they are all the same."""
        if pp == 1:
            yield ("1F1B" if "1F1B" in self.schedules else self.schedules[0]), 1
            return
        for name in self.schedules:
            stages = divisors(model.num_layers // pp)[1:] if name == "Interleaved1F1B" else [1]
            yield from ((name, v) for v in _allowed(stages, self.stages_per_rank))

    def _columns(self, tables: list[np.ndarray]) -> Columns:
        return Columns.from_table(np.concatenate(tables), self.precision, self.context_by)


def divisors(number: int) -> list[int]:
    """All divisors, in order.

    >>> divisors(12), divisors(1_000_003)
    ([1, 2, 3, 4, 6, 12], [1, 1000003])
    """
    below = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return below + [number // d for d in reversed(below) if d * d != number]


def _allowed(found: list[int], wanted: Sequence[int] | None) -> list[int]:
    return found if wanted is None else [number for number in found if number in wanted]


def _schedule(name: str) -> str:
    known = recipe(name, "schedules").name
    check_schedule(known, "schedules")
    return known


def _whole(name: str):  # type: ignore[no-untyped-def]
    return lambda value: whole_number(name, value)
