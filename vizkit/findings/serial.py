"""Ranks that take turns where they should work at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from vizkit.findings.evidence import Evidence
from vizkit.findings.finding import Finding, FindingKind
from vizkit.metrics.intervals import Intervals
from vizkit.trace import NS_PER_S, Role, SpanKind
from vizkit.units import seconds_text

MOSTLY = 0.6
"""Of the busy time with one rank or one message at work: from here on the run is a chain."""
IN_TURN = 0.8
"""The largest share of that time that one rank or one edge may have: above, it is no chain but one slow rank."""
HANDING_ON = (
    SpanKind.SEND,
    SpanKind.RECEIVE,
    SpanKind.BROADCAST,
    SpanKind.SCATTER,
    SpanKind.GATHER,
    SpanKind.REDUCE,
    SpanKind.BARRIER,
)
"""What makes one rank wait for one other; in the rest all wait for the slowest."""
Place = tuple[int, ...]


def serial_transfer(evidence: Evidence) -> Iterator[Finding]:
    """Ranks or messages one at a time: layers on different ranks with one batch, a server that serves one by one.

    Busy is the time in which a rank computes or a message travels. Where one place (a rank, or an edge between two
    ranks) is busy alone for 60 % of it, no place has over 80 % of that, and ranks hand on by messages, collectives with
    a root or barriers, the run is a chain. Cost: the time in which the other ranks stand by, mean over the ranks. A
    pipeline with several microbatches has a bubble instead.
    """
    size = len(evidence.ranks)
    if size < 2 or (evidence.is_pipeline and evidence.num_microbatches > 1):
        return
    if not evidence.trace.is_kind(*HANDING_ON).any():
        return
    busy_ns, alone_ns = _alone(evidence)
    if size == 2:  # both ends of the only edge are at work
        alone_ns = {place: ns for place, ns in alone_ns.items() if len(place) == 1}
    total_ns = sum(alone_ns.values())
    if not total_ns or total_ns < MOSTLY * busy_ns or max(alone_ns.values()) > IN_TURN * total_ns:
        return
    cost_s = sum(ns * (size - len(place)) for place, ns in alone_ns.items()) / size / NS_PER_S
    if not evidence.is_noticeable(cost_s):
        return
    messages_ns = sum(ns for place, ns in alone_ns.items() if len(place) == 2)
    by_messages = messages_ns > total_ns / 2
    yield Finding(
        FindingKind.SERIAL_TRANSFER,
        tuple(sorted({rank for place in alone_ns for rank in place})),
        cost_s,
        evidence.trace.clock,
        "messages travel one after the other, and the ranks that have no part in them wait"
        if by_messages
        else "ranks compute one after the other: each waits for the one before it",
        f"alone at work: {total_ns / busy_ns:.0%} of the busy time {seconds_text(busy_ns / 1e9)}; {_turns(alone_ns)}",
        "post all sends before waiting for one (isend), or use a collective (broadcast, scatter, all-reduce)"
        if by_messages
        else "split the batch into microbatches (a pipeline), or split the batch or the layers instead of the order",
    )


def _alone(evidence: Evidence) -> tuple[int, dict[Place, int]]:
    """Nanoseconds in which something is at work, and by place those in which nothing else is."""
    trace = evidence.transfers
    compute = Intervals.of(trace, trace.is_role(Role.COMPUTE))
    origin = trace.extent_ns[0]
    places: list[Place] = [(rank,) for rank in range(trace.world_size)]
    sends = np.flatnonzero(trace.is_kind(SpanKind.SEND) & (trace.end_ns > trace.start_ns))
    edges = np.stack([trace.rank[sends], trace.peer[sends]])
    distinct, which = np.unique(edges, axis=1, return_inverse=True)
    places += [tuple(edge) for edge in distinct.T.tolist()]
    starts = np.concatenate([compute.starts % compute.stride, trace.start_ns[sends] - origin])
    ends = np.concatenate([compute.ends % compute.stride, trace.end_ns[sends] - origin])
    owner = np.concatenate([compute.starts // compute.stride, which.reshape(-1) + trace.world_size])
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    one = np.ones(len(starts), np.int64)
    length = np.diff(times[order], append=times.max(initial=0))
    count = np.concatenate([one, -one])[order].cumsum()
    at_work = np.concatenate([owner, -owner])[order].cumsum()
    alone: dict[Place, int] = defaultdict(int)
    for place, ns in zip(at_work[count == 1].tolist(), length[count == 1].tolist(), strict=True):
        if ns:
            alone[places[place]] += ns
    return int(length[count > 0].sum()), dict(alone)


def _turns(alone_ns: dict[Place, int]) -> str:
    longest = sorted(alone_ns.items(), key=lambda item: -item[1])[:4]
    return ", ".join(
        f"{f'rank {place[0]}' if len(place) == 1 else f'{place[0]} → {place[1]}'} {seconds_text(ns / 1e9)}"
        for place, ns in longest
    )
