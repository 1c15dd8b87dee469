"""How much of each stretch of time is covered by what: sums over spans, without a loop."""

from __future__ import annotations

import numpy as np

from vizkit.trace import KINDS, Role, Trace


def covered_time(
    starts: np.ndarray, ends: np.ndarray, row: np.ndarray, num_rows: int, extent: tuple[int, int], columns: int
) -> np.ndarray:
    """How much of each column of equal time the intervals of each row cover together: shape (rows, columns).

    1 where one interval covers the whole column; intervals that overlap count each.
    """
    first_ns, last_ns = extent
    scale = columns / max(last_ns - first_ns, 1)
    width = columns + 2
    covered = np.zeros(num_rows * width)
    # coverage is the running sum of ±1 steps, each spread over the two columns that its moment lies between
    for times, sign in ((starts, 1.0), (ends, -1.0)):
        column, part = np.divmod((times - first_ns) * scale, 1.0)
        position = row * width + column.astype(np.int64)
        covered += np.bincount(position, sign * (1 - part), len(covered))
        covered += np.bincount(position + 1, sign * part, len(covered))
    return covered.reshape(num_rows, width).cumsum(1)[:, :columns]


def dominant_kinds(trace: Trace, columns: int) -> np.ndarray:
    """For each rank, lane (compute, communication) and column of equal time: the code of the kind that fills most of it.

    Shape (world size, 2, columns); `len(KINDS)` where nothing runs.
    """
    is_communication = trace.is_role(Role.COMMUNICATION).astype(np.int64)
    used, kind = np.unique(trace.kind, return_inverse=True)
    row = (trace.rank * 2 + is_communication) * len(used) + kind
    amounts = covered_time(
        trace.start_ns, trace.end_ns, row, trace.world_size * 2 * len(used), trace.extent_ns, columns
    ).reshape(trace.world_size, 2, len(used), columns)
    return np.where(amounts.max(2) > 1e-9, used[amounts.argmax(2)], len(KINDS))


def gaps(trace: Trace, ignored: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank, start and end in nanoseconds of each stretch of the trace in which a rank has no span that counts.

    `ignored` says which spans do not count: one boolean a span.
    """
    first_ns, last_ns = trace.extent_ns
    every = np.arange(trace.world_size, dtype=np.int32)
    # a span of no length at both ends of each rank makes every gap lie between two neighbours
    edges = [np.full(len(every), time, np.int64) for time in (first_ns, last_ns)]
    rank = np.concatenate([trace.rank[~ignored], every, every])
    begins = np.concatenate([trace.start_ns[~ignored], *edges])
    ends = np.concatenate([trace.end_ns[~ignored], *edges])
    order = np.lexsort([begins, rank])
    rank, begins, ends = rank[order], begins[order], ends[order]
    # one running maximum serves all ranks, once each rank's times lie beyond the previous rank's
    shift = rank.astype(np.int64) * (last_ns - first_ns + 1) - first_ns
    reached = np.maximum.accumulate(ends + shift) - shift
    is_gap = (rank[1:] == rank[:-1]) & (begins[1:] > reached[:-1])
    return rank[1:][is_gap], reached[:-1][is_gap], begins[1:][is_gap]


def utilisation(trace: Trace, columns: int) -> np.ndarray:
    """Share of ranks that compute, averaged over each of `columns` stretches of equal time."""
    _, starts, ends = gaps(trace, ~trace.is_role(Role.COMPUTE))
    resting = covered_time(starts, ends, np.zeros(len(starts), np.int64), 1, trace.extent_ns, columns)[0]
    return 1 - np.clip(resting / max(trace.world_size, 1), 0, 1)
