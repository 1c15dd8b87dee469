"""The most that each rank held at one time, by category."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.memory_samples import CATEGORIES
from vizkit.sizes import is_whole
from vizkit.trace import Clock, Counter, Trace
from vizkit.units import bytes_text

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Holdings:
    """What one rank held over time: `num_bytes` (samples × categories) holds from `times_ns[i]` to the next sample."""

    rank: int
    times_ns: np.ndarray
    num_bytes: np.ndarray

    @property
    def fullest(self) -> int:
        """The first sample with the largest sum."""
        return int(self.num_bytes.sum(1).argmax())


def holdings(trace: Trace) -> list[Holdings]:
    """The samples of each rank that has any, its categories side by side, rank after rank.

    A category that a rank has no counter of is 0; counters sampled at different times hold their values in between.
    Counters in another unit than bytes do not count. Raises `InvalidInputError` for what is no trace.
    """
    if not isinstance(trace, Trace):
        raise InvalidInputError.because("trace", type(trace).__name__, "must be a vizkit.Trace", "give run.trace")
    by_rank: dict[int, dict[str, Counter]] = {}
    for counter in trace.counters:
        if counter.name in CATEGORIES and counter.unit == "bytes" and len(counter.values):
            by_rank.setdefault(counter.rank, {})[counter.name] = counter
    return [_side_by_side(rank, counters) for rank, counters in sorted(by_rank.items())]


def _side_by_side(rank: int, counters: Mapping[str, Counter]) -> Holdings:
    first, *others = counters.values()
    together = all(np.array_equal(first.times_ns, other.times_ns) for other in others)
    times = first.times_ns if together else np.unique(np.concatenate([c.times_ns for c in counters.values()]))
    columns = []
    for name in CATEGORIES:
        counter = counters.get(name)
        if counter is None:
            columns.append(np.zeros(len(times), np.int64))
        elif together:
            columns.append(counter.values)
        else:
            last = np.searchsorted(counter.times_ns, times, side="right") - 1
            columns.append(np.where(last >= 0, counter.values[np.maximum(last, 0)], 0))
    return Holdings(rank, times, np.column_stack(columns))


@dataclass(frozen=True, eq=False, repr=False)
class PeakMemory:
    """Bytes on each rank, as int64 arrays with one row a rank and one column for each of `categories`.

    `at_peak` is what a rank held at the moment (`times_ns`, on the trace's clock) of its largest sum; `highest` is the
    most of each category at any moment, so that its row may add up to more. Ranks that nobody tracked have zeros.
    """

    clock: Clock
    categories: tuple[str, ...]
    at_peak: np.ndarray
    highest: np.ndarray
    times_ns: np.ndarray

    @property
    def total_bytes(self) -> np.ndarray:
        """The largest sum of each rank."""
        return self.at_peak.sum(1)

    def of(self, rank: int) -> dict[str, int]:
        """Bytes by category on one rank at the moment of its largest sum; raises `InvalidInputError` for no rank."""
        return self._named(self.at_peak, rank)

    def highest_of(self, rank: int) -> dict[str, int]:
        """The most of each category on one rank, each at its own moment; raises `InvalidInputError` as `of` does."""
        return self._named(self.highest, rank)

    def to_frame(self) -> pd.DataFrame:
        """A pandas table, one row a rank, in bytes: by category at the peak, the sum, each category's own peak."""
        import pandas as pd

        columns = {f"{name}_bytes": self.at_peak[:, i] for i, name in enumerate(self.categories)}
        columns |= {"total_bytes": self.total_bytes}
        columns |= {f"highest_{name}_bytes": self.highest[:, i] for i, name in enumerate(self.categories)}
        return pd.DataFrame(columns, index=pd.RangeIndex(len(self.at_peak), name="rank"))

    def __str__(self) -> str:
        table = [["rank", *self.categories, "sum"], *self._rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in table]
        return "\n".join([_CAPTION, *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{title}</th>" for title in ("rank", *self.categories, "sum"))
        body = "".join(
            f"<tr><th>{rank}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for rank, *cells in self._rows()
        )
        return f"<table><caption>{_CAPTION}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _named(self, num_bytes: np.ndarray, rank: int) -> dict[str, int]:
        if not is_whole(rank) or not 0 <= rank < len(num_bytes):
            raise InvalidInputError.because(
                "rank", rank, f"there are {len(num_bytes)} ranks, from 0", "use one of them, such as rank=0"
            )
        return dict(zip(self.categories, num_bytes[rank].tolist(), strict=True))

    def _rows(self) -> list[list[str]]:
        rows = np.column_stack([self.at_peak, self.total_bytes])
        return [[str(rank), *map(bytes_text, row)] for rank, row in enumerate(rows.tolist())]


_CAPTION = "peak memory of tensors by rank, at the moment of each rank's largest sum"


def peak_memory(trace: Trace) -> PeakMemory:
    """The most that each rank's tensors held at one time, by category, from counters of `vk.track_memory`.

    Raises `InvalidInputError` for what is no trace.

    >>> counter = lambda name, *values: Counter(name, 0, np.array([0, 5, 9]), np.array(values))
    >>> counters = [counter("parameters", 40, 40, 40), counter("gradients", 0, 8, 40), counter("activations", 0, 60, 0)]
    >>> found = peak_memory(Trace.from_spans([], clock="wall", counters=counters))
    >>> print(found)
    peak memory of tensors by rank, at the moment of each rank's largest sum
    rank  parameters  gradients  optimizer  activations    sum
       0        40 B        8 B        0 B         60 B  108 B
    >>> found.highest_of(0)["gradients"]
    40
    """
    tracked = holdings(trace)
    at_peak = np.zeros((trace.world_size, len(CATEGORIES)), np.int64)
    highest, times = np.zeros_like(at_peak), np.zeros(trace.world_size, np.int64)
    for held in tracked:
        at_peak[held.rank] = held.num_bytes[held.fullest]
        highest[held.rank] = held.num_bytes.max(0)
        times[held.rank] = held.times_ns[held.fullest]
    return PeakMemory(trace.clock, CATEGORIES, at_peak, highest, times)
