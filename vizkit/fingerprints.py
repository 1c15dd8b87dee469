"""Hashes of what ranks hold, step by step: plain data that a run brings back, and its counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from vizkit.trace import Counter, Trace

_PREFIX = "fingerprint"
_SAME, _DIFFERENT = "same", "different"
_HASH_UNIT, _STEP_UNIT = "hash", "step"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`value` is a hash (64 bits, as an int64) of the bytes that a rank held as `name` at `step`.

    `same` says what is right: all `members` (global ranks; () for all) hold the same, or no two of them do.
    """

    name: str
    step: int
    value: int
    same: bool
    members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Noted:
    """A fingerprint with its rank and its time in nanoseconds on the trace's clock."""

    rank: int
    time_ns: int
    fingerprint: Fingerprint


def counters_of(noted: Iterable[Noted]) -> list[Counter]:
    """Two counters for each rank and name, with the same times: the hashes (unit "hash") and their steps ("step").

    >>> first = Noted(1, 50, Fingerprint("parameters", 3, 77, same=True, members=(0, 1)))
    >>> [(c.name, c.rank, c.unit, c.values.tolist()) for c in counters_of([first])]
    [('fingerprint/same/0,1/parameters', 1, 'hash', [77]), ('fingerprint/same/0,1/parameters', 1, 'step', [3])]
    """
    series: dict[tuple[int, str], list[Noted]] = defaultdict(list)
    for one in noted:
        series[one.rank, _counter_name(one.fingerprint)].append(one)
    counters = []
    for (rank, name), ones in series.items():
        times = np.array([one.time_ns for one in ones], np.int64)
        for unit, values in (
            (_HASH_UNIT, [one.fingerprint.value for one in ones]),
            (_STEP_UNIT, [one.fingerprint.step for one in ones]),
        ):
            counters.append(Counter(name, rank, times, np.array(values, np.int64), unit))
    return counters


def fingerprints_of(trace: Trace) -> Iterator[Noted]:
    """The fingerprints in a trace's counters, rank by rank in order of time.

    >>> first = Noted(1, 50, Fingerprint("parameters", 3, 77, same=True, members=(0, 1)))
    >>> next(fingerprints_of(Trace.from_spans([], clock="wall", counters=counters_of([first])))) == first
    True
    """
    hashes = {(c.rank, c.name): c for c in trace.counters if c.unit == _HASH_UNIT and c.name.startswith(f"{_PREFIX}/")}
    steps = {(c.rank, c.name): c.values for c in trace.counters if c.unit == _STEP_UNIT}
    for key, counter in hashes.items():
        _, expected, members, name = counter.name.split("/", 3)
        group = tuple(int(member) for member in members.split(",") if member)
        rows = zip(counter.times_ns.tolist(), counter.values.tolist(), steps[key].tolist(), strict=True)
        for time_ns, value, step in rows:
            yield Noted(counter.rank, time_ns, Fingerprint(name, step, value, expected == _SAME, group))


def _counter_name(fingerprint: Fingerprint) -> str:
    expected = _SAME if fingerprint.same else _DIFFERENT
    return f"{_PREFIX}/{expected}/{','.join(map(str, fingerprint.members))}/{fingerprint.name}"
