"""Numbers about a trace, each with its definition."""

from __future__ import annotations

from vizkit.metrics.occupancy import Breakdown, Bubble, breakdown, bubble, utilisation
from vizkit.metrics.waiting import Straggler, straggler
from vizkit.metrics.wire import KindTraffic, Traffic, traffic, traffic_over_time

__all__ = [
    "Breakdown",
    "Bubble",
    "KindTraffic",
    "Straggler",
    "Traffic",
    "breakdown",
    "bubble",
    "straggler",
    "traffic",
    "traffic_over_time",
    "utilisation",
]
