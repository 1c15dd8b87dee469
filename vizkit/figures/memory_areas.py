"""Memory by category as stacked areas: a row for each rank, all to one scale, what a model expects beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.figures.theme import BLUE, GREEN, HATCH, ORANGE, PURPLE, TEXT, TimeAxis
from vizkit.memory_samples import CATEGORIES, rows_to_keep
from vizkit.metrics.memory import Holdings, holdings
from vizkit.sizes import not_negative
from vizkit.trace import Trace
from vizkit.units import bytes_text

ROW_HEIGHT = 0.84
"""Of a rank's areas at the highest value, as a share of its row."""
MAX_ROWS = 16
MAX_POINTS, MAX_POINTS_OF_ALL = 400, 1_200
"""Samples drawn of one rank, and of all."""
LOOKS: Mapping[str, tuple[str, str]] = {
    "parameters": (BLUE, ""),
    "gradients": (ORANGE, "/"),
    "optimizer": (GREEN, "x"),
    "activations": (PURPLE, "."),
}
"""Colour and hatching of each category."""
LEGEND = "legend2"

Expected = Mapping[str, float]


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """What the figure draws: the ranks that have a row, what is expected of each, and the value that fills a row.

    Categories that are expected lie lowest, so that the expected line ends where they should.
    """

    rows: tuple[Holdings, ...]
    expected: tuple[Expected, ...]
    num_tracked: int

    @classmethod
    def of(cls, trace: Trace, expected: Any) -> MemoryRows:
        """Raises `InvalidInputError` for a trace without counters of tensors, and for expectations that do not fit."""
        tracked = holdings(trace)
        if not tracked:
            raise InvalidInputError.because(
                "trace", trace, "has no memory of tensors", "run the training inside vk.track_memory(model, optimizer)"
            )
        wanted = expected_by_rank(expected, trace.world_size)
        rows = [tracked[i] for i in _shown(tracked)]
        return cls(tuple(rows), tuple(wanted[row.rank] for row in rows), len(tracked))

    @property
    def order(self) -> list[str]:
        """Categories from the lowest area up."""
        named = {name for expected in self.expected for name in expected}
        return sorted(CATEGORIES, key=lambda name: (name not in named, CATEGORIES.index(name)))

    @property
    def highest(self) -> float:
        measured = [float(row.num_bytes.sum(1).max()) for row in self.rows]
        return max(*measured, *(sum(expected.values()) for expected in self.expected), 1.0)

    @property
    def expected_levels(self) -> dict[int, float]:
        """Where the expected line of each row lies, by position."""
        levels = {i: self.y_of(i, sum(expected.values())) for i, expected in enumerate(self.expected) if expected}
        return {position: float(level) for position, level in levels.items()}

    def y_of(self, position: int, num_bytes: Any) -> Any:
        """Where a value lies: row p reaches from p + 1 up to p."""
        return position + 1 - ROW_HEIGHT / self.highest * np.asarray(num_bytes, float)


def expected_by_rank(expected: Any, world_size: int) -> list[Expected]:
    """Bytes by category for each rank, from a mapping, from an object such as `vk.memory.model_states` gives, or from
    one of these a rank; raises `InvalidInputError` for others.

    >>> expected_by_rank({"parameters": 8}, world_size=2)
    [{'parameters': 8.0}, {'parameters': 8.0}]
    """
    if expected is None:
        return [{}] * world_size
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        if len(expected) != world_size:
            raise InvalidInputError.because(
                "expected",
                f"{len(expected)} entries",
                f"there are {world_size} ranks",
                "give one a rank, or one for all",
            )
        return [_expected(one) for one in expected]
    return [_expected(expected)] * world_size


def _expected(given: Any) -> Expected:
    if isinstance(given, Mapping):
        found = dict(given)
    else:
        found = {name: getattr(given, f"{name}_bytes") for name in CATEGORIES if hasattr(given, f"{name}_bytes")}
    if unknown := sorted(set(map(str, found)) - set(CATEGORIES)):
        raise InvalidInputError.because(
            "expected", unknown[0], "is not a category of memory", f"use {', '.join(CATEGORIES)}"
        )
    if not found:
        raise InvalidInputError.because(
            "expected", given, "names no bytes of any category", 'give {"parameters": 4096} or vk.memory.per_rank(…)'
        )
    for name, num_bytes in found.items():
        not_negative(f"expected[{name!r}]", num_bytes, "give bytes, such as 4096")
    return {name: float(num_bytes) for name, num_bytes in found.items()}


