"""Which kind fills which stretch of time, and where nothing does: sums over all spans at once."""

from __future__ import annotations

import numpy as np

from vizkit.metrics.intervals import Intervals
from vizkit.trace import KINDS, Role, Trace


def dominant_kinds(trace: Trace, columns: int, window_ns: tuple[int, int]) -> np.ndarray:
    """The code of the kind that fills most of each column of the window, by rank and lane (compute, communication).

    Shape (world size, 2, columns); `len(KINDS)` where nothing runs.
    """
    first_ns, last_ns = window_ns
    scale = columns / max(last_ns - first_ns, 1)
    is_communication = trace.is_role(Role.COMMUNICATION).astype(np.int64)
    used, kind = np.unique(trace.kind, return_inverse=True)
    width = columns + 2
    row = ((trace.rank * 2 + is_communication) * len(used) + kind) * width
    covered = np.zeros(trace.world_size * 2 * len(used) * width)
    # coverage is the running sum of ±1 steps, each spread over the two columns that its moment lies between
    for times, sign in ((trace.start_ns, 1.0), (trace.end_ns, -1.0)):
        column, part = np.divmod((np.clip(times, first_ns, last_ns) - first_ns) * scale, 1.0)
        position = row + column.astype(np.int64)
        covered += np.bincount(position, sign * (1 - part), len(covered))
        covered += np.bincount(position + 1, sign * part, len(covered))
    amounts = covered.reshape(trace.world_size, 2, len(used), width).cumsum(3)[..., :columns]
    return np.where(amounts.max(2) > 1e-9, used[amounts.argmax(2)], len(KINDS))


def idle_intervals(trace: Trace, window_ns: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank, start and end (ns) of each stretch of the window in which a rank neither computes nor communicates."""
    origin, _ = trace.extent_ns
    first_ns, last_ns = window_ns
    busy = Intervals.of(trace, ~trace.is_role(Role.WAIT))
    rank = busy.starts // busy.stride
    starts, ends = (
        np.clip(edges - rank * busy.stride + origin, first_ns, last_ns) - first_ns for edges in (busy.starts, busy.ends)
    )
    # as in `Intervals`, one axis holds all ranks behind one another; each rank's gaps lie between the window's two ends
    length = last_ns - first_ns
    row = np.arange(trace.world_size, dtype=np.int64) * (length + 1)
    begins = np.sort(np.concatenate([row, ends + rank * (length + 1)]))
    finishes = np.sort(np.concatenate([starts + rank * (length + 1), row + length]))
    gap = finishes > begins
    rank, begin = np.divmod(begins[gap], length + 1)
    return rank, begin + first_ns, begin + (finishes - begins)[gap] + first_ns
