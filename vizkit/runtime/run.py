"""What a launch gives back."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vizkit import record as records
from vizkit.durations import Durations
from vizkit.hardware import Link
from vizkit.links import Links
from vizkit.metrics import breakdown, traffic
from vizkit.record import Record
from vizkit.replay import replay
from vizkit.trace import Trace
from vizkit.units import bytes_text, seconds_text

if TYPE_CHECKING:
    import pandas as pd

    from vizkit.runtime.live_state import LiveSummary

DEFAULT_LINK = Link()


@dataclass(frozen=True, eq=False)
class Run:
    """Results, output and record of one launch.

    `results` has what the function returned, one entry a rank; `logs` what each rank printed; `record` the
    communications and spans of each rank; `seconds` is wall time from the call until all results were back. `live` is
    what the live view saw, None without `live=True`.
    """

    results: list[Any]
    logs: list[str]
    record: Record = field(repr=False)
    world_size: int
    backend: str
    device: str
    device_reason: str
    seconds: float
    cores: int
    num_threads: int
    live: LiveSummary | None = field(default=None, repr=False)

    @functools.cached_property
    def trace(self) -> Trace:
        """What happened on this machine, as a `Trace` with clock "wall"."""
        return records.wall_trace(self.record)

    def replay(
        self,
        link: Link | Links | None = DEFAULT_LINK,
        durations: Durations | Mapping[str, float] | None = None,
    ) -> Trace:
        """The recorded program with a device for each rank, as a `Trace` with clock "virtual".

        `link` is what communication costs: 20 µs and 10 GB/s unless said otherwise; `vizkit.links.Links` has a fast one
        inside nodes and a slow one between them; None: nothing, as `vk.simulate` has it unless it is given a link.
        `durations` in seconds by kind of span replace the measured CPU time and make the replay exact and the same in
        every run; without them all that the ranks computed counts, set-up included. Of a run that was stopped, what all
        ranks have finished is replayed.
        """
        stopped = records.STOPPED in self.record.notes
        record = records.finished_part(self.record) if stopped else self.record
        return replay(record, link=link, durations=durations)

    @functools.cached_property
    def collectives(self) -> pd.DataFrame:
        """A table with one row for each distinct collective: op, group ranks, payload bytes, times seen."""
        return records.collectives_table(self.record)

    def summary(self) -> str:
        """What ran, where, for how long, and who was slowest."""
        crowded = self.device == "cpu" and self.world_size > self.cores
        lines = [
            f"{self.world_size} rank{'s' * (self.world_size != 1)} on {self.device} ({self.device_reason}), "
            f"backend {self.backend}, {self.num_threads} thread{'s' * (self.num_threads != 1)} a rank, "
            f"{self.cores} core{'s' * (self.cores != 1)}",
            f"{seconds_text(self.seconds)} (wall clock, from the call until all results were back)"
            + ("; ranks share cores, so read times off the virtual clock" if crowded else ""),
        ]
        virtual = self.replay()
        moved = int(traffic(virtual).wire_bytes.sum())
        lines.append(f"{bytes_text(moved)} moved between ranks (on the wire) by {self._communications_text()} a rank")
        compute = breakdown(virtual).compute
        if compute.max(initial=0) > 0:
            slowest = int(compute.argmax())
            lines.append(
                f"slowest rank: {slowest}, {seconds_text(compute[slowest] / 1e9)} of compute; mean "
                f"{seconds_text(compute.mean() / 1e9)} (virtual clock: a device for each rank)"
            )
        return "\n".join(lines)

    def _communications_text(self) -> str:
        counts = [sum(1 for _ in rank.calls) for rank in self.record.ranks]
        least, most = min(counts), max(counts)
        return f"{most if least == most else f'{least} to {most}'} communication{'s' * (most != 1)}"

    def __repr__(self) -> str:
        return self.summary()
