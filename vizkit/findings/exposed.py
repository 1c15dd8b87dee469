"""Communication that nothing hides."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vizkit.findings.buckets import all_small_buckets
from vizkit.findings.evidence import Evidence
from vizkit.findings.finding import Finding, FindingKind
from vizkit.trace import COMMUNICATION_KINDS
from vizkit.units import seconds_text

NOTICEABLE_EXPOSED = 0.1
"""Of the makespan. Some communication has nothing to hide behind: the last bucket, the first gather."""


def exposed_communication(evidence: Evidence) -> Iterator[Finding]:
    """Transfers during which their rank computes nothing, from 10 % of the makespan on.

    A transfer begins when the last rank has arrived, so waiting for late ranks is not in it. Cost: exposed time, mean
    over the ranks, less what small buckets cost. A trace of one rank alone cannot tell who was late: there all of it
    counts.
    """
    total_s = evidence.mean_s(evidence.parts.exposed_communication)
    cost_s = total_s - sum(found.cost_s for found in all_small_buckets(evidence))
    if not evidence.is_noticeable(cost_s, NOTICEABLE_EXPOSED):
        return
    trace = evidence.transfers
    by_kind = {
        kind: exposed_s
        for kind in COMMUNICATION_KINDS
        if (exposed_s := evidence.mean_s(evidence.exposed_ns(trace.is_kind(kind)))) > 0
    }
    worst = sorted(by_kind, key=lambda kind: -by_kind[kind])[:3]
    by_text = ", ".join(f"{kind.value.replace('_', '-')} {seconds_text(by_kind[kind])}" for kind in worst)
    whole_s = evidence.mean_s(evidence.parts.communication)
    exposed = evidence.parts.exposed_communication[evidence.ranks]
    alone = " (one rank's trace: waiting for late ranks is in it)" if len(evidence.ranks) == 1 else ""
    yield Finding(
        FindingKind.EXPOSED_COMMUNICATION,
        tuple(evidence.ranks[exposed >= np.max(exposed) / 2].tolist()),
        cost_s,
        trace.clock,
        f"{evidence.share_text(cost_s)} of the time ranks communicate and compute nothing",
        f"{seconds_text(total_s)} of {seconds_text(whole_s)} communication a rank is exposed: {by_text}{alone}",
        "start communication earlier (DDP's buckets, async_op=True, prefetching), accumulate gradients over several "
        "batches, send fewer bytes, or use fewer ranks on the slow link",
    )
