"""Collectives so small that they mostly wait for the link's latency."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vizkit.collectives import algorithm_for, time_s
from vizkit.findings.evidence import Evidence
from vizkit.findings.finding import Finding, FindingKind
from vizkit.hardware import Link
from vizkit.trace import NONE, NS_PER_S, SpanKind
from vizkit.units import bytes_text, seconds_text

FEWEST = 4
"""Collectives a step: fewer are no buckets."""
KINDS = (SpanKind.ALL_REDUCE, SpanKind.ALL_GATHER, SpanKind.REDUCE_SCATTER)
_LINK = re.compile(
    r"^(?:(?P<latency>[\d.,]+) (?P<second>n|µ|m|)s)(?: \+ bytes / (?P<rate>[\d.,]+) (?P<byte>[kMGT]?)B/s)?$"
)
_SECOND = {"n": 1e-9, "µ": 1e-6, "m": 1e-3, "": 1.0}
_BYTE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class SmallBuckets:
    """Collectives of one kind in one group: each of `num` takes `latency_s` whatever it holds, plus its transfer."""

    kind: SpanKind
    group: tuple[int, ...]
    num: int
    num_a_step: float
    mean_bytes: float
    latency_s: float
    transfer_s: float
    cost_s: float

    @property
    def halving_bytes(self) -> float:
        """The bucket that halves the time of all together: g buckets in one, with L/g + t = (L + t)/2 for each."""
        return self.mean_bytes * 2 * self.latency_s / (self.latency_s - self.transfer_s)

    @property
    def balanced_bytes(self) -> float:
        """The bucket whose transfer takes as long as its latency; infinite where transfer takes nothing."""
        return self.mean_bytes * self.latency_s / self.transfer_s if self.transfer_s else float("inf")

    @property
    def remedy(self) -> str:
        """What to set, and what it brings: no bucket is larger than all bytes of a step."""
        whole = self.mean_bytes * self.num_a_step
        if self.halving_bytes >= whole:
            return f"put all {bytes_text(whole)} of a step into one bucket"
        half = f"buckets of {_bucket_text(self.halving_bytes)} would halve their time"
        if self.balanced_bytes >= whole:
            return f"{half}, and one bucket of {_bucket_text(whole)} a step takes least"
        return f"{half}; from {_bucket_text(self.balanced_bytes)} on, transfer outweighs latency"


def small_buckets(evidence: Evidence) -> Iterator[Finding]:
    """Four or more collectives a step of one kind in one group, whose latency is over half of their time.

    Latency and transfer come from the link of the replay (α–β model of the collective's algorithm); without one, from a
    line through durations against payloads, where those differ. Cost: the exposed time of these collectives times the
    latency's share, mean over the ranks.
    """
    for found in all_small_buckets(evidence):
        yield Finding(
            FindingKind.SMALL_BUCKETS,
            tuple(sorted(found.group)),
            found.cost_s,
            evidence.trace.clock,
            f"{found.num} small {found.kind.value.replace('_', '-')}s cost more latency than transfer",
            f"{bytes_text(found.mean_bytes)} on the mean; each takes {seconds_text(found.latency_s)} of latency and "
            f"{seconds_text(found.transfer_s)} of transfer; {found.num_a_step:.3g} a step",
            found.remedy,
        )


def _bucket_text(num_bytes: float) -> str:
    return f"{bytes_text(num_bytes)} (DDP: bucket_cap_mb={num_bytes / 2**20:.2g})"


def all_small_buckets(evidence: Evidence) -> list[SmallBuckets]:
    """What `small_buckets` finds, as numbers."""
    trace = evidence.transfers
    found = []
    for kind in KINDS:
        for code, group in enumerate(trace.tables["group"]):
            spans = trace.is_kind(kind) & (trace.group == code) & (trace.operation != NONE)
            if spans.any() and (buckets := _of(evidence, kind, group or tuple(evidence.ranks.tolist()), spans)):
                found.append(buckets)
    return found


def _of(evidence: Evidence, kind: SpanKind, group: tuple[int, ...], spans: np.ndarray) -> SmallBuckets | None:
    trace = evidence.transfers
    _, first = np.unique(trace.operation[spans], return_index=True)
    rows = np.flatnonzero(spans)[first]
    num_a_step = len(rows) / _num_steps(evidence, group)
    payload, seconds = trace.payload_bytes[rows], (trace.end_ns - trace.start_ns)[rows] / NS_PER_S
    if num_a_step < FEWEST or not payload.max():
        return None
    algorithm = str(trace.tables["algorithm"][int(trace.algorithm[rows[0]])]) or algorithm_for(
        kind, trace.notes.get("backend", "")
    )
    link = evidence.link or _noted_link(trace.notes.get("link", ""))
    line = _fitted(payload, seconds) if link is None else _modelled(kind, algorithm, len(group), link, payload.mean())
    if line is None or line[0] <= line[1]:
        return None
    latency_s, transfer_s = line
    exposed_s = evidence.mean_s(evidence.exposed_ns(spans))
    cost_s = float(exposed_s * latency_s / (latency_s + transfer_s))
    if not evidence.is_noticeable(cost_s):
        return None
    return SmallBuckets(kind, group, len(rows), num_a_step, float(payload.mean()), latency_s, transfer_s, cost_s)


def _num_steps(evidence: Evidence, group: tuple[int, ...]) -> int:
    """How often a rank begins forwards after backwards, or steps its optimizer; 1 where none tells either."""
    trace = evidence.trace
    counts = [1]
    for kind in (SpanKind.FORWARD, SpanKind.OPTIMIZER):
        is_kind = trace.is_kind(kind)
        for rank in group:
            mine = np.flatnonzero((trace.rank == rank) & (is_kind | trace.is_kind(SpanKind.BACKWARD)))
            in_order = is_kind[mine[np.argsort(trace.start_ns[mine], kind="stable")]]
            counts.append(int((np.diff(in_order.astype(int), prepend=0) == 1).sum()))
    return max(counts)


def _modelled(kind: SpanKind, algorithm: str, size: int, link: Link, mean_bytes: float) -> tuple[float, float]:
    latency_s = time_s(kind, algorithm, size, 0, link)
    return latency_s, time_s(kind, algorithm, size, mean_bytes, link) - latency_s


def _fitted(payload: np.ndarray, seconds: np.ndarray) -> tuple[float, float] | None:
    """Latency, and transfer of the mean payload, by least squares through the median duration of each payload."""
    sizes, which = np.unique(payload, return_inverse=True)
    if len(sizes) < 2:
        return None
    medians = np.array([np.median(seconds[which == position]) for position in range(len(sizes))])
    slope, latency_s = np.polyfit(sizes, medians, 1)
    return (float(latency_s), float(slope * payload.mean())) if slope >= 0 and latency_s > 0 else None


def _noted_link(text: str) -> Link | None:
    """
    >>> _noted_link("50 ms + bytes / 10 MB/s"), _noted_link("1 µs"), _noted_link("free")
    (Link(latency_s=0.05, bandwidth_bytes_per_s=10000000.0), Link(latency_s=1e-06, bandwidth_bytes_per_s=inf), None)
    """
    match = _LINK.match(text)
    if match is None:
        return None
    latency_s = float(match["latency"].replace(",", "")) * _SECOND[match["second"]]
    rate = match["rate"]
    return Link(latency_s, float(rate.replace(",", "")) * _BYTE[match["byte"]] if rate else float("inf"))
