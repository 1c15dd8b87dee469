"""A plan: layouts in order of their predicted time, each with what it costs and why it is there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.hardware.cluster import Cluster
from vizkit.layout import Layout
from vizkit.planner.columns import RECOMPUTE, SCHEDULES, Columns
from vizkit.planner.prediction import Prediction, predict
from vizkit.planner.program import Program
from vizkit.planner.reasons import reason
from vizkit.planner.steps import Steps
from vizkit.trace import Clock
from vizkit.transformer import Recompute, Transformer

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 5
_SIZES = ("dp", "tp", "pp", "cp", "ep", "zero_stage", "stages_per_rank", "microbatch", "num_microbatches")
_SECONDS = ("matrix_s", "elementwise_s", "tp_s", "pp_s", "cp_s", "ep_s", "dp_s", "bubble_s", "optimizer_s")


@dataclass(frozen=True)
class Choice:
    """One layout of a plan: its `rank` from 1 on, its `prediction`, and the `reason` why it stands before the next."""

    rank: int
    layout: Layout
    prediction: Prediction
    reason: str

    def __str__(self) -> str:
        return f"{self.rank}. {self.layout}\n{self.prediction}\n{self.reason}"


@dataclass(frozen=True, eq=False)
class Found:
    """Layouts that fit and their times, as arrays."""

    rows: Columns
    steps: Steps

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, chosen: np.ndarray) -> Found:
        """The rows of a mask or of positions."""
        return Found(self.rows.where(chosen), self.steps.where(chosen))

    @classmethod
    def join(cls, parts: list[Found]) -> Found:
        """The rows of all parts, of which there is one at least."""
        return cls(Columns.join([part.rows for part in parts]), Steps.join([part.steps for part in parts]))


@dataclass(frozen=True, eq=False)
class Plan(Sequence[Choice]):
    """What `vk.plan` found: a sequence of `Choice`, fastest first, one for each way to divide the devices among axes.

    Times are on the clock "ideal". `considered` layouts were predicted, `fitting` of them fit into memory; where none
    does, the plan is empty and `remedies` say what would make one fit; else they say what the fastest that does not fit
    lacks.
    """

    model: Transformer
    cluster: Cluster
    global_batch: int
    program: Program
    considered: int
    fitting: int
    remedies: tuple[str, ...]
    ranked: Found | None = field(repr=False)
    front: Found | None = field(repr=False)
    sample: Found | None = field(repr=False)

    clock = Clock.IDEAL

    def __len__(self) -> int:
        return 0 if self.ranked is None else len(self.ranked)

    @overload
    def __getitem__(self, index: int) -> Choice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Choice, ...]: ...
    def __getitem__(self, index: int | slice) -> Choice | tuple[Choice, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        at = range(len(self))[index]
        assert self.ranked is not None
        return self._choice(self.ranked, at)

    def _choice(self, found: Found, at: int) -> Choice:
        first = self._prediction(found, at)
        second = self._prediction(found, at + 1) if at + 1 < len(found) else None
        return Choice(at + 1, first.layout, first, reason(first, second, self.cluster))

    def _prediction(self, found: Found, at: int) -> Prediction:
        return predict(self.model, found.rows.layout(at), self.cluster, program=self.program)

    @property
    def best(self) -> Choice:
        """The fastest layout; raises `InvalidInputError`, with the remedies, where none fits."""
        if not len(self):
            raise InvalidInputError.because(
                "model", _billions(self.model), f"fits on no layout of {self.cluster}", "; ".join(self.remedies)
            )
        return self[0]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why each of the first five stands before the next."""
        return tuple(choice.reason for choice in self[:SHOWN])

    @property
    def pareto(self) -> tuple[Choice, ...]:
        """From the smallest to the fastest: of all layouts that fit, those than which none is smaller and as fast.

        The fastest has rank 1; each reason says why it is faster than the next smaller one.
        """
        if self.front is None:
            return ()
        fastest_first = self.front.where(np.arange(len(self.front))[::-1])
        choices = [self._choice(fastest_first, at) for at in range(len(fastest_first))]
        return tuple(reversed(choices))

    @property
    def table(self) -> pd.DataFrame:
        """A row for each choice: sizes, bytes, and what the seconds of a step are spent on."""
        return _table(self.ranked, self.model, self.cluster)

    @property
    def points(self) -> pd.DataFrame:
        """The same of up to 2,000 layouts that fit, a sample of all, in no order: memory against time, to plot."""
        return _table(self.sample, self.model, self.cluster)

    def __str__(self) -> str:
        tokens = self.global_batch * self.model.seq
        sequences = "sequences" if self.global_batch > 1 else "sequence"
        lines = [
            f"{_billions(self.model)} on {self.cluster}",
            f"{self.global_batch:,} {sequences} of {self.model.seq:,}, {tokens:,} tokens a step; "
            f"{self.considered:,} layouts, {self.fitting:,} fit; times are {self.clock.value}",
        ]
        if self:
            lines += [*_lines(self), *(f"{choice.rank}. {choice.reason}" for choice in self[:SHOWN])]
        return "\n".join([*lines, *self.remedies])


