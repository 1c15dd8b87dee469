"""Collectives on paper: their steps, the bytes that they put on the wire, and their time by the α–β model."""

from __future__ import annotations

from vizkit.collectives.algorithms import algorithms_for, holdings, num_chunks, promise, steps
from vizkit.collectives.backends import BACKEND_ALGORITHMS, DEFAULT_ALGORITHMS, algorithm_for
from vizkit.collectives.cost import (
    algorithm_bandwidth,
    bus_bandwidth,
    bus_factor,
    chunk_bytes,
    critical_path,
    time_s,
    wire_bytes,
)
from vizkit.collectives.movements import Algorithm, Step, Transfer

__all__ = [
    "BACKEND_ALGORITHMS",
    "DEFAULT_ALGORITHMS",
    "Algorithm",
    "Step",
    "Transfer",
    "algorithm_bandwidth",
    "algorithm_for",
    "algorithms_for",
    "bus_bandwidth",
    "bus_factor",
    "chunk_bytes",
    "critical_path",
    "holdings",
    "num_chunks",
    "promise",
    "steps",
    "time_s",
    "wire_bytes",
]
