"""Activation memory under a pipeline picture: a small area for each rank, all to one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vizkit.activations import ACTIVATIONS, held_activations
from vizkit.figures.describe import MAX_RANKS_LISTED
from vizkit.figures.theme import PURPLE, TEXT, TimeAxis
from vizkit.trace import Counter, Trace
from vizkit.units import bytes_text

COUNTER_NAMES = (ACTIVATIONS, "memory")
"""The first that a trace has is drawn."""
AREA = "rgba(204,121,167,0.45)"
EN_SPACE = "\u2002"
"""Not a space, which SVG would leave out at the beginning of a text."""
ROW_HEIGHT = 0.86
"""Of a rank's area at the highest value, as a share of its row."""
MAX_OUTLINED_RANKS = 24
MAX_POINTS = 600
"""Of one rank; where there are more, each keeps the highest value around it."""


@dataclass(frozen=True)
class Memory:
    """The memory counters of a trace: one a rank that has any, their highest value, and their unit."""

    counters: tuple[Counter, ...]
    highest: float
    unit: str

    @classmethod
    def of(cls, trace: Trace) -> Memory | None:
        """The trace's counters, else what its passes hold; None where it has neither."""
        candidates = [[c for c in trace.counters if c.name == name and len(c.values)] for name in COUNTER_NAMES]
        found = next(filter(None, candidates), None) or held_activations(trace)
        if not found:
            return None
        return cls(tuple(found), max(float(np.max(c.values)) for c in found), found[0].unit)

    def text(self, value: float) -> str:
        """A value for people; bytes with their unit."""
        return bytes_text(value) if self.unit == "bytes" else f"{value:.3g}"

    @property
    def peaks(self) -> dict[int, float]:
        """The highest value of each rank that has a counter."""
        return {counter.rank: float(np.max(counter.values)) for counter in self.counters}

    def in_words(self) -> str:
        """One line: the peak of each rank, or of the least and the most loaded where there are many."""
        peaks = self.peaks
        unit = "" if self.unit == "bytes" else f" ({self.unit})"
        if len(peaks) <= MAX_RANKS_LISTED:
            said = ", ".join(f"rank {rank} {self.text(peak)}" for rank, peak in peaks.items())
        else:
            least, most = min(peaks, key=peaks.__getitem__), max(peaks, key=peaks.__getitem__)
            said = f"from {self.text(peaks[least])} on rank {least} to {self.text(peaks[most])} on rank {most}"
        return f"Peak memory of activations{unit}: {said}."


def memory_traces(
    memory: Memory, axis: TimeAxis, duration: float, highest: float, yaxis: str, shown_ranks: range
) -> list[dict[str, Any]]:
    """An area for each rank, on its row of `yaxis` (row r from r + 1 up to r), with the peaks of `shown_ranks` beside.

    `highest` is the value that fills a row; figures with several traces give them one.
    """
    scale = ROW_HEIGHT / (highest or 1)
    xs, ys, values = [], [], []
    for counter in memory.counters:
        time, value = _thinned(axis.of(counter.times_ns), np.asarray(counter.values, float))
        floor = counter.rank + 1.0
        # a step from each sample to the next, closed along the floor, and a gap to the next rank
        steps_x = np.repeat(np.append(time, duration), 2)[1:]
        steps_y = floor - scale * np.append(np.repeat(value, 2), value[-1])
        xs.append(np.concatenate([time[:1], steps_x, [duration, np.nan]]))
        ys.append(np.concatenate([[floor], steps_y, [floor, np.nan]]))
        values.append(np.concatenate([[0], np.append(np.repeat(value, 2), value[-1]), [0, np.nan]]))
    area = {
        "type": "scatter", "x": np.concatenate(xs), "y": np.concatenate(ys), "customdata": np.concatenate(values),
        "mode": "lines", "fill": "toself", "fillcolor": AREA,
        "line": {"width": 1 if len(xs) <= MAX_OUTLINED_RANKS else 0, "color": PURPLE},
        "hoveron": "points", "hovertemplate": "%{customdata:.4~s} at %{x:.6~g}<extra>memory</extra>",
        "name": "activation memory", "legendgroup": "memory", "showlegend": False, "yaxis": yaxis,
    }  # fmt: skip
    labelled = {rank: peak for rank, peak in memory.peaks.items() if rank in shown_ranks}
    peaks = {
        "type": "scatter", "mode": "text", "x": [duration] * len(labelled), "y": [rank + 0.55 for rank in labelled],
        "text": [f"{EN_SPACE}{memory.text(peak)}" for peak in labelled.values()], "textposition": "middle right",
        "textfont": {"size": 11, "color": TEXT}, "cliponaxis": False, "hoverinfo": "skip",
        "showlegend": False, "name": "peak", "legendgroup": "memory", "yaxis": yaxis,
    }  # fmt: skip
    return [area, peaks]


def highest_of(memories: Sequence[Memory | None]) -> float:
    """The value that fills a row, for all traces of a figure."""
    return max((memory.highest for memory in memories if memory), default=0.0)


def _thinned(times: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What is seen: of samples at one moment the last, and not more than `MAX_POINTS`."""
    is_last = np.append(times[1:] > times[:-1], True)
    times, values = times[is_last], values[is_last]
    if len(times) <= MAX_POINTS:
        return times, values
    first = np.unique(np.linspace(0, len(times), MAX_POINTS, endpoint=False).astype(np.int64))
    return times[first], np.maximum.reduceat(values, first)
