"""Where spans stand within a rank's row: compute above, communication below, side by side where it overlaps."""

from __future__ import annotations

import numpy as np

from vizkit.trace import COLLECTIVE_KINDS, KINDS, Role, SpanKind, Trace

COMPUTE_LANE = (-0.40, 0.08)
"""Where a rank's compute is drawn, as offsets from the middle of its row; rows count downwards."""
COMMUNICATION_LANE = (0.12, 0.42)
MESSAGE_LANES = {
    SpanKind.SEND: (COMMUNICATION_LANE[0], sum(COMMUNICATION_LANE) / 2),
    SpanKind.RECEIVE: (sum(COMMUNICATION_LANE) / 2, COMMUNICATION_LANE[1]),
}
"""Halves of the communication lane, because a rank of a pipeline or ring often sends and receives at once."""
ROW_SCALE = 100
"""Heights travel as whole hundredths of a row, because small integers are the shortest numbers in a page."""
MAX_SHARES = 4
"""Into how many parts overlapping collectives divide the lane; more than that cover each other."""


def lane_of(trace: Trace) -> np.ndarray:
    """Top and bottom of each span in hundredths of a row: shape (spans, 2).

    Sends have the upper half of the communication lane and receives the lower half, always. Collectives have all of it,
    or equal parts where several overlap on one rank.

    >>> from vizkit.trace import Span
    >>> messages = [Span(0, "send", 0, 5, peer=1), Span(0, "receive", 0, 5, peer=1)]
    >>> lane_of(Trace.from_spans(messages, clock="ideal")).tolist()
    [[12, 27], [27, 42]]
    """
    offsets = np.rint(np.array([_lane_of_kind(kind) for kind in KINDS]) * ROW_SCALE).astype(np.int32)[trace.kind]
    collectives = np.flatnonzero(trace.is_kind(*COLLECTIVE_KINDS))
    part, parts = _parts(trace, collectives)
    top, bottom = (round(edge * ROW_SCALE) for edge in COMMUNICATION_LANE)
    offsets[collectives, 0] = top + np.rint((bottom - top) * part / parts)
    offsets[collectives, 1] = top + np.rint((bottom - top) * (part + 1) / parts)
    return trace.rank[:, None] * ROW_SCALE + offsets


def _lane_of_kind(kind: SpanKind) -> tuple[float, float]:
    return MESSAGE_LANES.get(kind) or (COMMUNICATION_LANE if kind.role is Role.COMMUNICATION else COMPUTE_LANE)


def _parts(trace: Trace, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each chosen span which part of the lane it has, and of how many: 0 of 1 where nothing overlaps it."""
    part, parts = np.zeros(len(chosen), int), np.ones(len(chosen), int)
    rank, start, end = (column[chosen].tolist() for column in (trace.rank, trace.start_ns, trace.end_ns))
    cluster: list[int] = []
    free_from: list[int] = []
    cluster_rank = -1
    for i in sorted(range(len(chosen)), key=lambda i: (rank[i], start[i])):
        if rank[i] != cluster_rank or start[i] >= max(free_from):
            parts[cluster] = min(max(len(free_from), 1), MAX_SHARES)
            cluster, free_from, cluster_rank = [], [], rank[i]
        place = next((p for p, free in enumerate(free_from) if free <= start[i]), len(free_from))
        free_from[place : place + 1] = [end[i]]
        part[i] = place % MAX_SHARES
        cluster.append(i)
    parts[cluster] = min(max(len(free_from), 1), MAX_SHARES)
    return part, parts
