"""Memory that is almost full."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vizkit.findings.evidence import Evidence
from vizkit.findings.finding import Finding, FindingKind, ranks_text
from vizkit.metrics import peak_memory
from vizkit.units import bytes_text

NEAR = 0.9


def memory_near_limit(evidence: Evidence) -> Iterator[Finding]:
    """Ranks whose peak is 90 % or more of `memory_limit_bytes`; nothing where no limit or no memory is known.

    The peak is the larger of what `vk.track_memory` and `sample_memory=True` saw. It costs no time until it fails: 0 s.
    """
    limit = evidence.memory_limit_bytes
    if limit is None:
        return
    peak = np.zeros(evidence.trace.world_size)
    tracked = peak_memory(evidence.trace).total_bytes
    peak[: len(tracked)] = tracked
    for counter in evidence.trace.counters:
        if counter.name == "memory" and len(counter.values):
            peak[counter.rank] = max(peak[counter.rank], counter.values.max())
    ranks = tuple(np.flatnonzero(peak >= NEAR * limit).tolist())
    if ranks:
        yield Finding(
            FindingKind.MEMORY_NEAR_LIMIT,
            ranks,
            0.0,
            evidence.trace.clock,
            f"memory of {ranks_text(ranks)} is almost full",
            f"peak {bytes_text(peak.max())} of {bytes_text(limit)} ({peak.max() / limit:.0%})",
            "recompute activations, shard optimizer state and parameters (ZeRO, FSDP), or use smaller microbatches",
        )
