"""Time that the order of a pipeline's stages leaves empty."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vizkit.findings.evidence import NOTICEABLE_SHARE, Evidence
from vizkit.findings.finding import Finding, FindingKind
from vizkit.trace import NS_PER_S


def bubble(evidence: Evidence) -> Iterator[Finding]:
    """Idle time of a pipeline with two or more microbatches, without what unequal stages cause.

    Cost: the mean idle time of a rank less imbalance (the longest rank's compute less the mean), so that equal stages
    give (p − 1)/(m + p − 1) of the makespan for GPipe and 1F1B, and unequal ones are not counted twice.
    """
    if not evidence.is_pipeline or evidence.num_microbatches < 2:
        return
    compute, idle = evidence.parts.compute[evidence.ranks], evidence.parts.idle[evidence.ranks]
    cost_s = float((idle.mean() - (compute.max() - compute.mean())) / NS_PER_S)
    if not evidence.is_noticeable(cost_s):
        return
    stages, microbatches = evidence.num_stages, evidence.num_microbatches
    depth = min(stages, len(evidence.ranks))
    enough = math.ceil((depth - 1) * (1 - NOTICEABLE_SHARE) / NOTICEABLE_SHARE)
    theory = (depth - 1) / (microbatches + depth - 1)
    more = (
        f"use {enough} microbatches for {NOTICEABLE_SHARE:.0%} (p − 1 over m + p − 1), "
        if enough > microbatches
        else ""
    )
    yield Finding(
        FindingKind.BUBBLE,
        tuple(evidence.ranks.tolist()),
        cost_s,
        evidence.trace.clock,
        f"the pipeline is empty for {evidence.share_text(cost_s)} of the time: stages wait for the first and the last "
        "microbatches",
        f"{stages} stages on {depth} ranks, {microbatches} microbatches: {theory:.1%} for GPipe and 1F1B with equal "
        f"stages; here {cost_s * NS_PER_S / evidence.trace.duration_ns:.1%}, unequal stages left out",
        f"{more}or an interleaved or zero-bubble schedule",
    )
