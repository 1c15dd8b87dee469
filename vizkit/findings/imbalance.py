"""Ranks whose shares of the work differ."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vizkit.findings.evidence import PASSES, Evidence
from vizkit.findings.finding import Finding, FindingKind, ranks_text
from vizkit.findings.serial import serial_transfer
from vizkit.metrics.intervals import Intervals
from vizkit.trace import NONE, NS_PER_S
from vizkit.units import seconds_text


def imbalance(evidence: Evidence) -> Iterator[Finding]:
    """Stages of a pipeline with unequal work, or ranks that arrive at collectives one after the other.

    Cost in a pipeline: the compute of the longest rank in passes, less the mean. Elsewhere: waiting at collectives for
    the last rank, mean over the ranks, if neither a single rank nor a serial transfer is the cause. Measured work has
    jitter: there that counts from 20 % of the makespan on, or from 10 % where the same ranks have most all the time.
    """
    yield from _stages(evidence) if evidence.is_pipeline else _shares(evidence)


def _stages(evidence: Evidence) -> Iterator[Finding]:
    trace = evidence.trace
    passes = Intervals.of(trace, trace.is_kind(*PASSES) & (trace.stage != NONE)).lengths_ns()[evidence.ranks]
    cost_s = float((passes.max() - passes.mean()) / NS_PER_S)
    if not evidence.is_beyond_jitter(cost_s, is_steady=True):
        return
    longest = tuple(evidence.ranks[passes == passes.max()].tolist())
    yield Finding(
        FindingKind.IMBALANCE,
        longest,
        cost_s,
        trace.clock,
        f"the stages of {ranks_text(longest)} take longer than the others, which all wait for the longest stage",
        f"compute in passes by rank: {_by_rank(evidence.ranks, passes)}; mean {seconds_text(passes.mean() / 1e9)}",
        "move layers from the longest stage to the shortest, and count embedding and loss as layers",
    )


def _shares(evidence: Evidence) -> Iterator[Finding]:
    late = evidence.lateness
    if late.culprit is not None or not evidence.is_noticeable(late.total_s):
        return
    computed = evidence.parts.compute[evidence.ranks]
    spread_s = (computed.max() - computed.mean()) / NS_PER_S
    rotates = spread_s < late.total_s / 2
    if not evidence.is_beyond_jitter(late.total_s, is_steady=not rotates):
        return
    if rotates and any(serial_transfer(evidence)):  # they come one after the other because they work so
        return
    longest = () if rotates else tuple(evidence.ranks[computed == computed.max()].tolist())
    last_in = ", ".join(f"rank {rank} in {late.last_in[rank]}" for rank in evidence.ranks.tolist())
    yield Finding(
        FindingKind.IMBALANCE,
        longest,
        late.total_s,
        evidence.trace.clock,
        "ranks have unequal work in each step, another one the most each time"
        if rotates
        else "ranks have unequal shares of the work, and all wait for the largest",
        f"waiting at {late.operations} collectives; compute by rank: {_by_rank(evidence.ranks, computed)}; last: "
        + last_in,
        "sort or pack samples so that each step gives each rank as many tokens"
        if rotates
        else "give each rank as many samples (tokens, experts' tokens), or shares in proportion to its speed",
    )


def _by_rank(ranks: np.ndarray, by_rank_ns: np.ndarray) -> str:
    if len(ranks) > 8:
        return f"{seconds_text(by_rank_ns.min() / 1e9)} to {seconds_text(by_rank_ns.max() / 1e9)}"
    return ", ".join(seconds_text(value / 1e9) for value in by_rank_ns.tolist())
