"""What a pipeline explorer shows for its settings: one schedule or two, simulated, as a picture and in words."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from vizkit.durations import Durations
from vizkit.figures.pipeline import picture, sides_of
from vizkit.figures.pipeline_layout import Side
from vizkit.hardware import Link
from vizkit.schedules.catalogue import recipe
from vizkit.schedules.schedule import Schedule
from vizkit.simulator import simulate

MS_PER_S = 1_000


@dataclass(frozen=True)
class ExplorerSettings:
    """Sizes, and milliseconds for one microbatch on all layers of a rank, which its stages share equally.

    `versus` is the second schedule, or None. `stages_per_rank` goes to schedules that leave it open.
    """

    schedule: str = "1F1B"
    versus: str | None = "ZBVZeroBubble"
    num_ranks: int = 4
    stages_per_rank: int = 2
    num_microbatches: int = 8
    forward_ms: float = 1.0
    input_ms: float = 1.0
    weight_ms: float = 1.0
    transfer_ms: float = 0.0

    def build(self, name: str) -> Schedule:
        """The schedule of this name in these sizes; raises `InvalidInputError` where it does not have them."""
        found = recipe(name)
        local = None if found.fixed_stages else self.stages_per_rank
        return found.build(self.num_ranks, self.num_microbatches, local)


def explore(settings: ExplorerSettings) -> list[Side]:
    """The one or two schedules, simulated; raises `InvalidInputError` for sizes that one does not have.

    >>> [side.trace.duration_ns for side in explore(ExplorerSettings(versus=None))]
    [33000000]
    """
    link = Link(latency_s=settings.transfer_ms / MS_PER_S) if settings.transfer_ms else None
    names = [settings.schedule, *([settings.versus] if settings.versus else [])]
    traces = []
    for name in names:
        schedule = settings.build(name)
        share = schedule.num_ranks / schedule.stages_per_pipeline / MS_PER_S
        durations = Durations(F=settings.forward_ms * share, I=settings.input_ms * share, W=settings.weight_ms * share)
        traces.append(simulate(schedule, durations, link))
    return sides_of(traces, [trace.notes["schedule"] for trace in traces])


def explorer_figure(settings: ExplorerSettings) -> dict[str, Any]:
    """Data and layout in Plotly's words, for `go.Figure` or JSON; raises `InvalidInputError` as `explore` does.

    >>> explorer_figure(ExplorerSettings(versus=None))["layout"]["title"]["text"]
    '1F1B: 4 ranks, 8 microbatches'
    """
    return picture(explore(settings))


def explorer_json(settings: ExplorerSettings) -> str:
    """`explorer_figure` as JSON that plotly.js reads: numbers travel as base64, which takes a tenth of the time.

    >>> sorted(json.loads(explorer_json(ExplorerSettings(versus=None))))
    ['data', 'layout']
    """
    return json.dumps(explorer_figure(settings), default=_typed_array, separators=(",", ":"))


def _typed_array(values: Any) -> dict[str, str] | int | float:
    """Plotly's form of an array of numbers, whose integers have 32 bits at most."""
    if isinstance(values, np.generic):
        return values.item()
    array = np.ascontiguousarray(values, np.int32 if values.dtype.kind == "i" else None)
    spec = {"dtype": array.dtype.str[1:], "bdata": base64.b64encode(array.tobytes()).decode()}
    return spec | ({"shape": ", ".join(map(str, array.shape))} if array.ndim > 1 else {})


def explorer_words(sides: list[Side]) -> str:
    """A line for each schedule: makespan, bubble under both definitions, peak activation memory.

    >>> explorer_words(explore(ExplorerSettings(versus=None))).split("; ")[-1]
    "peak activations 4 microbatches of one rank's layers, on rank 0"
    """
    return "\n".join(map(_line, sides))


def _line(side: Side) -> str:
    line = f"{side.label}: makespan {side.facts().replace(' · ', '; ')}"
    if side.memory:
        peaks = side.memory.peaks
        most = max(peaks, key=peaks.__getitem__)
        line += f"; peak activations {side.memory.text(peaks[most])} {side.memory.unit}, on rank {most}"
    return line
