"""Who is late at collectives: what the rules for stragglers and for imbalance share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vizkit.metrics.stragglers import FALSE_ALARM, binomial_tail
from vizkit.metrics.waiting import arrivals
from vizkit.trace import COLLECTIVE_KINDS, NS_PER_S, Trace

ONE_RANKS_SHARE = 0.7
"""Of all waiting at collectives: from here on, one rank is the cause. Work of 1, 2, 3 and 4 units gives 0.5."""


@dataclass(frozen=True, eq=False)
class Lateness:
    """Waiting at collectives for the last rank to arrive, in seconds, mean over the ranks.

    `total_s` would be saved if all members of each collective arrived together; `saved_s[rank]` if that rank arrived,
    wherever it is the last, together with the next before it. It was last alone in `last_in[rank]` of `operations`
    collectives at which somebody waited.
    """

    total_s: float
    saved_s: np.ndarray
    last_in: np.ndarray
    operations: int

    @classmethod
    def of(cls, trace: Trace) -> Lateness:
        """From a trace's collectives; equal arrivals have no last rank."""
        found = arrivals(trace, COLLECTIVE_KINDS)
        saved, last_in = np.zeros(trace.world_size), np.zeros(trace.world_size, np.int64)
        lost = found.waited_ns - found.least_ns[found.operation]
        order = np.lexsort((lost, found.operation))
        first = np.flatnonzero(np.diff(found.operation[order], prepend=-1))
        members = np.diff(np.append(first, len(order)))
        shared = first[members > 1]
        ahead_ns = lost[order[shared + 1]]  # the last one has lost nothing, the next one this much
        last = found.rank[order[shared]]
        scale = NS_PER_S * max(len(np.unique(trace.rank)), 1)
        np.add.at(saved, last, ahead_ns * (members[members > 1] - 1) / scale)
        np.add.at(last_in, last, ahead_ns > 0)
        waited_for = len(np.unique(found.operation[lost > 0]))
        return cls(float(lost.sum() / scale), saved, last_in, waited_for)

    @property
    def culprit(self) -> int | None:
        """The one rank that most of the waiting is due to, if there is one."""
        if not self.total_s:
            return None
        worst = int(self.saved_s.argmax())
        return worst if self.saved_s[worst] >= ONE_RANKS_SHARE * self.total_s else None

    def is_steady(self, rank: int) -> bool:
        """Whether `rank` was the last one more often than chance has it if all ranks were alike.

        Then each is the last with probability 1/N; the binomial tail, times the N ranks that it might have been
        (Bonferroni), has to stay below one in a thousand: 11 collectives of 2 ranks, 6 of 4.
        """
        size = len(self.saved_s)
        return size * binomial_tail(self.operations, int(self.last_in[rank]), 1 / size) <= FALSE_ALARM
