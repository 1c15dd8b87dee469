"""Numbers about a trace, each with its definition."""

from __future__ import annotations

from vizkit.metrics.memory import PeakMemory, peak_memory
from vizkit.metrics.occupancy import Breakdown, Bubble, breakdown, bubble, peak_activations, utilisation
from vizkit.metrics.stragglers import SlowRank, slow_ranks
from vizkit.metrics.waiting import Straggler, straggler
from vizkit.metrics.wire import KindTraffic, Traffic, traffic, traffic_over_time

__all__ = [
    "Breakdown",
    "Bubble",
    "KindTraffic",
    "PeakMemory",
    "SlowRank",
    "Straggler",
    "Traffic",
    "breakdown",
    "bubble",
    "peak_activations",
    "peak_memory",
    "slow_ranks",
    "straggler",
    "traffic",
    "traffic_over_time",
    "utilisation",
]
