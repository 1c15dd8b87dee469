"""Bytes that ranks moved, by axis of the mesh and kind, beside what the formulas say, and why they differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.ledgers import table
from vizkit.ledgers.explanations import (
    Calls,
    Cause,
    Explanation,
    bytes_of,
    explain,
    formula_bytes,
    formula_calls,
)
from vizkit.ledgers.gathering import Communications, axis_name, axis_size, gather
from vizkit.mesh import Mesh
from vizkit.record import Record, wall_trace
from vizkit.sizes import not_negative, whole_number
from vizkit.trace import COLLECTIVE_KINDS, COMMUNICATION_KINDS, SpanKind, Trace
from vizkit.volume import Movement

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Row:
    """All calls of one kind along one axis, each number that of one rank.

    `calls` and `payload_bytes` are those of `rank`, which has most, and `least_payload_bytes` those of the rank with
    least. `wire_bytes` is the most that a rank sends by this backend's algorithm, `ring_bytes` the most by the
    textbook's: the ring for all-reduce, all-gather and reduce-scatter, else `vizkit.collectives.DEFAULT_ALGORITHMS`.
    `expected_calls` and `expected_bytes` are the formula's, None where the ledger has none.
    """

    axis: str
    kind: SpanKind
    calls: int
    payload_bytes: int
    least_payload_bytes: int
    rank: int
    wire_bytes: int
    ring_bytes: int
    expected_calls: float | None = None
    expected_bytes: float | None = None
    explanations: tuple[Explanation, ...] = ()
    wire_explanation: Explanation | None = None
    formula: tuple[str, ...] = field(default=(), repr=False)

    @property
    def difference_bytes(self) -> float | None:
        """Payload minus the formula's."""
        return None if self.expected_bytes is None else self.payload_bytes - self.expected_bytes

    @property
    def explained(self) -> bool:
        """Whether there is a reason for each byte of the difference, on each rank."""
        return all(explanation.cause.accounts for explanation in self.explanations)

    @property
    def matches(self) -> bool:
        """Whether each rank moved the formula's bytes and no others, whatever the portions and the padding."""
        return all(explanation.cause.keeps_the_formula for explanation in self.explanations)


@dataclass(frozen=True, repr=False)
class Ledger:
    """Bytes by axis and kind, a `Row` each; `str` and notebooks show a table, `to_frame` gives it to pandas."""

    rows: tuple[Row, ...]
    mesh: Mesh
    backend: str = ""
    steps: int = 1
    has_formula: bool = False

    @property
    def explained(self) -> bool:
        """Whether the explained bytes add up to each difference exactly, on each rank.

        What the formula asks for and nobody did has no reason here, so it is not explained. Raises `InvalidInputError`
        where the ledger was made without a formula.
        """
        self._needs_formula()
        return all(row.explained for row in self.rows)

    @property
    def matches(self) -> bool:
        """Whether the formula's bytes, and no others, were moved: buckets and padding are all that differs."""
        self._needs_formula()
        return all(row.matches for row in self.rows)

    def row(self, axis: str, kind: SpanKind | str) -> Row:
        """The row of an axis and a kind; raises `InvalidInputError` with those that there are."""
        kind = SpanKind.parse(kind)
        for row in self.rows:
            if isinstance(axis, str) and (row.axis, row.kind) == (axis, kind):
                return row
        there = ", ".join(f"{row.axis} {row.kind.value}" for row in self.rows) or "no row"
        raise InvalidInputError.because(
            "row", f"{axis} {kind.value}", f"the ledger has {there}", "ask for one of these"
        )

    def to_frame(self) -> pd.DataFrame:
        """A pandas table with one row an axis and kind; bytes of one rank."""
        import pandas as pd

        return pd.DataFrame(table.records(self.rows), columns=list(table.COLUMNS))

    def __str__(self) -> str:
        return table.text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return table.html(self)

    def _needs_formula(self) -> None:
        if not self.has_formula:
            raise InvalidInputError.because(
                "expected", None, "there is no formula to compare with", "give expected=vk.volume.movements(…)"
            )


def ledger(
    run: Trace | Record | object,
    mesh: Mesh | object | None = None,
    expected: Iterable[Movement] | None = None,
    *,
    steps: int = 1,
) -> Ledger:
    """Bytes that each rank moved, by axis of `mesh` and kind, beside the formula's.

    `run` is a run, a record or a trace. `mesh` is a `vk.Mesh`, or a named `DeviceMesh`; without one the whole world is
    an axis called "world". Groups along several axes are "dp×tp"; those that follow none are listed by their ranks. A
    message counts at its sender, along the axis in which its ends differ. `expected` holds what one rank moves in one
    step (`vizkit.volume.movements`), of which the run made `steps`; for messages, what the rank moves that moves most.

    Raises `InvalidInputError` for a mesh that does not fit the ranks, a formula for an axis that the mesh lacks or for
    what is no communication, and anything that is no run.

    >>> from vizkit.trace import Span
    >>> spans = [Span(r, "all_reduce", 0, 1, payload_bytes=n) for r in range(2) for n in (600, 400)]
    >>> books = ledger(Trace.from_spans(spans, clock="ideal"), Mesh(dp=2), [Movement("dp", "all_reduce", 1000)])
    >>> books.explained, [explanation.text for explanation in books.rows[0].explanations]
    (True, ['1 call of 1,000 B came as 1 call of 400 B, 1 call of 600 B'])
    """
    trace = _trace(run)
    if mesh is None:
        mesh = Mesh(world=max(trace.world_size, 1))
    mesh = Mesh.of(mesh)
    mesh.check_world_size(trace.world_size)
    steps = whole_number("steps", steps)
    formula = None if expected is None else _by_row(expected, mesh)
    kinds = [k for k in COMMUNICATION_KINDS if k is not SpanKind.RECEIVE or any(kind is k for _, kind in formula or {})]
    found = {(part.axis, part.kind): part for part in gather(trace, mesh, kinds)}
    for axis, kind in formula or {}:
        if (axis, kind) not in found:
            nobody: dict[int, Calls] = {rank: Calls() for rank in range(trace.world_size)}
            nothing = dict.fromkeys(nobody, 0)
            found[axis, kind] = Communications(axis, kind, axis_size(mesh, axis), nobody, nothing, nothing, ())
    backend = trace.notes.get("backend", "")
    rows = [
        _row(part, None if formula is None else formula.get(key, ()), steps, backend) for key, part in found.items()
    ]
    return Ledger(tuple(rows), mesh, backend, steps, formula is not None)


