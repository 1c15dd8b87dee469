"""One time axis for hosts whose clocks differ, from what their ranks did together.

A collective cannot be over on any rank before its last member has entered it. Each such pair of moments, one read from
each of two clocks, bounds how far the clocks lie apart; together they form difference constraints, whose closure (all
shortest paths) is the tightest that can be known. The estimate is the middle of what is possible, so it breaks no
bound, and half the width is a bound on its error. (The idea is that of Cristian, 1989, with collectives as the probes.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.sizes import is_finite
from vizkit.trace import NS_PER_S

MAX_DRIFT = 500e-6
"""How much faster one host's clock may run than another's: Linux slews by at most 500 ppm, crystals err by less."""
_MAX_CELLS = 200_000
_FINEST_NS = 1_000.0
_WIDEST_DRIFT = 0.5
_ROW = 4

Stretches = Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True, eq=False)
class Bounds:
    """What was over on one host after it had begun on another: one row an observation, times on the hosts' own clocks.

    `ended_on[i]`'s clock showed `ended_ns[i]` no earlier than `entered_on[i]`'s clock showed `entered_ns[i]`.
    """

    ended_on: np.ndarray
    ended_ns: np.ndarray
    entered_on: np.ndarray
    entered_ns: np.ndarray

    def __len__(self) -> int:
        return len(self.ended_on)

    @property
    def room_ns(self) -> np.ndarray:
        """By how much the offset of `entered_on` can exceed that of `ended_on`."""
        return (self.ended_ns - self.entered_ns).astype(float)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int, int]]) -> Bounds:
        """From rows of (ended_on, ended_ns, entered_on, entered_ns)."""
        given = list(rows)
        if any(len(row) != _ROW for row in given):
            raise InvalidInputError.because(
                "rows", f"{len(given)} rows", "each is four numbers", "use rows=[(1, 5_030, 0, 1_000)]"
            )
        return cls(*np.array(given, np.int64).reshape(-1, _ROW).T)


@dataclass(frozen=True, eq=False)
class ClockAlignment:
    """What to add to the clock of each host (row) at each knot (column), to come to the time of host `reference`.

    `error_s` bounds how wrong the time between two moments on any two hosts may be; `inf` where the ranks of some host
    never waited for those of another, so that the wall clocks had to be trusted. `drift` is the relative rate of clocks
    that the bound allows for.
    """

    reference: int
    local_ns: np.ndarray
    offset_ns: np.ndarray
    error_s: float
    drift: float

    def moved(self, host: int, local_ns: np.ndarray | Sequence[int]) -> np.ndarray:
        """Times on the host's own clock, in nanoseconds, as times on the common one."""
        times = np.asarray(local_ns, np.int64)
        return times + np.rint(np.interp(times, self.local_ns[host], self.offset_ns[host])).astype(np.int64)


def align(bounds: Bounds, extents_ns: Stretches, guesses_ns: Sequence[int], drift: float = MAX_DRIFT) -> ClockAlignment:
    """The offsets between the clocks of hosts over time, and a bound on their error.

    `extents_ns` holds, for each host, the stretches of its clock in which its ranks ran: there the bound holds.
    `guesses_ns` is wall clock less own clock of each host: what is trusted where no communication tells. The true
    offsets are within the bound as long as no clock runs faster than another by more than `drift`; where the records
    contradict that, a larger drift is taken, and said. Raises `InvalidInputError` where no drift explains them.

    >>> bounds = Bounds.of([(1, 5_030, 0, 1_000), (0, 1_040, 1, 5_000)])  # a barrier: both enter, then both leave
    >>> found = align(bounds, [[(0, 2_000)], [(4_000, 6_000)]], [0, 0], drift=0.0)
    >>> found.moved(1, [5_000]).tolist(), round(found.error_s * 1e9)
    ([1005], 35)
    """
    _check(bounds, extents_ns, guesses_ns, drift)
    hosts = _Hosts(bounds, extents_ns, np.array(guesses_ns, float))
    while drift <= _WIDEST_DRIFT:
        if (found := hosts.aligned(drift)) is not None:
            return found
        drift = max(4 * drift, MAX_DRIFT)
    raise InvalidInputError.because(
        "records",
        f"{len(bounds)} pairs of moments",
        "some communication was over before it began, on whatever clocks",
        "give the files of one run only",
    )


