"""A run whose ranks each left a file: its attempts on one time axis."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vizkit import record as records
from vizkit.durations import Durations
from vizkit.formats.rank_file import Outcome
from vizkit.hardware import Link
from vizkit.record import Record
from vizkit.replay import replay
from vizkit.trace import Clock, Span, SpanKind, Trace
from vizkit.units import bytes_text, seconds_text

if TYPE_CHECKING:
    import pandas as pd

_DEFAULT_LINK = Link()
_SHOWN = 120
"""Characters of an exception in a summary."""


@dataclass(frozen=True)
class Ending:
    """How a rank ended: `detail` is the exception or the signal."""

    outcome: Outcome
    detail: str = ""

    def __str__(self) -> str:
        first = self.detail.partition("\n")[0]
        return f"{self.outcome} {first[:_SHOWN]}{'…' * (len(first) > _SHOWN)}".strip()


@dataclass(frozen=True, eq=False)
class Attempt:
    """One start of all ranks; after a restart there is another. Wall times in `record` are on the common clock."""

    number: int
    world_size: int
    record: Record
    endings: Mapping[int, Ending]
    results: Mapping[int, Any]

    @property
    def extent_ns(self) -> tuple[int, int]:
        """First start and last end of a rank's function, on the common clock."""
        ranks = self.record.ranks
        return min(rank.start_wall_ns for rank in ranks), max(rank.end_wall_ns for rank in ranks)

    def __str__(self) -> str:
        start, end = self.extent_ns
        by_ending: dict[str, list[int]] = {}
        for rank, ending in sorted(self.endings.items()):
            by_ending.setdefault(str(ending), []).append(rank)
        ends = "; ".join(f"rank{'s' * (len(who) > 1)} {_ranges(who)} {how}" for how, who in by_ending.items())
        return f"attempt {self.number}: {self.world_size} ranks, {seconds_text((end - start) / 1e9)}; {ends}"


@dataclass(frozen=True, eq=False)
class GatheredRun:
    """What the files of all ranks say together.

    `clock_error_s` bounds how wrong the time between moments on two hosts may be: 0 where all ranks share a host, `inf`
    where the ranks of two hosts never waited for each other. `left_out` names what could not be used, and why. `cores`
    are those of all hosts together in the last attempt, `num_threads` those of a rank.
    """

    attempts: tuple[Attempt, ...]
    hosts: tuple[str, ...]
    clock_error_s: float
    left_out: tuple[str, ...] = ()
    cores: int = 0
    num_threads: int = 1

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]

    @property
    def record(self) -> Record:
        """The record of the last attempt."""
        return self.last.record

    @property
    def without_earlier_attempts(self) -> GatheredRun:
        """The last attempt as a run of its own."""
        return replace(self, attempts=self.attempts[-1:])

    @property
    def device(self) -> str:
        return self.record.notes.get("device", "cpu")

    @property
    def world_size(self) -> int:
        return self.last.world_size

    @property
    def results(self) -> list[Any]:
        """What the function returned in the last attempt, one entry a rank: plain data, or the text of what is not."""
        return [self.last.results.get(rank) for rank in range(self.world_size)]

    @functools.cached_property
    def trace(self) -> Trace:
        """All attempts on the clock "wall"; from one to the next each rank waits in a span named "restart"."""
        zero, _ = self.attempts[0].extent_ns
        traces = [records.wall_trace(a.record).shift(a.extent_ns[0] - zero) for a in self.attempts]
        gaps = [
            Span(rank, SpanKind.WAIT, ended, begun, f"restart {after.number}")
            for before, after in zip(traces, self.attempts[1:], strict=False)
            for rank, begun in ((each.rank, each.start_wall_ns - zero) for each in after.record.ranks)
            for ended in [max(before.filter(rank=rank).end_ns, default=begun)]
            if ended < begun
        ]
        if gaps:
            traces.append(Trace.from_spans(gaps, clock=Clock.WALL))
        merged = Trace.merge(traces) if len(traces) > 1 else traces[0]
        world_size = max(attempt.world_size for attempt in self.attempts)
        return replace(merged, world_size=world_size, notes={**self.record.notes, **self.notes})

    @property
    def notes(self) -> dict[str, str]:
        """Facts to show beside a figure."""
        error = self.clock_error_s
        notes = {
            "hosts": ", ".join(self.hosts),
            "clock_error_s": f"{error:.3g}" if math.isfinite(error) else "unknown (wall clocks trusted)",
        }
        if len(self.attempts) > 1:
            notes["attempts"] = str(len(self.attempts))
        if self.left_out:
            notes["left out"] = "; ".join(self.left_out)
        return notes

    def replay(
        self, link: Link | None = _DEFAULT_LINK, durations: Durations | Mapping[str, float] | None = None
    ) -> Trace:
        """The last attempt with a device for each rank, on the clock "virtual", as `Run.replay` has it."""
        return replay(self.record, link=link, durations=durations)

    @functools.cached_property
    def collectives(self) -> pd.DataFrame:
        """A table of the last attempt with one row for each distinct collective, as `Run.collectives` has it."""
        return records.collectives_table(self.record)

    def summary(self) -> str:
        """Who ran where and for how long, how each attempt ended, how well the clocks agree, what was left out."""
        notes = self.record.notes
        first, last = self.attempts[0].extent_ns[0], self.last.extent_ns[1]
        error = self.clock_error_s
        agree = (
            "one host, one clock"
            if len(self.hosts) == 1
            else f"clocks of the hosts agree within {seconds_text(error)}"
            if math.isfinite(error)
            else "clocks of the hosts not comparable: their ranks never waited for each other; wall clocks trusted"
        )
        lines = [
            f"{self.world_size} ranks on {len(self.hosts)} host{'s' * (len(self.hosts) != 1)} "
            f"({', '.join(self.hosts)}), {notes.get('device', 'device unknown')}, backend "
            f"{notes.get('backend', 'unknown')}",
            f"{seconds_text((last - first) / 1e9)} (wall clock); {agree}",
            f"{bytes_text(self.record.payload_bytes)} of payload in the last attempt, all ranks",
            *(str(attempt) for attempt in self.attempts),
            *(f"left out: {reason}" for reason in self.left_out),
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.summary()


def _ranges(ranks: list[int]) -> str:
    """
    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
