"""Which kind fills which stretch of time, and where nothing does: sums over all spans at once."""

from __future__ import annotations

import numpy as np

from vizkit.metrics.intervals import Intervals
from vizkit.trace import KINDS, Role, Trace


def dominant_kinds(trace: Trace, columns: int) -> np.ndarray:
    """For each rank, lane (compute, communication) and column of equal time: the code of the kind that fills most of it.

    Shape (world size, 2, columns); `len(KINDS)` where nothing runs.
    """
    first_ns, last_ns = trace.extent_ns
    scale = columns / max(last_ns - first_ns, 1)
    is_communication = trace.is_role(Role.COMMUNICATION).astype(np.int64)
    used, kind = np.unique(trace.kind, return_inverse=True)
    width = columns + 2
    row = ((trace.rank * 2 + is_communication) * len(used) + kind) * width
    covered = np.zeros(trace.world_size * 2 * len(used) * width)
    # coverage is the running sum of ±1 steps, each spread over the two columns that its moment lies between
    for times, sign in ((trace.start_ns, 1.0), (trace.end_ns, -1.0)):
        column, part = np.divmod((times - first_ns) * scale, 1.0)
        position = row + column.astype(np.int64)
        covered += np.bincount(position, sign * (1 - part), len(covered))
        covered += np.bincount(position + 1, sign * part, len(covered))
    amounts = covered.reshape(trace.world_size, 2, len(used), width).cumsum(3)[..., :columns]
    return np.where(amounts.max(2) > 1e-9, used[amounts.argmax(2)], len(KINDS))


def idle_intervals(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank, start and end in nanoseconds of each stretch in which a rank neither computes nor communicates."""
    first_ns, _ = trace.extent_ns
    busy = Intervals.of(trace, ~trace.is_role(Role.WAIT))
    begin_of_rank = np.arange(trace.world_size, dtype=np.int64) * busy.stride
    begins = np.sort(np.concatenate([begin_of_rank, busy.ends]))
    ends = np.sort(np.concatenate([busy.starts, begin_of_rank + trace.duration_ns]))
    gap = ends > begins
    rank, begin = np.divmod(begins[gap], busy.stride)
    return rank, begin + first_ns, begin + (ends - begins)[gap] + first_ns
