"""What the rules look at: one trace, what is known of the machine, and what several rules need of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from vizkit.findings.lateness import Lateness
from vizkit.fingerprints import Noted, fingerprints_of
from vizkit.hardware import Link
from vizkit.metrics import Breakdown, breakdown
from vizkit.metrics.intervals import Intervals
from vizkit.record import Record
from vizkit.trace import NONE, NS_PER_S, Role, SpanKind, Trace

NOTICEABLE_SHARE = 0.05
"""Of the makespan: what costs less is not worth a finding."""
JITTER_SHARE = 0.2
"""Of the makespan, where work was measured: chance makes equal ranks of a crowded machine wait up to half as long."""
STEADY_SHARE = 0.1
"""The same for what the same rank does again and again, which chance does not."""
PASSES = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.BACKWARD_INPUT, SpanKind.BACKWARD_WEIGHT)
_MESSAGES = (SpanKind.SEND, SpanKind.RECEIVE)


@dataclass(frozen=True)
class Machine:
    """Where a run took place, and what it did there, event by event."""

    record: Record
    cores: int
    num_threads: int
    wall: Trace


@dataclass(frozen=True, eq=False)
class Evidence:
    """`trace` is what time is judged on; `link` is known where it was replayed, `machine` where ranks really ran."""

    trace: Trace
    link: Link | None = None
    machine: Machine | None = None
    memory_limit_bytes: float | None = None

    @functools.cached_property
    def ranks(self) -> np.ndarray:
        """The ranks that the trace has spans of: a profiler's file holds one of many."""
        return np.unique(self.trace.rank)

    def is_noticeable(self, cost_s: float, share: float = NOTICEABLE_SHARE) -> bool:
        return cost_s > 0 and cost_s >= share * self.trace.duration_ns / NS_PER_S

    def is_beyond_jitter(self, cost_s: float, is_steady: bool) -> bool:
        """Whether waiting for late ranks has a cause; times that were given or simulated have no jitter.

        `is_steady`: it is the same ranks all the time.
        """
        if self.machine is None:
            return self.is_noticeable(cost_s)
        return self.is_noticeable(cost_s, STEADY_SHARE if is_steady else JITTER_SHARE)

    def share_text(self, cost_s: float) -> str:
        """A cost as a share of the makespan."""
        return f"{cost_s * NS_PER_S / max(self.trace.duration_ns, 1):.0%}"

    @functools.cached_property
    def transfers(self) -> Trace:
        """The trace with each communication cut to the time since its last rank had arrived: its transfer."""
        trace = self.trace
        numbered = np.flatnonzero(trace.is_role(Role.COMMUNICATION) & (trace.operation != NONE))
        _, operation = np.unique(trace.operation[numbered], return_inverse=True)
        complete = np.full(operation.max(initial=-1) + 1, np.iinfo(np.int64).min)
        np.maximum.at(complete, operation, trace.start_ns[numbered])
        start = trace.start_ns.copy()
        start[numbered] = np.minimum(complete[operation], trace.end_ns[numbered])
        return replace(trace, columns={**trace.columns, "start_ns": start})

    @functools.cached_property
    def parts(self) -> Breakdown:
        """Where each rank's time goes, waiting for late ranks counted as idle."""
        return breakdown(self.transfers)

    def mean_s(self, by_rank_ns: np.ndarray) -> float:
        """Seconds, mean over the ranks that the trace has spans of."""
        return float(by_rank_ns[self.ranks].mean() / NS_PER_S) if len(self.ranks) else 0.0

    def exposed_ns(self, spans: np.ndarray) -> np.ndarray:
        """Nanoseconds on each rank in which one of these spans of `transfers` is open, and no compute."""
        compute = Intervals.of(self.transfers, self.transfers.is_role(Role.COMPUTE))
        return compute.union(Intervals.of(self.transfers, spans)).lengths_ns() - compute.lengths_ns()

    @functools.cached_property
    def lateness(self) -> Lateness:
        return Lateness.of(self.trace)

    @functools.cached_property
    def is_pipeline(self) -> bool:
        """Whether stages lie on different ranks and hand on to each other by messages, or by nothing that is drawn."""
        trace = self.trace
        staged = trace.is_kind(*PASSES) & (trace.stage != NONE)
        owners = np.unique(np.stack([trace.stage[staged], trace.rank[staged]]), axis=1)
        if len(np.unique(owners[0])) < 2 or len(np.unique(owners[1])) < 2:
            return False
        return bool(trace.is_kind(*_MESSAGES).any() or not trace.is_role(Role.COMMUNICATION).any())

    @functools.cached_property
    def num_stages(self) -> int:
        staged = self.trace.is_kind(*PASSES) & (self.trace.stage != NONE)
        return len(np.unique(self.trace.stage[staged]))

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Different microbatches among the passes; 1 where none has a number."""
        numbers = self.trace.microbatch[self.trace.is_kind(*PASSES)]
        return max(len(np.unique(numbers[numbers != NONE])), 1)

    @functools.cached_property
    def fingerprints(self) -> tuple[Noted, ...]:
        return tuple(fingerprints_of(self.trace))