def _trace(run: Any) -> Trace:
    if isinstance(run, Trace):
        return run
    if isinstance(run, Record):
        return wall_trace(run)
    trace = getattr(run, "trace", None)
    if not isinstance(trace, Trace):
        raise InvalidInputError.because(
            "run", type(run).__name__, "must be a run, a record or a trace", "give what vk.launch returned"
        )
    return trace


def _by_row(expected: Iterable[Movement], mesh: Mesh) -> dict[tuple[str, SpanKind], list[Movement]]:
    rows: dict[tuple[str, SpanKind], list[Movement]] = {}
    for movement in expected if np.iterable(expected) else [expected]:
        if not isinstance(movement, Movement):
            raise InvalidInputError.because(
                "expected", movement, "must be a vizkit.volume.Movement", "use vk.volume.movements(model, layout)"
            )
        if not isinstance(movement.axis, str):
            raise InvalidInputError.because(
                "axis", movement.axis, f"must be a name of {mesh}'s axes", f"use {' or '.join(mesh.names)}"
            )
        kind = SpanKind.parse(movement.kind)
        if kind not in COMMUNICATION_KINDS:
            valid = ", ".join(known.value for known in COMMUNICATION_KINDS)
            raise InvalidInputError.because("kind", kind.value, "moves nothing between ranks", f"use one of {valid}")
        for name, value in (("payload_bytes", movement.payload_bytes), ("times", movement.times)):
            not_negative(name, value, "use 0 for nothing")
        rows.setdefault((axis_name(mesh, movement.axis), kind), []).append(movement)
    return rows


def _row(part: Communications, movements: Sequence[Movement] | None, steps: int, backend: str) -> Row:
    totals = {rank: bytes_of(calls) for rank, calls in part.calls.items()}
    fullest = max(totals, key=lambda rank: (totals[rank], part.calls[rank].total(), -rank), default=0)
    calls: Calls = part.calls.get(fullest, Calls())
    return Row(
        axis=part.axis,
        kind=part.kind,
        calls=calls.total(),
        payload_bytes=totals.get(fullest, 0),
        least_payload_bytes=min(totals.values(), default=0),
        rank=fullest,
        wire_bytes=max(part.wire_bytes.values(), default=0),
        ring_bytes=max(part.ring_bytes.values(), default=0),
        expected_calls=None if movements is None else formula_calls(movements, steps),
        expected_bytes=None if movements is None else formula_bytes(movements, steps),
        explanations=() if movements is None else tuple(_explanations(part, movements, steps, fullest)),
        wire_explanation=_wire_explanation(part, backend),
        formula=tuple(movement.why for movement in movements or () if movement.why),
    )


def _explanations(
    part: Communications, movements: Sequence[Movement], steps: int, fullest: int
) -> Iterable[Explanation]:
    """Those of the fullest rank first, then those of ranks whose calls are others."""
    profiles: dict[frozenset[tuple[int, int]], list[int]] = {}
    for rank in sorted(part.calls, key=lambda rank: (rank != fullest, rank)):
        profiles.setdefault(frozenset(part.calls[rank].items()), []).append(rank)
    for ranks in profiles.values():
        calls, most = part.calls[ranks[0]], part.calls[fullest]
        if part.kind not in COLLECTIVE_KINDS and fullest not in ranks and calls <= most:
            fewer = most - calls
            count = fewer.total()
            text = f"{count:,} message{'s' * (count != 1)} fewer than the {most.total():,} of rank {fullest}"
            found: tuple[Explanation, ...] = (Explanation(Cause.PART_OF_THE_FULLEST, -bytes_of(fewer), text, count),)
        else:
            found = explain(calls, movements, part.kind, part.num_ranks, steps)
        for one in found:
            where = tuple(sorted(ranks)) if len(profiles) > 1 else ()
            yield Explanation(one.cause, one.difference_bytes, one.text, one.calls, where)


def _wire_explanation(part: Communications, backend: str) -> Explanation | None:
    sent, textbook = (max(sent.values(), default=0) for sent in (part.wire_bytes, part.ring_bytes))
    if sent == textbook:
        return None
    cause, how = Cause.OTHER_ALGORITHM, " and ".join(part.algorithms).replace("_", " ")
    text = f"{backend or 'this backend'} uses {how}"
    if part.algorithms == ("via_all_reduce",):
        cause = Cause.GLOO_REDUCE_SCATTER
        text = f"{backend or 'this backend'} runs reduce-scatter as an all-reduce of the full input"
    return Explanation(cause, sent - textbook, f"{text}: {sent - textbook:+,} B a rank beside the textbook's", 0)
