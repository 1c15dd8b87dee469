"""Bytes that a rank holds over time, by category: plain data that a run brings back, and its counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vizkit.trace import Counter

CATEGORIES = ("parameters", "gradients", "optimizer", "activations")
"""Names of the counters, in the order of the columns of `MemorySamples.num_bytes`."""
_KEPT_IN_A_GROUP = len(CATEGORIES) + 2


@dataclass(frozen=True, eq=False)
class MemorySamples:
    """Samples of one rank: row i of `num_bytes` (samples × categories, int64) holds from `wall_ns[i]` to the next.

    Times are on `CLOCK_MONOTONIC`, as those of events are.
    """

    wall_ns: np.ndarray
    num_bytes: np.ndarray

    def counters(self, rank: int, times_ns: np.ndarray) -> list[Counter]:
        """A counter for each category, all with the same times: the rows moved to `times_ns`."""
        return [
            Counter(name, rank, times_ns, np.ascontiguousarray(values))
            for name, values in zip(CATEGORIES, self.num_bytes.T, strict=True)
        ]


def rows_to_keep(num_bytes: np.ndarray, limit: int) -> np.ndarray:
    """Positions of at most `limit` rows, in order, that keep each category's peak and the peak of the sum.

    Of each stretch of samples the largest of each category, the largest sum and the last one stay.

    >>> rows = np.array([[0, 0, 0, value] for value in (1, 9, 2, 3, 8, 1, 0, 4)])
    >>> rows_to_keep(rows, limit=6).tolist()
    [0, 1, 7]
    """
    if len(num_bytes) <= limit:
        return np.arange(len(num_bytes))
    edges = np.unique(np.linspace(0, len(num_bytes), max(limit // _KEPT_IN_A_GROUP, 1) + 1).astype(np.int64))
    measured = np.column_stack([num_bytes, num_bytes.sum(1)])
    kept = [
        np.append(measured[start:end].argmax(0) + start, end - 1)
        for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    return np.unique(np.concatenate(kept))