def _check(bounds: Bounds, extents_ns: Stretches, guesses_ns: Sequence[int], drift: float) -> None:
    num_hosts = len(extents_ns)
    if not num_hosts or not all(len(own) for own in extents_ns):
        raise InvalidInputError.because(
            "extents_ns", list(extents_ns), "every host has a stretch, and there is one host", "use [[(0, 2_000)]]"
        )
    if len(guesses_ns) != num_hosts:
        raise InvalidInputError.because(
            "guesses_ns", list(guesses_ns), f"there are {num_hosts} hosts", f"give {num_hosts} numbers"
        )
    hosts = np.concatenate([bounds.ended_on, bounds.entered_on])
    if len(hosts) and not 0 <= hosts.min() <= hosts.max() < num_hosts:
        raise InvalidInputError.because(
            "bounds", f"hosts {hosts.min()} to {hosts.max()}", f"there are {num_hosts} hosts", "number them from 0 on"
        )
    if not (is_finite(drift) and drift >= 0):
        raise InvalidInputError.because("drift", drift, "must be finite and not negative", "use drift=500e-6")


@dataclass(frozen=True, eq=False)
class _Solution:
    alignment: ClockAlignment
    known_error_ns: float
    """The bound on the error between hosts that can be compared at all."""


@dataclass(frozen=True, eq=False)
class _Hosts:
    """A cell (j, i) below says by how many nanoseconds the offset of host j can exceed that of host i."""

    bounds: Bounds
    extents_ns: Stretches
    guesses_ns: np.ndarray

    def aligned(self, drift: float) -> ClockAlignment | None:
        """None where clocks with this drift cannot have shown what was seen."""
        rough = self._rough(drift)
        for _ in range(2):  # once more, as the moments of what was seen are then better known
            if rough is None:
                return None
            rough = self._over_time(rough, drift)
        return None if rough is None else rough.alignment

    def _rough(self, drift: float) -> _Solution | None:
        """One offset for the whole run."""
        starts = [min(start for start, _ in own) for own in self.extents_ns]
        length = max(max(end for _, end in own) - start for own, start in zip(self.extents_ns, starts, strict=True))
        cells = self._empty(1)
        bounds = self.bounds
        np.minimum.at(cells[0], (bounds.entered_on, bounds.ended_on), bounds.room_ns + 2 * drift * length)
        closed = _closed(cells)
        if _is_impossible(closed):
            return None
        widths = closed[0] + closed[0].T
        reference = int(widths.max(axis=1).argmin())
        offsets = _middles(closed, reference, self.guesses_ns)
        alignment = ClockAlignment(reference, np.array(starts, float)[:, None], offsets.T, np.inf, drift)
        return _Solution(alignment, widths[np.isfinite(widths)].max())

    def _over_time(self, rough: _Solution, drift: float) -> _Solution | None:
        """Offsets at knots: what is seen at one moment holds at another with `drift` times what lies between."""
        bounds, reference = self.bounds, rough.alignment.reference
        entered, ended = (
            _moved(rough.alignment, on, ns)
            for on, ns in ((bounds.entered_on, bounds.entered_ns), (bounds.ended_on, bounds.ended_ns))
        )
        stretches = np.array(
            [rough.alignment.moved(host, stretch) for host, own in enumerate(self.extents_ns) for stretch in own], float
        )
        room = bounds.room_ns + drift * (np.abs(entered - ended) + rough.known_error_ns)
        knots = self._knots(room, stretches[:, 0].min(), stretches[:, 1].max(), drift)
        step = knots[1] - knots[0] if len(knots) > 1 else 1.0
        nearest = np.rint((entered - knots[0]) / step).astype(int).clip(0, len(knots) - 1)
        cells = self._empty(len(knots))
        far = drift * np.abs(entered - knots[nearest])
        np.minimum.at(cells, (nearest, bounds.entered_on, bounds.ended_on), room + far)
        _spread(cells, drift * step)
        cells = _closed(cells)
        if _is_impossible(cells):
            return None
        offsets = _middles(cells, reference, self.guesses_ns)
        is_used = ((knots[:, None] >= stretches[:, 0] - step) & (knots[:, None] <= stretches[:, 1] + step)).any(axis=1)
        errors = (cells - offsets[:, :, None] + offsets[:, None, :])[is_used] + drift * step / 2 * (len(knots) > 1)
        alignment = ClockAlignment(
            reference=reference,
            local_ns=np.maximum.accumulate((knots[:, None] - offsets).T, axis=1),
            offset_ns=offsets.T,
            error_s=float(errors.max()) / NS_PER_S if len(offsets.T) > 1 else 0.0,
            drift=drift,
        )
        return _Solution(alignment, float(errors[np.isfinite(errors)].max(initial=0.0)))

    def _empty(self, num_knots: int) -> np.ndarray:
        num_hosts = len(self.extents_ns)
        cells = np.full((num_knots, num_hosts, num_hosts), np.inf)
        cells[:, range(num_hosts), range(num_hosts)] = 0.0
        return cells

    def _knots(self, room_ns: np.ndarray, first: float, last: float, drift: float) -> np.ndarray:
        """So close that the drift between two costs no more than what is open anyway, and no more than fit."""
        if not drift or last <= first:
            return np.array([first])
        cells = self._empty(1)[0]
        np.minimum.at(cells, (self.bounds.entered_on, self.bounds.ended_on), room_ns)
        widths = cells + cells.T
        open_ns = max(float(widths[np.isfinite(widths)].max()) / 2, _FINEST_NS)
        most = max(_MAX_CELLS // len(cells) ** 2, 2)
        return np.linspace(first, last, int(np.clip(np.ceil((last - first) * drift / open_ns), 1, most)) + 1)


def _moved(alignment: ClockAlignment, hosts: np.ndarray, local_ns: np.ndarray) -> np.ndarray:
    common = np.array(local_ns, float)
    for host in np.unique(hosts).tolist():
        common[hosts == host] = alignment.moved(host, local_ns[hosts == host])
    return common


def _spread(cells: np.ndarray, slack_ns: float) -> None:
    """What holds at one knot holds at the next, and the one before, with this slack."""
    ramp = slack_ns * np.arange(len(cells))[:, None, None]
    forward = np.minimum.accumulate(cells - ramp, axis=0) + ramp
    backward = np.minimum.accumulate((cells + ramp)[::-1], axis=0)[::-1] - ramp
    np.minimum(forward, backward, out=cells)


def _closed(cells: np.ndarray) -> np.ndarray:
    """All that follows from the bounds together: shortest paths (Floyd and Warshall), over the last two axes."""
    for via in range(cells.shape[-1]):
        cells = np.minimum(cells, cells[..., :, via, None] + cells[..., None, via, :])
    return cells


def _is_impossible(closed: np.ndarray) -> bool:
    return bool((np.diagonal(closed, axis1=-2, axis2=-1) < 0).any())


def _middles(cells: np.ndarray, reference: int, guesses_ns: np.ndarray) -> np.ndarray:
    """The offsets in the middle of what is possible, over the last axis; where that has no end, next to the guess."""
    highest, lowest = cells[..., :, reference], -cells[..., reference, :]
    is_known = np.isfinite(highest) & np.isfinite(lowest)
    middle = (np.where(is_known, highest, 0.0) + np.where(is_known, lowest, 0.0)) / 2
    return np.where(is_known, middle, np.clip(guesses_ns - guesses_ns[reference], lowest, highest))
