"""What a live view is shown while the ranks run, and what is left of it afterwards; times are on the wall clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from vizkit.metrics import SlowRank
from vizkit.metrics.stragglers import MIN_RATIO
from vizkit.runtime.diagnosis import ranks_text
from vizkit.runtime.live_record import Point
from vizkit.units import bytes_text, seconds_text

NOBODY_SLOW = f"slow: nobody (no rank took {MIN_RATIO}× what the others did by more than chance)"


NOTICEABLE_S = 0.1
"""A shorter wait is one of many like it, and how long it has lasted says nothing."""


@dataclass(frozen=True)
class WaitNow:
    """What a rank is blocked on: the operation, for how long, and the ranks that have not entered it yet."""

    operation: str
    since_s: float
    missing: tuple[int, ...]

    def __str__(self) -> str:
        whom = f" for {ranks_text(self.missing)}" if self.missing else ""
        since = f" {self.since_s:.1f} s" if self.since_s >= NOTICEABLE_S else ""
        return f"waits{since} in {self.operation}{whom}"


@dataclass(frozen=True)
class RankNow:
    """One rank: `step_s` and `own_s` are medians over its latest steps, the second without its waits for others.

    Both are the host's time: where it only queues work for a GPU, `own_s` tells little about the GPU.

    `posted_bytes` is the payload of all communications that it has posted, `memory_bytes` its resident memory
    (shared pages included), None where the system does not tell.
    """

    rank: int
    state: str
    steps: int = 0
    step_s: float | None = None
    own_s: float | None = None
    wait: WaitNow | None = None
    posted_bytes: int = 0
    memory_bytes: int | None = None

    @property
    def doing(self) -> str:
        return str(self.wait) if self.wait else self.state


@dataclass(frozen=True)
class Curve:
    """A number that ranks log, step by step, as the lowest rank that logs it has it."""

    name: str
    rank: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class LiveState:
    """All ranks at one moment; `done` of `total` steps (0: unknown) is what the slowest rank has come to."""

    elapsed_s: float
    done: int
    total: int
    label: str
    ranks: tuple[RankNow, ...]
    curves: tuple[Curve, ...]
    bytes_per_s: float
    slow: tuple[SlowRank, ...]
    is_stopping: bool = False

    @property
    def progress(self) -> str:
        """How far the slowest rank has come, in words."""
        return f"{self.label or 'step'} {self.done}" + (f" of {self.total}" if self.total else "")


@dataclass(frozen=True)
class SlowEpisode:
    """A rank was named as slow from one step to another; `worst` is the evidence at its clearest."""

    first_step: int
    last_step: int
    worst: SlowRank

    def __str__(self) -> str:
        return f"steps {self.first_step} to {self.last_step}: {self.worst}"


@dataclass(frozen=True)
class LiveSummary:
    """What the live view saw of a run, one entry a rank where it is by rank.

    `step_s` and `own_s`: medians of the latest steps (up to 254, the first left out), the second without waits for
    others; None for a rank with fewer than two steps. `posted_bytes`: payload. `peak_memory_bytes`: the most resident
    memory seen at any look. `slow`: who was named, when. `stopped_at`: the step after which Stop ended the run.
    """

    progress: str
    seconds: float
    steps: tuple[int, ...]
    step_s: tuple[float | None, ...]
    own_s: tuple[float | None, ...]
    posted_bytes: tuple[int, ...]
    peak_memory_bytes: tuple[int | None, ...]
    slow: tuple[SlowEpisode, ...]
    curves: Mapping[str, tuple[Point, ...]] = field(repr=False)
    looks: int = 0
    trouble: str = ""

    def __str__(self) -> str:
        lines = [
            f"{self.progress} in {seconds_text(self.seconds)} (wall clock), {len(self.steps)} "
            f"rank{'s' * (len(self.steps) != 1)}"
        ]
        for name, points in self.curves.items():
            if points:
                first, last = points[0], points[-1]
                lines.append(f"{name}: {first.value:.4g} at step {first.step}, {last.value:.4g} at step {last.step}")
        lines.append("rank  steps  a step (median)  own work (median)  posted (payload)  peak memory (resident)")
        rows = zip(self.steps, self.step_s, self.own_s, self.posted_bytes, self.peak_memory_bytes, strict=True)
        for rank, (steps, step_s, own_s, posted, memory) in enumerate(rows):
            lines.append(
                f"{rank:>4}  {steps:>5}  {_or_dash(step_s, seconds_text):>15}  {_or_dash(own_s, seconds_text):>17}  "
                f"{bytes_text(posted):>16}  {_or_dash(memory, bytes_text):>22}"
            )
        lines += [f"slow: {episode}" for episode in self.slow] or [NOBODY_SLOW]
        return "\n".join(lines + [f"the view failed: {self.trouble}"] * bool(self.trouble))


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "–" if value is None else text(value)


class LiveView(Protocol):
    """What shows a run while it goes on; the launcher looks at `stop_wanted` and calls the rest."""

    stop_wanted: bool

    def show(self, state: LiveState) -> None:
        """Called a few times a second, from the thread that launched."""

    def close(self, summary: LiveSummary) -> None:
        """Called once, however the run ends."""
