"""One rank as the notebook sees it."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from vizkit.runtime.nursery import RankProcess
from vizkit.runtime.worker import Failure


@dataclass(eq=False)
class RankHandle:
    """Its process, the channel and the pipes to it, and what has been heard from it."""

    rank: int
    process: RankProcess
    channel: socket.socket
    stacks: int
    outputs: dict[int, int] = field(default_factory=dict)  # descriptor of a pipe: stream 0 (output) or 1 (error)
    answered: bool = False
    failure: Failure | None = None
    exited: bool = False
    processor_ticks: int = -1
    wait: tuple[int, int] | None = None  # what its main thread waits for
    waits_since_s: float = 0.0

    @property
    def over(self) -> bool:
        return self.answered or self.failure is not None or self.exited