def _table(found: Found | None, model: Transformer, cluster: Cluster) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({} if found is None else _columns(found, model, cluster), columns=list(COLUMNS))


def _columns(found: Found, model: Transformer, cluster: Cluster) -> dict[str, Any]:
    rows, taken = found.rows, found.steps
    from vizkit.memory.states import precision_of

    step_s = taken.step_s
    batch = rows.dp * rows.microbatch * rows.num_microbatches
    peak = cluster.device.peak(precision_of(rows.precision).parameter_bytes)
    by_way = {code: float(model.flops(1, way)) for code, way in enumerate(RECOMPUTE)}
    done = np.array([by_way[code] for code in range(len(RECOMPUTE))])[rows.recompute.astype(int)]
    each = batch / step_s / cluster.num_devices
    return {
        **{name: getattr(rows, name).astype(int) for name in _SIZES},
        "sequence_parallel": rows.sequence_parallel > 0,
        "schedule": [SCHEDULES[code] for code in rows.schedule.astype(int)],
        "recompute": [RECOMPUTE[code].value for code in rows.recompute.astype(int)],
        "memory_GB": taken.memory_bytes / 1e9,
        "step_s": step_s,
        "tokens_per_s": batch * model.seq / step_s,
        "mfu": each * model.flops(1, Recompute.NONE) / peak,
        "tflops_per_device": each * done / 1e12,
        "bubble": taken.bubble_s / step_s,
        "compute_s": taken.matrix_s + taken.elementwise_s,
        **{name: getattr(taken, name) for name in _SECONDS},
    }


COLUMNS = (
    "dp", "tp", "pp", "cp", "ep", "zero_stage", "sequence_parallel", "schedule", "stages_per_rank", "microbatch",
    "num_microbatches", "recompute", "memory_GB", "step_s", "tokens_per_s", "mfu", "tflops_per_device", "bubble",
    "compute_s", *_SECONDS,
)  # fmt: skip
"""Of `Plan.table`: GB are 1e9 bytes of the fullest rank, `bubble` is a share of the step, seconds are of one step."""


def _lines(plan: Plan) -> Iterator[str]:
    """The first choices in fixed width."""
    heads = (
        "",
        "dp",
        "tp",
        "pp",
        "cp",
        "ep",
        "ZeRO",
        "schedule",
        "b×m",
        "recompute",
        "GB",
        "step (s)",
        "MFU",
        "bubble",
        "exposed",
    )
    cells: list[tuple[str, ...]] = [heads]
    for choice in plan[:SHOWN]:
        layout, found = choice.layout, choice.prediction
        stages = f" ×{layout.local_stages}" if layout.local_stages > 1 else ""
        cells.append(
            (
                f"{choice.rank}.",
                *(str(getattr(layout, name)) for name in ("dp", "tp", "pp", "cp", "ep", "zero_stage")),
                (layout.schedule + stages) if layout.pp > 1 else "–",
                f"{layout.microbatch}×{layout.num_microbatches}",
                Recompute.parse(layout.recompute).value,
                f"{found.memory_bytes / 1e9:.1f}",
                f"{found.step_s:.4g}",
                f"{found.model_flops_utilisation:.1%}",
                f"{found.bubble_share:.1%}",
                f"{found.exposed_total_s / found.step_s:.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _billions(model: Transformer) -> str:
    number = model.num_params()
    exponent = min(int(math.log10(number)) // 3, 4)
    names = ("", " thousand", " million", " billion", " trillion")
    return f"{number / 1000**exponent:.4g}{names[exponent]} parameters"
