"""Schedules as CSV in the grammar of `torch.distributed.pipelining`, in its dialect of today and the older one."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.schedules.actions import ACTION_KINDS, Action, Cell
from vizkit.schedules.schedule import Schedule, numbers_fit
from vizkit.trace import SpanKind

_OVERLAP = "OVERLAP_F_B"
_FULL = "BW"
"""How the older dialect writes the full backward."""
_TODAY = {kind.value: kind for kind in ACTION_KINDS}
_OLDER = _TODAY | {"B": SpanKind.BACKWARD_INPUT, _FULL: SpanKind.BACKWARD}
_ACTION = re.compile(r"([0-9]+)(BW|[FBIW])([0-9]+)")
_OVERLAPPED = re.compile(rf"\(\s*([^;()\s]*)\s*;\s*([^;()\s]*)\s*\)\s*{_OVERLAP}")
_DERIVED = re.compile(r"[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}
_SHOWN = 40


class _Place(NamedTuple):
    """A cell that holds something: its line and column, from 1, and its text."""

    file: str
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"

    def refuse(self, rule: str, remedy: str) -> InvalidInputError:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}…"
        return InvalidInputError.because("cell", text, f"{self} of {self.file}: {rule}", remedy)


class _Written(NamedTuple):
    """An action as a file writes it."""

    stage: int
    letters: str
    microbatch: int
    place: _Place

    def __str__(self) -> str:
        return f"{self.stage}{self.letters}{self.microbatch}"


_WrittenCell = tuple[_Written, ...]


def read_csv(path: str | Path, *, name: str | None = None) -> Schedule:
    """The schedule in a CSV file as torch's pipeline runtime loads or dumps it: a line for each rank, a cell an action.

    Empty cells are idle. A file in torch's older dialect, in which `B` beside a `W` is today's `I`, and `BW` today's
    `B`, is converted; sends, receives and other cells that follow from the compute are left out; two chains of stages
    that meet on the same ranks, each with half of the microbatches, are two pipelines. `Schedule.notes` says which of
    these applied. Raises `InvalidInputError` naming line, column and text of what cannot be read, or mixes dialects.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "split.csv"
    >>> _ = file.write_text("0F0,,0B0,0W0")
    >>> schedule = read_csv(file); print(schedule); schedule.notes
    0F0 0I0 0W0
    ("torch's older dialect: 1 B read as I",)
    """
    file = Path(path)
    left_out: Counter[str] = Counter()
    rows = [_read_row(file.name, line, texts, left_out) for line, texts in _lines(file)]
    if not rows:
        raise InvalidInputError.because("path", str(path), "holds no action", "write a line for each rank: 0F0,0B0")
    actions = [action for row in rows for cell in row for action in cell]
    for action in actions:
        if not numbers_fit(action.stage, action.microbatch, len(actions)):
            raise _absurd(action.place)
    kinds, notes = _dialect(actions)
    if left_out:
        notes.append(f"left out, as it follows from the compute: {_counts(left_out)}")
    schedule = Schedule.from_rows(
        [[tuple(Action(a.stage, kinds[a.letters], a.microbatch) for a in cell) for cell in row] for row in rows],
        name=file.stem if name is None else name,
        notes=notes,
    )
    return _as_two_pipelines(schedule) if _runs_both_ways(schedule) else schedule


def write_csv(schedule: Schedule, path: str | Path) -> Path:
    """Writes a line for each rank, in torch's dialect of today, which its runtime loads; returns the path.

    Torch has no word for two pipelines in opposite directions: `read_csv` knows them again, torch does not run them.
    Raises `InvalidInputError` where the file cannot be written.

    >>> import tempfile
    >>> write_csv(Schedule.from_rows([["0F0", ("0F1", "0B0"), "0B1"]]), Path(tempfile.mkdtemp()) / "s.csv").read_text()
    '0F0,(0F1;0B0)OVERLAP_F_B,0B1\\n'
    """
    file = Path(path)
    try:
        with file.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerows([_write_cell(cell) for cell in row] for row in schedule.rows)
    except OSError as error:
        raise _unusable(path, "cannot be written", error) from error
    return file


def _write_cell(cell: Cell) -> str:
    return str(cell[0]) if len(cell) == 1 else f"({';'.join(map(str, cell))}){_OVERLAP}"


def _lines(file: Path) -> list[tuple[int, list[str]]]:
    """Number, from 1, and stripped cells of each line; empty lines at the end are left out."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise _unusable(file, "cannot be read", error) from error
    except UnicodeDecodeError as error:
        raise _not_text(file) from error
    if "\0" in text:
        raise _not_text(file)
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    lines: list[tuple[int, list[str]]] = []
    line = 1
    try:
        for cells in reader:
            lines.append((line, [cell.strip() for cell in cells]))
            line = reader.line_num + 1
    except csv.Error as error:
        raise InvalidInputError.because(
            "line", line, f"of {file.name} is not CSV ({error})", "look for a quote that is not closed"
        ) from error
    while lines and not any(lines[-1][1]):
        lines.pop()
    return lines


