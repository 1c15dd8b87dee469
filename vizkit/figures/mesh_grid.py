"""Where each rank of a mesh stands in a picture: inner axes as cells, outer axes as blocks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vizkit.figures.theme import TEXT
from vizkit.mesh import Mesh

BLOCK_GAP = 0.3
MAX_BLOCK_LABELS = 40
MAX_CELL_LABELS = 32
MAX_NAMED_COLUMNS = 12


@dataclass(frozen=True)
class Level:
    """A part of an axis that runs in one direction: places `step` apart, `size` of them.

    A long axis is wrapped as two levels, the outer of which counts whole rows of the inner.
    """

    axis: int
    size: int
    step: int = 1
    is_across: bool = True
    modulus: int = 0

    def place(self, coordinates: np.ndarray) -> np.ndarray:
        """Position of each rank on this level, from its coordinates on all axes."""
        along = coordinates[self.axis] // self.step
        return along % self.modulus if self.modulus else along

    def label(self, name: str, place: int, axis_size: int) -> str:
        """`tp 3`, or `tp 16–31` where a place holds a row of the axis."""
        first, last = place * self.step, min((place + 1) * self.step, axis_size) - 1
        return f"{name} {first}" if first == last else f"{name} {first}–{last}"


@dataclass(frozen=True, eq=False)
class MeshGrid:
    """Columns and rows of ranks (`column`, `row`, by rank) and where each begins in the picture, in cells.

    `column_starts` and `row_starts` have gaps between blocks; cells are 1 wide and 1 high.
    """

    mesh: Mesh
    levels: tuple[Level, ...]
    column: np.ndarray
    row: np.ndarray
    column_starts: np.ndarray
    row_starts: np.ndarray

    @classmethod
    def of(cls, mesh: Mesh, widest: float) -> MeshGrid:
        """Axes of over one rank in turn across and down, the last across; wrapped where one side is over `widest` times
        the other.

        >>> MeshGrid.of(Mesh(dp=2, tp=4), 8).column.tolist(), MeshGrid.of(Mesh(tp=16), 8).row.tolist()
        ([0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1])
        """
        speaking = [axis for axis, size in enumerate(mesh.sizes) if size > 1] or [len(mesh.sizes) - 1]
        levels = [
            Level(axis, mesh.sizes[axis], is_across=(len(speaking) - turn) % 2 == 1)
            for turn, axis in enumerate(speaking)
        ]
        levels = _wrapped(levels, widest)
        coordinates = np.indices(mesh.sizes).reshape(len(mesh.sizes), -1)
        column, column_starts = _positions([level for level in levels if level.is_across], coordinates)
        row, row_starts = _positions([level for level in levels if not level.is_across], coordinates)
        return cls(mesh, tuple(levels), column, row, column_starts, row_starts)

    @property
    def x(self) -> np.ndarray:
        """Left edge of each rank's cell."""
        return self.column_starts[self.column]

    @property
    def y(self) -> np.ndarray:
        """Upper edge of each rank's cell; rows run downwards."""
        return self.row_starts[self.row]

    @property
    def width(self) -> float:
        return float(self.column_starts[-1]) + 1

    @property
    def height(self) -> float:
        return float(self.row_starts[-1]) + 1

    def inner(self, is_across: bool) -> Level | None:
        """The level that names single columns or rows."""
        found = [level for level in self.levels if level.is_across is is_across]
        return found[-1] if found else None

    def ticks(self, is_across: bool) -> dict[str, object]:
        """Tick values and texts of the innermost level in this direction; thinned, and bare numbers, where many."""
        level, starts = self.inner(is_across), self.column_starts if is_across else self.row_starts
        if level is None:
            return {"tickvals": [], "ticktext": []}
        size = self.mesh.sizes[level.axis]
        name = "" if self._is_bare(is_across) else self.mesh.names[level.axis]
        chosen = range(0, len(starts), -(-len(starts) // MAX_CELL_LABELS))
        texts = [level.label(name, place % level.size, size).strip() for place in chosen]
        if level.modulus:  # rows of a wrapped axis begin anew: the block's label says with which place
            texts = [f"{name} +{place % level.size}".strip() for place in chosen]
        return {"tickvals": [float(starts[place]) + 0.5 for place in chosen], "ticktext": texts, "tickangle": 0}

    def _is_bare(self, is_across: bool) -> bool:
        """Whether columns have no room for the name of their axis, which then stands at their left."""
        return is_across and len(self.column_starts) > MAX_NAMED_COLUMNS

    def block_labels(self) -> list[dict[str, object]]:
        """Annotations that name the blocks of outer levels: above the columns, to the left of the rows."""
        level = self.inner(is_across=True)
        labels = [_corner(self.mesh.names[level.axis])] if level and self._is_bare(is_across=True) else []
        for is_across, starts in ((True, self.column_starts), (False, self.row_starts)):
            levels = [level for level in self.levels if level.is_across is is_across]
            for depth, level in enumerate(levels[:-1]):
                span = int(np.prod([inner.size for inner in levels[depth + 1 :]]))
                firsts = range(0, len(starts), span)
                if len(firsts) > MAX_BLOCK_LABELS:
                    continue
                for place, first in enumerate(firsts):
                    middle = float(starts[first] + starts[min(first + span, len(starts)) - 1] + 1) / 2
                    text = level.label(self.mesh.names[level.axis], place % level.size, self.mesh.sizes[level.axis])
                    labels.append(_label(f"<b>{text}</b>", middle, is_across, len(levels) - 1 - depth))
        return labels

    def depth(self, is_across: bool) -> int:
        """How many levels of blocks stand outside the cells in this direction."""
        return max(sum(level.is_across is is_across for level in self.levels) - 1, 0)


LABEL_PX = 20
ROW_LABEL_PX = 74


def _label(text: str, middle: float, is_across: bool, outward: int) -> dict[str, object]:
    common = {"text": text, "showarrow": False, "font": {"size": 12, "color": TEXT}}
    if is_across:
        return {
            **common, "x": middle, "xref": "x", "y": 1, "yref": "paper", "yanchor": "bottom",
            "yshift": 2 + LABEL_PX * outward,
        }  # fmt: skip
    return {
        **common, "y": middle, "yref": "y", "x": 0, "xref": "paper", "xanchor": "right",
        "xshift": -ROW_LABEL_PX * outward,
    }  # fmt: skip


def _corner(name: str) -> dict[str, object]:
    return {
        "text": name, "showarrow": False, "font": {"size": 12, "color": TEXT}, "x": 0, "xref": "paper",
        "xanchor": "right", "xshift": -12, "y": 1, "yref": "paper", "yanchor": "bottom", "yshift": 2,
    }  # fmt: skip


def _wrapped(levels: list[Level], widest: float) -> list[Level]:
    """The same with the longest axis of the longer side cut in two, where the picture would be a strip."""
    across, down = (_length(levels, is_across) for is_across in (True, False))
    if max(across, down) <= widest * min(across, down):
        return levels
    is_across = across > down
    longest = max((level for level in levels if level.is_across is is_across), key=lambda level: level.size)
    rows = max(2, round((max(across, down) / (min(across, down) * min(widest, 2))) ** 0.5))
    kept = _near_divisor(longest.size, -(-longest.size // rows))
    if kept >= longest.size:
        return levels
    outer = replace(longest, size=-(-longest.size // kept), step=kept, is_across=not is_across)
    inner = replace(longest, size=kept, modulus=kept)
    position = levels.index(longest)
    return [*levels[:position], outer, inner, *levels[position + 1 :]]


def _near_divisor(size: int, wanted: int) -> int:
    """A divisor of `size` close to `wanted`, so that all rows are full; `wanted` itself where there is none."""
    fitting = [d for d in range(-(-wanted // 2), round(wanted * 1.35) + 1) if size % d == 0]
    return max(fitting, default=wanted)


def _length(levels: Sequence[Level], is_across: bool) -> int:
    return int(np.prod([level.size for level in levels if level.is_across is is_across]))


def _positions(levels: Sequence[Level], coordinates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Column (or row) of each rank, and where each column begins: a gap for each level that moves on."""
    total = _length(levels, levels[0].is_across) if levels else 1
    place = np.zeros(coordinates.shape[1], np.int64)
    gaps = np.zeros(total)
    within = total
    for depth, level in enumerate(levels):
        within //= level.size
        place = place * level.size + level.place(coordinates)
        if depth < len(levels) - 1:
            gaps[within::within] += BLOCK_GAP
    return place, np.arange(total) + np.cumsum(gaps)