def _shown(tracked: Sequence[Holdings]) -> list[int]:
    """Positions of the ranks that get a row: all, or of many the fullest and others evenly spaced."""
    if len(tracked) <= MAX_ROWS:
        return list(range(len(tracked)))
    fullest = int(np.argmax([held.num_bytes.sum(1).max() for held in tracked]))
    spaced = np.linspace(0, len(tracked) - 1, MAX_ROWS).astype(int)
    if fullest not in spaced:
        spaced[np.abs(spaced - fullest).argmin()] = fullest
    return spaced.tolist()


def area_traces(memory: MemoryRows, axis: TimeAxis, duration: float, yaxis: str) -> list[dict[str, Any]]:
    """One trace for each category that any rank has, and one for the expected lines."""
    columns = [CATEGORIES.index(name) for name in memory.order]
    limit = min(MAX_POINTS, MAX_POINTS_OF_ALL // len(memory.rows))
    outlines: dict[str, list[tuple[np.ndarray, ...]]] = {name: [] for name in memory.order}
    for position, held in enumerate(memory.rows):
        kept = rows_to_keep(held.num_bytes, limit)
        times, num_bytes = axis.of(held.times_ns[kept]), held.num_bytes[kept][:, columns]
        tops = np.cumsum(num_bytes, 1)
        for i, name in enumerate(memory.order):
            if num_bytes[:, i].any():
                top, bottom = (memory.y_of(position, edge) for edge in (tops[:, i], tops[:, i] - num_bytes[:, i]))
                outlines[name].append(_outline(times, top, bottom, num_bytes[:, i], duration))
    areas = [_area(name, parts, yaxis) for name, parts in outlines.items() if parts]
    lines = _expected_lines(memory, duration, yaxis)
    return [*reversed(areas), *([lines] if lines else [])]  # the legend lists them as they lie


def _outline(
    times: np.ndarray, top: np.ndarray, bottom: np.ndarray, num_bytes: np.ndarray, duration: float
) -> tuple[np.ndarray, ...]:
    """A closed band of steps, with a gap after it: x, y, bytes."""
    steps = np.append(True, (np.diff(top) != 0) | (np.diff(bottom) != 0))
    times, top, bottom, num_bytes = (column[steps] for column in (times, top, bottom, num_bytes))
    x = np.append(np.repeat(times, 2)[1:], duration)
    there, back = np.repeat(top, 2), np.repeat(bottom, 2)[::-1]
    value = np.repeat(num_bytes, 2)
    return (
        np.concatenate([x, x[::-1], x[:1], [np.nan]]),
        np.concatenate([there, back, there[:1], [np.nan]]),
        np.concatenate([value, value[::-1], value[:1], [0]]),
    )


def _area(name: str, parts: Sequence[tuple[np.ndarray, ...]], yaxis: str) -> dict[str, Any]:
    x, y, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    color, shape = LOOKS[name]
    return {
        "type": "scatter", "x": x.astype(np.float32), "y": y.astype(np.float32), "yaxis": yaxis,
        "customdata": value.astype(np.float32),
        "mode": "lines", "fill": "toself", "line": {"width": 0.6, "color": color}, "fillcolor": color,
        "fillpattern": {"shape": shape, "fgcolor": HATCH, "bgcolor": color, "size": 6, "solidity": 0.2},
        "hoveron": "points", "hovertemplate": f"{name} %{{customdata:.4~s}}B at %{{x:.6~g}}<extra></extra>",
        "name": name, "legend": LEGEND,
    }  # fmt: skip


def _expected_lines(memory: MemoryRows, duration: float, yaxis: str) -> dict[str, Any] | None:
    """A dashed line in each row at the sum of what is expected; its value stands at the axis."""
    levels = memory.expected_levels
    if not levels:
        return None
    named = [name for name in memory.order if any(name in expected for expected in memory.expected)]
    reach = "" if len(named) == len(CATEGORIES) else f" {named[0]}" if len(named) == 1 else f" up to {named[-1]}"
    return {
        "type": "scatter", "x": [0, duration, None] * len(levels), "mode": "lines", "yaxis": yaxis,
        "y": [value for level in levels.values() for value in (level, level, None)],
        "line": {"color": TEXT, "width": 2, "dash": "dash"}, "hoverinfo": "skip", "name": f"expected{reach}",
        "legend": LEGEND,
    }  # fmt: skip


def expected_text(expected: Expected) -> str:
    """
    >>> expected_text({"parameters": 4000.0, "gradients": 4000.0})
    'expected 8 kB (parameters, gradients)'
    """
    parts = "" if set(expected) == set(CATEGORIES) else f" ({', '.join(expected)})"
    return f"expected {bytes_text(sum(expected.values()))}{parts}"
