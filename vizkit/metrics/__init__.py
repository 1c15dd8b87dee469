"""Numbers about a trace, each with its definition."""

from __future__ import annotations

from vizkit.metrics.occupancy import Breakdown, Bubble, breakdown, bubble, peak_activations, utilisation
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
    "peak_activations",
    "straggler",
    "traffic",
    "traffic_over_time",
    "utilisation",
]
