"""Many layouts at once: a column of numbers for each field of a layout."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from vizkit.layout import Layout
from vizkit.memory.states import Precision
from vizkit.planner.pipelines import PIPELINE_COSTS
from vizkit.transformer import Recompute

SCHEDULES = tuple(PIPELINE_COSTS)
RECOMPUTE = tuple(Recompute)
NUMBERS = (
    "dp", "tp", "pp", "cp", "ep", "zero_stage", "sequence_parallel", "microbatch", "num_microbatches",
    "stages_per_rank", "schedule", "recompute",
)  # fmt: skip
"""`schedule` and `recompute` are positions in `SCHEDULES` and `RECOMPUTE`."""


@dataclass(frozen=True)
class Columns:
    """Arrays of whole numbers as floats, all equally long; a row is a layout, and all share the last two fields."""

    dp: np.ndarray
    tp: np.ndarray
    pp: np.ndarray
    cp: np.ndarray
    ep: np.ndarray
    zero_stage: np.ndarray
    sequence_parallel: np.ndarray
    microbatch: np.ndarray
    num_microbatches: np.ndarray
    stages_per_rank: np.ndarray
    schedule: np.ndarray
    recompute: np.ndarray
    precision: str | Precision = "mixed_adam"
    context_by: str = "ring"

    @classmethod
    def of(cls, layouts: list[Layout]) -> Columns:
        """Layouts that share their precision and their way to split contexts."""
        rows = [
            [
                *(getattr(layout, name) for name in NUMBERS[:9]),
                layout.local_stages,
                SCHEDULES.index(layout.schedule),
                RECOMPUTE.index(Recompute.parse(layout.recompute)),
            ]
            for layout in layouts
        ]
        table = np.array(rows, float).reshape(-1, len(NUMBERS))
        return cls.from_table(table, layouts[0].precision, layouts[0].context_by)

    @classmethod
    def from_table(cls, table: np.ndarray, precision: str | Precision, context_by: str) -> Columns:
        """Of a table with a column for each of `NUMBERS`."""
        return cls(
            **dict(zip(NUMBERS, np.ascontiguousarray(table.T), strict=True)), precision=precision, context_by=context_by
        )

    @classmethod
    def join(cls, parts: list[Columns]) -> Columns:
        """The rows of all parts, of which there is one at least."""
        table = np.concatenate([part.table for part in parts])
        return cls.from_table(table, parts[0].precision, parts[0].context_by)

    @property
    def table(self) -> np.ndarray:
        """A row for each layout, a column for each of `NUMBERS`."""
        return np.column_stack([getattr(self, name) for name in NUMBERS])

    def __len__(self) -> int:
        return len(self.dp)

    def where(self, chosen: np.ndarray) -> Columns:
        """The rows of a mask or of positions."""
        return dataclasses.replace(self, **{name: getattr(self, name)[chosen] for name in NUMBERS})

    def layout(self, row: int) -> Layout:
        """One row as a `Layout`, checked."""
        whole = {name: int(getattr(self, name)[row]) for name in NUMBERS}
        sizes: dict[str, Any] = {name: whole[name] for name in NUMBERS[:9]}
        return Layout(
            **{**sizes, "sequence_parallel": bool(whole["sequence_parallel"])},
            stages_per_rank=whole["stages_per_rank"],
            schedule=SCHEDULES[whole["schedule"]],
            recompute=RECOMPUTE[whole["recompute"]],
            precision=self.precision,
            context_by=self.context_by,
        )

    @property
    def replicas(self) -> np.ndarray:
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> np.ndarray:
        return self.dp * self.cp / self.ep

    @property
    def full(self) -> np.ndarray:
        """1 where everything is computed again, else 0."""
        return (self.recompute == RECOMPUTE.index(Recompute.FULL)).astype(float)

    @property
    def selective(self) -> np.ndarray:
        return (self.recompute == RECOMPUTE.index(Recompute.SELECTIVE)).astype(float)

    def is_schedule(self, name: str) -> np.ndarray:
        return self.schedule == SCHEDULES.index(name)


assert tuple(field.name for field in fields(Columns))[: len(NUMBERS)] == NUMBERS
