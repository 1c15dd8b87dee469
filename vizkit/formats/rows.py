"""Rows for spans that overlap."""

from __future__ import annotations

import numpy as np


def rows(track: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """The lowest row for each span such that, within a track, spans of one row follow one another or nest.

    A span that overlaps another without lying inside it goes to the next row, since the Chrome format has no place for
    it.

    >>> rows(np.array([0, 0, 0]), np.array([0, 2, 5]), np.array([10, 4, 12])).tolist()
    [0, 0, 1]
    """
    order = np.lexsort((-end_ns, start_ns, track))
    result = np.zeros(len(track), np.int64)
    current: int | None = None
    taken: list[list[int]] = []
    for i, key, start, end in zip(
        order.tolist(), track[order].tolist(), start_ns[order].tolist(), end_ns[order].tolist(), strict=True
    ):
        if key != current:
            current, taken = key, []
        result[i] = _place(taken, start, end)
    return result


def _place(taken: list[list[int]], start: int, end: int) -> int:
    """Put the span on the first row that takes it; a row is the stack of the ends of its open spans."""
    for number, open_ends in enumerate(taken):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if not open_ends or end <= open_ends[-1]:
            open_ends.append(end)
            return number
    taken.append([end])
    return len(taken) - 1
