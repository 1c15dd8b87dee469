"""What a link costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vizkit.errors import InvalidInputError
from vizkit.sizes import is_finite, is_number
from vizkit.units import bytes_text, seconds_text


@dataclass(frozen=True)
class Link:
    """An edge between two ranks that costs α + bytes/β seconds (Hockney's model); inside one rank nothing is charged.

    `latency_s` is α in seconds, `bandwidth_bytes_per_s` is β; infinite bandwidth leaves the latency alone. Raises
    `InvalidInputError` for a negative or undefined latency and for a bandwidth that is not positive.

    >>> Link(latency_s=1e-3, bandwidth_bytes_per_s=1e6).time_s(2_000_000)
    2.001
    >>> print(Link(0.05, 10e6), Link(1e-6, math.inf), Link(0, math.inf), sep="; ")
    50 ms + bytes / 10 MB/s; 1 µs; free
    """

    latency_s: float = 20e-6
    bandwidth_bytes_per_s: float = 10e9

    def __post_init__(self) -> None:
        if not (is_finite(self.latency_s) and self.latency_s >= 0):
            raise InvalidInputError.because(
                "latency_s", self.latency_s, "must be finite and not negative", "use 0 for a link without latency"
            )
        given = self.bandwidth_bytes_per_s
        if not (is_number(given) and given > 0 and (is_finite(given) or given == math.inf)):
            raise InvalidInputError.because(
                "bandwidth_bytes_per_s",
                self.bandwidth_bytes_per_s,
                "must be positive",
                "use float('inf') for a link that only has latency",
            )
        for name in ("latency_s", "bandwidth_bytes_per_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)):  # numpy's small integers would overflow later
                object.__setattr__(self, name, float(value))

    def time_s(self, num_bytes: float) -> float:
        """Seconds that one message of `num_bytes` takes from end to end."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s

    def __str__(self) -> str:
        if not math.isinf(self.bandwidth_bytes_per_s):
            return f"{seconds_text(self.latency_s)} + bytes / {bytes_text(self.bandwidth_bytes_per_s)}/s"
        return seconds_text(self.latency_s) if self.latency_s else "free"


FREE_LINK = Link(latency_s=0.0, bandwidth_bytes_per_s=math.inf)
"""A link that costs nothing: what remains is dependencies."""
