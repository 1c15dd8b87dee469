"""Unions of time intervals, for all ranks at once and exact to the nanosecond."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.trace import Trace

LARGEST_POSITION = 2**62


@dataclass(frozen=True)
class Intervals:
    """Disjoint intervals in order of rank and time.

    Times count from the trace's first start. One axis holds all ranks behind one another, `stride` apart, so that a
    single sort serves them all.
    """

    starts: np.ndarray
    ends: np.ndarray
    stride: int
    world_size: int

    @classmethod
    def of(cls, trace: Trace, mask: np.ndarray) -> Intervals:
        """The union, rank by rank, of the spans that `mask` selects; those that take no time cover nothing."""
        mask = mask & (trace.end_ns > trace.start_ns)
        origin, last = trace.extent_ns
        stride = last - origin + 1
        if stride * max(trace.world_size, 1) > LARGEST_POSITION:
            raise InvalidInputError.because(
                "trace", trace, "its extent in nanoseconds times its ranks is over 2**62", "analyse a shorter part"
            )
        offsets = trace.rank[mask].astype(np.int64) * stride - origin
        starts, ends = _merged(trace.start_ns[mask] + offsets, trace.end_ns[mask] + offsets)
        return cls(starts, ends, stride, trace.world_size)

    def union(self, other: Intervals) -> Intervals:
        """What either covers; both must come from the same trace."""
        starts, ends = _merged(np.concatenate([self.starts, other.starts]), np.concatenate([self.ends, other.ends]))
        return Intervals(starts, ends, self.stride, self.world_size)

    def lengths_ns(self) -> np.ndarray:
        """Nanoseconds covered on each rank."""
        total = np.zeros(self.world_size, np.int64)
        np.add.at(total, self.starts // self.stride, self.ends - self.starts)
        return total

    def extents_ns(self) -> np.ndarray:
        """Nanoseconds from the first start to the last end on each rank; 0 where there is nothing."""
        rank = self.starts // self.stride
        extents = np.zeros(self.world_size, np.int64)
        first = np.flatnonzero(np.diff(rank, prepend=-1))
        last = np.flatnonzero(np.diff(rank, append=self.world_size))
        extents[rank[first]] = self.ends[last] - self.starts[first]
        return extents

    def covered_before_ns(self, times_ns: np.ndarray) -> np.ndarray:
        """Nanoseconds covered before each time (counted from the trace's first start), all ranks added up."""
        return _ramp(self.starts % self.stride, times_ns) - _ramp(self.ends % self.stride, times_ns)


def _merged(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
    last = np.concatenate([first[1:] - 1, [len(starts) - 1]])
    return starts[first], reach[last]


def _ramp(since: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Σ max(t − s, 0) over all s; int64 wraps around, and the difference of two ramps wraps back."""
    since = np.sort(since)
    passed = np.searchsorted(since, times, side="right")
    sums = np.concatenate([[0], np.cumsum(since)])
    return times * passed - sums[passed]
