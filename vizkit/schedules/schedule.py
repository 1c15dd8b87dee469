"""A pipeline schedule as data: which actions each rank does, in which order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.schedules.actions import ACTION_KINDS, Action, Cell
from vizkit.trace import KINDS, SpanKind

if TYPE_CHECKING:
    from vizkit.schedules.checker import Finding

_COLUMNS = ("offsets", "kind", "stage", "microbatch", "joined")
_ALWAYS_TAKEN = 1024
"""Numbers of stages and microbatches below this one are taken from any schedule."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Columns of actions, rank after rank, each rank's in the order in which it does them.

    Rank r's actions stand at `offsets[r]:offsets[r + 1]` of `kind` (codes, positions in `KINDS`), `stage`, `microbatch`
    and `joined`, which is true where an action overlaps with the one before it. `stage_ranks[s]` is the rank that holds
    stage s. With `num_pipelines` = 2 (DualPipe) the stages are two chains of equal length, one for each half of the
    microbatches. Get one from `vizkit.schedule`, or write your own with `Schedule.from_rows` or as CSV.

    >>> s = Schedule.from_rows([["0F0", "0B0"], ["1F0", "1B0"]])
    >>> s.num_ranks, s.num_stages, s.num_microbatches, len(s)
    (2, 2, 1, 4)
    >>> print(s)
    0F0 0B0
    1F0 1B0
    """

    name: str
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    offsets: np.ndarray
    kind: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    joined: np.ndarray
    num_pipelines: int = 1
    notes: tuple[str, ...] = field(default=())
    """What a reader should know of how this schedule was read, such as the dialect of a CSV file."""

    def __post_init__(self) -> None:
        for name in _COLUMNS:
            getattr(self, name).flags.writeable = False
        ends = self.offsets
        if ends.ndim != 1 or not len(ends) or ends[0] != 0 or ends[-1] != len(self) or (np.diff(ends) < 0).any():
            raise InvalidInputError.because(
                "offsets",
                ends.tolist(),
                f"do not divide {len(self)} actions among ranks",
                "go from 0 to the last action",
            )
        for name in _COLUMNS[1:]:
            if getattr(self, name).shape != (len(self),):
                raise InvalidInputError.because(
                    name, getattr(self, name).shape, f"there are {len(self)} actions", "give one entry for each"
                )
        if len(self) and self.kind.max() >= len(KINDS):
            raise InvalidInputError.because(
                "kind", int(self.kind.max()), f"there are {len(KINDS)} kinds", "give codes, such as SpanKind('F').code"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy that has travelled is as read-only as the original."""
        self.__dict__.update(state)
        self.__post_init__()

    @classmethod
    def from_columns(
        cls,
        name: str,
        *,
        num_microbatches: int,
        stage_ranks: Sequence[int],
        offsets: Any,
        kind: Any,
        stage: Any,
        microbatch: Any,
        joined: Any = None,
        num_pipelines: int = 1,
        notes: Sequence[str] = (),
    ) -> Schedule:
        """A schedule from arrays, which become read-only; `joined` defaults to no overlap.

        Raises `InvalidInputError` where their lengths do not fit. `check` says whether their numbers do.

        >>> one = {"num_microbatches": 1, "stage_ranks": [0], "stage": [0, 0], "microbatch": [0, 0]}
        >>> print(Schedule.from_columns("one rank", offsets=[0, 2], kind=[0, 1], **one))
        0F0 0B0
        """
        codes = np.asarray(kind, np.uint8)
        return cls(
            name,
            num_microbatches,
            tuple(int(rank) for rank in stage_ranks),
            np.asarray(offsets, np.int64),
            codes,
            np.asarray(stage, np.int32),
            np.asarray(microbatch, np.int32),
            np.zeros(len(codes), bool) if joined is None else np.asarray(joined, bool),
            num_pipelines,
            tuple(notes),
        )

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Sequence[str | Action | Sequence[str | Action] | None]],
        *,
        name: str = "custom",
        num_pipelines: int = 1,
        notes: Sequence[str] = (),
    ) -> Schedule:
        """A schedule of one's own: a row for each rank, a cell for each action, in order.

        A cell is an `Action` or its text (`2F0`), a tuple of two that overlap or their text (`0F1+0B0`), or None or ""
        for an idle cell, which is left out: when a rank idles follows from what it waits for. A stage lies on the first
        rank that names it. Raises `InvalidInputError` where there is no action, a row is no list, or a cell is none of
        these; `check` says whether it can run.

        >>> len(Schedule.from_rows([["0F0", None, ("0F1", "0B0"), "0B1"], "1F0 1B0 1F1 1B1".split()]))
        8
        """
        actions: list[Action] = []
        joined: list[bool] = []
        offsets = [0]
        stage_ranks: dict[int, int] = {}
        if not isinstance(rows, Iterable) or isinstance(rows, (str, Mapping)):
            raise InvalidInputError.because("rows", rows, "are a list of lists", "write [['0F0', '0B0']] for one rank")
        for rank, row in enumerate(rows):
            if not isinstance(row, Iterable) or isinstance(row, (str, Mapping)):
                raise InvalidInputError.because(
                    f"rows[{rank}]", row, "a row is a list of cells", "write ['0F0', '0B0'], or '0F0 0B0'.split()"
                )
            for cell in row:
                for position, part in enumerate(_as_cell(cell)):
                    actions.append(part)
                    joined.append(position > 0)
                    stage_ranks.setdefault(part.stage, rank)
            offsets.append(len(actions))
        if not actions:
            raise InvalidInputError.because("rows", rows, "a schedule has one action or more", "write cells like 0F0")
        for action in actions:
            if not numbers_fit(action.stage, action.microbatch, len(actions)):
                raise InvalidInputError.because(
                    "action", str(action), "stages and microbatches are numbered from 0 without a gap", "renumber them"
                )
        num_stages = max(stage_ranks) + 1
        return cls.from_columns(
            name,
            num_microbatches=max(action.microbatch for action in actions) + 1,
            stage_ranks=[stage_ranks.get(stage, 0) for stage in range(num_stages)],
            offsets=offsets,
            kind=[action.kind.code for action in actions],
            stage=[action.stage for action in actions],
            microbatch=[action.microbatch for action in actions],
            joined=joined,
            num_pipelines=num_pipelines,
            notes=notes,
        )

    @classmethod
    def from_csv(cls, path: str | Path, *, name: str | None = None) -> Schedule:
        """The schedule in a CSV file in the grammar of `torch.distributed.pipelining`, in either dialect of `B`.

        `name` defaults to the file's. Raises `InvalidInputError` naming row and cell of what cannot be read.
        """
        from vizkit.schedules.torch_csv import read_csv

        return read_csv(path, name=name)

    def to_csv(self, path: str | Path) -> Path:
        """Writes the schedule in the grammar of `torch.distributed.pipelining`, and returns the path."""
        from vizkit.schedules.torch_csv import write_csv

        return write_csv(self, path)

    def check(self) -> list[Finding]:
        """What keeps this schedule from running, as findings that name rank, cell and reason; [] if nothing does.

        >>> print(*Schedule.from_rows([["0F0"], ["1F0", "1B0"]]).check())
        rank 0 (0B0): is missing; a schedule that trains has a backward, B or I and W, for every microbatch on every \
stage: add 0B0 to rank 0
        """
        from vizkit.schedules.checker import check

        return check(self)

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def stages_per_pipeline(self) -> int:
        """Stages that one microbatch passes through."""
        return self.num_stages // self.num_pipelines

    @functools.cached_property
    def rank(self) -> np.ndarray:
        """The rank of each action."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.offsets))

    def stages_of(self, rank: int) -> list[int]:
        """The stages that lie on a rank, in order."""
        return [stage for stage, owner in enumerate(self.stage_ranks) if owner == rank]

    def is_first(self, stage: int) -> bool:
        """Whether a microbatch enters the model on this stage."""
        return stage % self.stages_per_pipeline == 0

    def is_last(self, stage: int) -> bool:
        """Whether the loss is computed on this stage."""
        return (stage + 1) % self.stages_per_pipeline == 0

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into I and W."""
        return bool((self.kind == SpanKind.BACKWARD_INPUT.code).any())

    @property
    def has_backward(self) -> bool:
        """Whether the schedule trains; one without any backward serves inference."""
        return bool((self.kind != SpanKind.FORWARD.code).any())

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, index: int) -> Action:
        return Action(int(self.stage[index]), KINDS[self.kind[index]], int(self.microbatch[index]))

    def __iter__(self) -> Iterator[Action]:
        for code, stage, microbatch in zip(
            self.kind.tolist(), self.stage.tolist(), self.microbatch.tolist(), strict=True
        ):
            yield Action(stage, KINDS[code], microbatch)

    @property
    def rows(self) -> list[list[Cell]]:
        """A list of cells for each rank; a cell is a tuple of one action, or of two that overlap."""
        actions, joined = list(self), self.joined.tolist()
        rows: list[list[Cell]] = []
        for start, end in pairwise(self.offsets.tolist()):
            row: list[Cell] = []
            for index in range(start, end):
                row[-1:] = [(*row[-1], actions[index])] if joined[index] else [*row[-1:], (actions[index],)]
            rows.append(row)
        return rows

    def __eq__(self, other: object) -> bool:
        """Same actions in the same order on the same ranks; name and notes do not count."""
        if not isinstance(other, Schedule):
            return NotImplemented
        return (self.stage_ranks, self.num_pipelines) == (other.stage_ranks, other.num_pipelines) and all(
            np.array_equal(getattr(self, column), getattr(other, column)) for column in _COLUMNS
        )

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return "\n".join(" ".join("+".join(map(str, cell)) for cell in row) for row in self.rows)

    def __repr__(self) -> str:
        said = "".join(f"; {note}" for note in self.notes)
        return (
            f"Schedule({self.name!r}, {self.num_ranks} ranks, {self.num_stages} stages, "
            f"{self.num_microbatches} microbatch{'es' * (self.num_microbatches > 1)}, {len(self):,} actions{said})"
        )


def numbers_fit(stage: int, microbatch: int, num_actions: int) -> bool:
    """Whether a schedule of so many actions can have this stage and this microbatch; small gaps are left to `check`."""
    largest = max(_ALWAYS_TAKEN, num_actions)
    return 0 <= stage < largest and 0 <= microbatch < largest


def _as_cell(cell: str | Action | Sequence[str | Action] | None) -> Cell:
    if cell is None or cell == "":
        return ()
    parts = cell.split("+") if isinstance(cell, str) else cell if isinstance(cell, (tuple, list)) else (cell,)
    actions = tuple(Action.parse(part) for part in parts)
    if len(actions) > 1 and not (
        len(actions) == 2 and actions[0].kind is SpanKind.FORWARD and actions[1].kind in ACTION_KINDS[1:]
    ):
        raise InvalidInputError.because(
            "cell",
            "+".join(map(str, actions)),
            "only a forward and a backward overlap, in this order",
            "write a tuple of two, such as ('0F7', '7B3')",
        )
    return actions
