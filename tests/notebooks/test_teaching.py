"""TEACHING.md: tracks add up, and each section and cell that it sends a teacher to is there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
TEXT = (NOTEBOOKS / "TEACHING.md").read_text(encoding="utf-8")
SECTION = re.compile(r"\[(\d\d) §(\d)\]\((\d\d_\w+\.ipynb)\)")
CELL = re.compile(r"\| \[\d\d §(\d)\]\((\d\d_\w+\.ipynb)\): `(.+)` \|")
TRACKS = {"90 minutes": 90, "half a day": 240, "two days": 2 * 390}


@cache
def sections_of(name: str) -> dict[str, list[str]]:
    """Sources of the code cells of each numbered section."""
    found: dict[str, list[str]] = {}
    number = "0"
    for cell in nbformat.read(NOTEBOOKS / name, as_version=4).cells:
        if cell.cell_type == "markdown":
            for heading in re.findall(r"^## (\d+)\.", cell.source, re.M):
                number = heading
                found[number] = []
        elif number in found:
            found[number].append(cell.source)
    return found


def track(name: str) -> str:
    (text,) = re.findall(rf"## Track of {name}.*?(?=\n## )", TEXT, re.S)
    return text


@pytest.mark.parametrize("number, section, name", sorted(set(SECTION.findall(TEXT))))
def test_sections_exist(number: str, section: str, name: str):
    """Each "[NN §n]" names a notebook by its number, and a section that it has."""
    assert name.startswith(number)
    assert section in sections_of(name)


@pytest.mark.parametrize("name, minutes", TRACKS.items())
def test_minutes_add_up(name: str, minutes: int):
    """A track takes the time that its name says."""
    assert sum(map(int, re.findall(r"^\| (\d+) \|", track(name), re.M))) == minutes


@pytest.mark.parametrize("section, name, code", CELL.findall(TEXT))
def test_the_cell_is_there(section: str, name: str, code: str):
    """A misconception's cell is found by the code that is quoted."""
    assert any(code in source for source in sections_of(name)[section]), f"{code} is not in {name} §{section}"


def test_every_misconception_has_its_cell():
    """No row of the table without a cell that was looked for above."""
    table = TEXT.split("## What people get wrong")[1]
    rows = [line for line in table.splitlines() if line.startswith("|") and "§" in line]
    assert len(rows) == len(CELL.findall(table)) > 20


def test_every_lesson_is_named():
    """A teacher finds each notebook."""
    assert [path.name for path in sorted(NOTEBOOKS.glob("*.ipynb")) if path.name not in TEXT] == []