def _read_row(file: str, line: int, texts: Sequence[str], left_out: Counter[str]) -> list[_WrittenCell]:
    row: list[_WrittenCell] = []
    for column, text in enumerate(texts, 1):
        if match := _ACTION.fullmatch(text):
            row.append((_read_action(match, _Place(file, line, column, text)),))
        elif derived := _DERIVED.fullmatch(text):
            left_out[derived[1]] += 1
        elif text:
            row.append(_read_overlapped(_Place(file, line, column, text)))
    if not row:
        raise InvalidInputError.because(
            "line", line, f"of {file} gives a rank nothing to compute", "delete the line, or write the rank's actions"
        )
    return row


def _read_overlapped(place: _Place) -> _WrittenCell:
    overlapped = _OVERLAPPED.fullmatch(place.text)
    matches = [_ACTION.fullmatch(text) for text in overlapped.groups()] if overlapped else []
    cell = tuple(_read_action(match, place) for match in matches if match)
    if len(cell) != 2:
        raise _unreadable(place)
    if (cell[0].letters == "F", cell[1].letters == "F") != (True, False):
        raise place.refuse("only a forward and a backward overlap, in this order", f"write it like (0F7;7B3){_OVERLAP}")
    return cell


def _read_action(match: re.Match[str], place: _Place) -> _Written:
    stage, letters, microbatch = match.groups()
    if len(stage) > 9 or len(microbatch) > 9:
        raise _absurd(place)
    return _Written(int(stage), letters, int(microbatch), place)


def _is_cell(text: str) -> bool:
    return bool(_ACTION.fullmatch(text) or _OVERLAPPED.fullmatch(text) or _DERIVED.fullmatch(text))


def _unreadable(place: _Place) -> InvalidInputError:
    """Says what looks wrong, where that can be told."""
    if "," in place.text:
        return place.refuse("a cell holds no comma", "look for a quote that is not closed")
    without_overlaps = _OVERLAPPED.sub("0F0", place.text)
    for separator, name in _SEPARATORS.items():
        parts = without_overlaps.split(separator)
        if len(parts) > 1 and any(_is_cell(part.strip()) for part in parts):
            return place.refuse(f"cells are separated by commas, not by {name}", "export the file with commas")
    if _is_cell(place.text.upper()):
        return place.refuse("letters are capitals", f"write {place.text.upper()}")
    if "-" in place.text and _is_cell(place.text.replace("-", "")):
        return place.refuse("stages and microbatches are numbered from 0", "renumber them")
    return place.refuse(
        f"is no action of a schedule, such as 2F0 or (0F7;7B3){_OVERLAP}",
        "write stage, one letter of F, B, I, W, and microbatch; leave idle cells empty",
    )


def _absurd(place: _Place) -> InvalidInputError:
    return place.refuse("stages and microbatches are numbered from 0 without a gap", "renumber them")


def _dialect(actions: Sequence[_Written]) -> tuple[dict[str, SpanKind], list[str]]:
    """What the letters of a file mean, and notes on that.

    In the older dialect every B has its W; today B is whole, and I has its W.
    """
    weights = {(a.stage, a.microbatch) for a in actions if a.letters == "W"}
    backwards = [a for a in actions if a.letters == "B"]
    paired = [a for a in backwards if (a.stage, a.microbatch) in weights]
    alone = [a for a in backwards if (a.stage, a.microbatch) not in weights]
    full = [a for a in actions if a.letters == _FULL]
    today = [a for a in actions if a.letters == "I"]
    older = full or paired
    if not older:
        return _TODAY, []
    rest = today or ([] if full else alone)
    if rest:
        why = "stands beside a W" if older is paired else "is the full backward"
        raise older[0].place.refuse(
            f"{older[0]} {why}, as in torch's older dialect, but {rest[0]} ({rest[0].place}) is of today's",
            "write I and W for a split backward, and B for a full one",
        )
    said = [f"{len(backwards)} B read as I"] * bool(backwards) + [f"{len(full)} {_FULL} read as B"] * bool(full)
    return _OLDER, [f"torch's older dialect: {', '.join(said)}"]


def _runs_both_ways(schedule: Schedule) -> bool:
    """Whether no microbatch passes more than half of the stages, and each rank holds one stage of either half."""
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    return (
        stages % 2 == 0
        and microbatches % 2 == 0
        and schedule.stage_ranks == schedule.stage_ranks[::-1]
        and np.array_equal(2 * schedule.stage >= stages, 2 * schedule.microbatch >= microbatches)
    )


def _as_two_pipelines(schedule: Schedule) -> Schedule:
    note = "read as two pipelines in opposite directions, each with half of the microbatches"
    return replace(schedule, num_pipelines=2, notes=(*schedule.notes, note))


def _counts(left_out: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in left_out.items())


def _unusable(path: str | Path, rule: str, error: OSError) -> InvalidInputError:
    return InvalidInputError.because("path", str(path), f"{rule} ({error.strerror})", "give the path of a CSV file")


def _not_text(file: Path) -> InvalidInputError:
    return InvalidInputError.because("path", str(file), "is not text in UTF-8", "save the schedule as CSV in UTF-8")
