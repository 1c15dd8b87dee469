"""Cells of a mesh as a heat map: one brick a rank, narrow ones between blocks, and colours that repeat."""

from __future__ import annotations

import numpy as np

from vizkit.figures.mesh_grid import MeshGrid
from vizkit.figures.theme import BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILLION, YELLOW

CELL_COLORS = (SKY_BLUE, VERMILLION, YELLOW, BLUE, ORANGE, GREEN, PURPLE)
"""Light and dark in turn, so that neighbours differ without colour vision too."""

CASING, CORE = "#1A1A1A", "#FFFFFF"
"""What communicates has a white edge in a dark casing, seen on every colour and on both pages."""


def cells(grid: MeshGrid) -> dict[str, object]:
    """The heat map without its values, which are numbers of colours, on the bricks of `on_grid`."""
    return {
        "type": "heatmap", "x": _brick_edges(grid.column_starts), "y": _brick_edges(grid.row_starts),
        "zmin": -0.5, "zmax": len(CELL_COLORS) - 0.5, "colorscale": _steps(), "showscale": False,
        "hoverongaps": False,
    }  # fmt: skip


def shades(grid: MeshGrid, numbers: np.ndarray) -> np.ndarray:
    """Colours by rank, for things that have these numbers."""
    return on_grid(grid, (numbers % len(CELL_COLORS)).astype(np.float32), np.nan)


def on_grid(grid: MeshGrid, values: np.ndarray, gap: object) -> np.ndarray:
    """Values by rank on the bricks of the heat map, which has a narrow brick for each gap between blocks."""
    columns, rows = (_brick_of(starts) for starts in (grid.column_starts, grid.row_starts))
    whole = np.full((rows[-1] + 1, columns[-1] + 1, *values.shape[1:]), gap, values.dtype)
    whole[rows[grid.row], columns[grid.column]] = values
    return whole


def packed(numbers: np.ndarray) -> np.ndarray:
    """Whole numbers from 0 on, in as few bytes as hold them and plotly.js reads."""
    return numbers.astype(np.uint16 if numbers.max(initial=0) < 1 << 16 else np.int32)


def _brick_of(starts: np.ndarray) -> np.ndarray:
    return np.arange(len(starts)) + np.cumsum(np.diff(starts, prepend=starts[0] - 1) > 1)


def _brick_edges(starts: np.ndarray) -> np.ndarray:
    return np.unique(np.concatenate([starts, starts + 1]).round(6))


def _steps() -> list[list[object]]:
    share = 1 / len(CELL_COLORS)
    return [[edge, color] for i, color in enumerate(CELL_COLORS) for edge in (i * share, min((i + 1) * share, 1.0))]
