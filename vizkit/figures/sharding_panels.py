"""A panel for each rank that shows which part of a tensor it holds: boxes of a tensor as polygons in a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vizkit.figures.mesh_grid import MeshGrid
from vizkit.sharding import Move, Pieces

LEFT, TOP, WIDTH, HEIGHT = 0.06, 0.32, 0.88, 0.62
"""The panel within a rank's cell; the rest above it is for words."""


@dataclass(frozen=True, eq=False)
class Boxes:
    """Parts of a tensor, each in the panel at (`x`, `y`) and in one of the colours: `start` and `stop` by dim."""

    start: np.ndarray
    stop: np.ndarray
    x: np.ndarray
    y: np.ndarray
    color: np.ndarray

    def of_color(self, color: int, num_colors: int) -> Boxes:
        """Those drawn in this colour, where colours repeat."""
        chosen = self.color % num_colors == color
        return Boxes(self.start[chosen], self.stop[chosen], self.x[chosen], self.y[chosen], self.color[chosen])

    def first(self, number: int) -> Boxes:
        return Boxes(*(getattr(self, name)[:number] for name in self.__dataclass_fields__))

    @classmethod
    def joined(cls, parts: Sequence[Boxes]) -> Boxes:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))


@dataclass(frozen=True, eq=False)
class Panels:
    """Where each rank's panel stands, which dims of the tensor run down and across, and the pieces that have colours.

    `rows` is None for a tensor of one dim, which runs across. Each coloured piece has a start and a stop.
    """

    grid: MeshGrid
    shape: tuple[int, ...]
    rows: int | None
    columns: int
    color_start: np.ndarray
    color_stop: np.ndarray

    def outlines(self) -> Boxes:
        """The whole tensor in each panel."""
        world_size = len(self.grid.x)
        whole = np.tile(np.array(self.shape), (world_size, 1))
        return Boxes(np.zeros_like(whole), whole, self.grid.x, self.grid.y, np.zeros(world_size, np.int64))

    def held(self, pieces: Pieces) -> Boxes:
        """What each rank holds, cut where colours change."""
        return self._cut(pieces.start, pieces.stop, self.grid.x, self.grid.y)

    def travelled(self, moves: Sequence[Move], progress: float) -> Boxes:
        """What these messages carry, this far on its way from panel to panel."""
        src, dst = (np.array([getattr(move, end) for move in moves], np.int64) for end in ("src", "dst"))
        start, stop = (
            np.array([getattr(move, end) for move in moves], np.int64).reshape(-1, len(self.shape))
            for end in ("start", "stop")
        )
        x, y = (at[src] + (at[dst] - at[src]) * progress for at in (self.grid.x, self.grid.y))
        return self._cut(start, stop, x, y)

    def _cut(self, start: np.ndarray, stop: np.ndarray, x: np.ndarray, y: np.ndarray) -> Boxes:
        """Boxes in parts of one colour each, without empty ones."""
        start = np.maximum(start[:, None], self.color_start)
        stop = np.minimum(stop[:, None], self.color_stop)
        box, color = np.nonzero((start < stop).all(axis=2))
        return Boxes(start[box, color], stop[box, color], x[box], y[box], color)

    def polygons(self, boxes: Boxes) -> dict[str, np.ndarray]:
        """Corners of all boxes, each closed and followed by a gap."""
        left, right = (self._along(self.columns, end, boxes.x + LEFT, WIDTH) for end in (boxes.start, boxes.stop))
        if self.rows is None:
            top, bottom = boxes.y + TOP, boxes.y + TOP + HEIGHT
        else:
            top, bottom = (self._along(self.rows, end, boxes.y + TOP, HEIGHT) for end in (boxes.start, boxes.stop))
        gap = np.full(len(left), np.nan)
        x = np.stack([left, right, right, left, left, gap], axis=1)
        y = np.stack([top, top, bottom, bottom, top, gap], axis=1)
        return {"x": x.ravel().astype(np.float32), "y": y.ravel().astype(np.float32)}

    def _along(self, dim: int, end: np.ndarray, edge: np.ndarray, extent: float) -> np.ndarray:
        return edge + extent * end[:, dim] / self.shape[dim]


def drawn_dims(shape: Sequence[int], sharded: Sequence[int]) -> tuple[int | None, int]:
    """The dims that run down and across: those that are cut, then the first ones; one alone runs across.

    >>> drawn_dims((8, 8), []), drawn_dims((8,), [0]), drawn_dims((4, 8, 16), [2]), drawn_dims((4, 8, 16), [1, 2])
    ((0, 1), (None, 0), (0, 2), (1, 2))
    """
    if len(shape) == 1:
        return None, 0
    chosen = sorted({*sharded})[:2]
    if chosen == [1] and len(shape) == 2:
        return 0, 1
    others = [dim for dim in range(len(shape)) if dim not in chosen]
    first, second = sorted([*chosen, *others[: 2 - len(chosen)]])
    return first, second
