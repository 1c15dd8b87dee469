"""A ledger as a table: records for pandas, text of fixed width, HTML."""

from __future__ import annotations

import html as markup
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vizkit.ledgers.book import Ledger, Row

NUMBERS = (
    "calls",
    "payload_bytes",
    "least_payload_bytes",
    "wire_bytes",
    "ring_bytes",
    "expected_calls",
    "expected_bytes",
    "difference_bytes",
)
COLUMNS = ("axis", "kind", *NUMBERS, "explanation")
_MEASURED = ("axis", "collective", "calls", "payload (B)", "wire (B)", "ring (B)")
_COMPARED = ("formula calls", "formula (B)", "difference (B)")
MOST_NOTES = 8
_LEFT = 2
"""So many columns hold words, the others numbers."""


def records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One dict a row, with the explanations as text."""
    return [
        {
            "axis": row.axis,
            "kind": row.kind.value,
            **{name: getattr(row, name) for name in NUMBERS},
            "explanation": "; ".join(map(str, row.explanations)),
        }
        for row in rows
    ]


def text(ledger: Ledger) -> str:
    """The table in fixed width, and below it a line for each explanation."""
    cells = [_titles(ledger), *(_cells(ledger, row) for row in ledger.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < _LEFT else cell.rjust(width) for i, (cell, width) in enumerate(pairs)
        ).rstrip()
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    ]
    return "\n".join([_caption(ledger), *lines, *_notes(ledger), *_verdict(ledger)])


def html(ledger: Ledger) -> str:
    """The same as a table that a screen reader can follow; colours are the page's own."""
    head = "".join(f'<th scope="col">{title}</th>' for title in _titles(ledger))
    body = "".join(
        f'<tr><th scope="row">{axis}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for axis, *cells in ([markup.escape(cell) for cell in _cells(ledger, row)] for row in ledger.rows)
    )
    notes = "".join(f"<li>{markup.escape(note)}</li>" for note in _notes(ledger))
    verdict = "".join(f"<p>{markup.escape(line)}</p>" for line in _verdict(ledger))
    return (
        f"<div><table><caption>{markup.escape(_caption(ledger))}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>{f'<ul>{notes}</ul>' if notes else ''}{verdict}</div>"
    )


def _titles(ledger: Ledger) -> list[str]:
    return [*_MEASURED, *(_COMPARED if ledger.has_formula else ())]


def _cells(ledger: Ledger, row: Row) -> list[str]:
    least, most = _number(row.least_payload_bytes), _number(row.payload_bytes)
    payload = most if least == most else f"{least} to {most}"
    cells = [row.axis, row.kind.value, _number(row.calls), payload, _number(row.wire_bytes), _number(row.ring_bytes)]
    if ledger.has_formula:
        difference = row.difference_bytes or 0
        cells += [_number(row.expected_calls), _number(row.expected_bytes)]
        cells += [f"{'+' if difference > 0 else ''}{_number(difference)}"]
    return cells


def _caption(ledger: Ledger) -> str:
    world = ledger.mesh.world_size
    parts = [f"Bytes of one rank, {world} rank{'s' * (world != 1)} as {ledger.mesh}", ledger.backend]
    if ledger.has_formula:
        parts.append(f"formula of {ledger.steps} step{'s' * (ledger.steps != 1)}")
    return ", ".join(filter(None, parts))


def _notes(ledger: Ledger) -> Iterator[str]:
    for row in ledger.rows:
        name, beyond = f"{row.axis} {row.kind.value}", len(row.explanations) - MOST_NOTES
        for explanation in (*row.explanations[:MOST_NOTES], *filter(None, [row.wire_explanation])):
            yield f"{name}: {explanation}"
        if beyond > 0:
            yield f"{name}: and {beyond} more, in ledger.row({row.axis!r}, {row.kind.value!r}).explanations"


def _verdict(ledger: Ledger) -> Iterator[str]:
    if not ledger.has_formula:
        return
    if ledger.matches:
        same = not any(row.difference_bytes for row in ledger.rows)
        yield "equal to the formula" if same else "the formula's calls and no others; every difference is explained"
    elif ledger.explained:
        yield "every difference is explained; some calls are not in the formula"
    else:
        yield "NOT explained: " + ", ".join(f"{row.axis} {row.kind.value}" for row in ledger.rows if not row.explained)


def _number(value: float | None) -> str:
    """
    >>> _number(1234), _number(0.5), _number(None)
    ('1,234', '0.5', '-')
    """
    if value is None:
        return "-"
    return f"{int(value):,}" if value == int(value) else f"{value:,.6g}"
