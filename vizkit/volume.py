"""What a step of training moves between ranks, by the published formulas."""

from __future__ import annotations

from dataclasses import dataclass

from vizkit.trace import SpanKind


@dataclass(frozen=True)
class Movement:
    """One kind of communication along one axis of the mesh, in one step, on one rank.

    `payload_bytes` is that of one call, as `vizkit.Span` defines it; each rank makes `times` such calls. `why` says what
    moves and by which formula.
    """

    axis: str
    kind: SpanKind
    payload_bytes: float
    times: float = 1.0
    why: str = ""

    @property
    def total_bytes(self) -> float:
        """Payload of all calls of one rank together."""
        return self.payload_bytes * self.times
