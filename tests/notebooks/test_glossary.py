"""The glossary holds every word that a lesson, a figure or the library shows, in both languages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

import vizkit as vk
from tests.notebooks.lint import SYNONYMS

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHINESE = re.compile(r"[\u4e00-\u9fff]")
SEPARATORS = re.compile(r"\s*[,/()（）]\s*")
NOT_A_WORD_OF_ITS_OWN = {vk.SpanKind.COMPUTE, vk.SpanKind.DATA, vk.SpanKind.OPTIMIZER}
LETTERS = {"F": "forward", "B": "backward", "I": "i", "W": "w"}


@dataclass(frozen=True)
class Entry:
    """One row of a table of words."""

    english: str
    chinese: str
    meaning: str = ""
    lesson: str = ""

    @property
    def words(self) -> set[str]:
        """The forms of the English cell, in lower case; "parallelism" is the noun of "parallel"."""
        text = self.english.lower().replace("parallelism", "parallel")
        return set(filter(None, SEPARATORS.split(text)))

    @property
    def translations(self) -> set[str]:
        return set(filter(None, SEPARATORS.split(self.chinese)))


def rows_of(markdown: str) -> list[Entry]:
    """Rows of the tables with a Chinese column."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if line[:1] == "|"]
    return [Entry(*row[:4]) for row in cells if len(row) >= 3 and CHINESE.search(row[1]) and row[1] != "中文"]


TEXT = (NOTEBOOKS / "GLOSSARY.md").read_text(encoding="utf-8")
GLOSSARY = rows_of(TEXT)
WORDS = rows_of(TEXT.split("## Clocks")[0])
KNOWN = set().union(*(entry.words for entry in GLOSSARY))


def test_every_row_is_whole():
    """English, Chinese, a meaning, and a lesson that exists."""
    assert len(GLOSSARY) > 100
    for entry in GLOSSARY:
        assert all((entry.english, entry.chinese, entry.meaning)), entry
        (target,) = re.findall(r"\((\d\d_\w+\.ipynb)\)", entry.lesson)
        assert (NOTEBOOKS / target).exists(), f"{entry.english} leads to {target}"


def test_no_word_stands_twice():
    """One row a word: two meanings under one word confuse."""
    seen = [entry.english.lower() for entry in GLOSSARY]
    assert sorted(seen) == sorted(set(seen))


def test_words_are_in_order():
    """The first table is alphabetical."""
    words = [entry.english.lower() for entry in WORDS]
    assert words == sorted(words)


def test_the_lesson_uses_the_word():
    """Whoever follows the link finds the word there."""
    missing = []
    for entry in WORDS:
        (target,) = re.findall(r"\((\d\d_\w+\.ipynb)\)", entry.lesson)
        text = (NOTEBOOKS / target).read_text(encoding="utf-8").lower().replace("parallelism", "parallel")
        forms = {form for word in entry.words for form in (word, word.replace(" ", "-"), word.replace("-", "_"))}
        if not any(form in text for form in forms):
            missing.append(f"{entry.english} is not in {target}")
    assert missing == []


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_words_of_a_lesson_stand_in_the_glossary(path: Path):
    """Each row of a lesson's own table is in the glossary, and shares a translation with it."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "markdown":
            continue
        for entry in rows_of(cell.source):
            same = [known for known in GLOSSARY if known.words & entry.words]
            assert same, f"{entry.english} is not in GLOSSARY.md"
            shared = entry.translations & set().union(*(known.translations for known in same))
            assert shared, f"{entry.english}: {entry.chinese} here, {[known.chinese for known in same]} in GLOSSARY.md"


@pytest.mark.parametrize("kind", sorted(set(vk.SpanKind) - NOT_A_WORD_OF_ITS_OWN))
def test_kinds_of_span_are_explained(kind: vk.SpanKind):
    """What a timeline's legend says is in the glossary."""
    assert LETTERS.get(kind.value, kind.value.replace("_", "-")) in KNOWN


@pytest.mark.parametrize("name", vk.schedule_names())
def test_schedules_are_explained(name: str):
    """Every schedule of `vk.schedule_names()` has its row."""
    assert name.lower() in KNOWN


@pytest.mark.parametrize("word", ["dp", "tp", "pp", "cp", "ep", *vk.Clock, *SYNONYMS.values()])
def test_axes_clocks_and_house_words_are_explained(word: str):
    """The axes of a mesh, the three clocks, and each word that the house rules ask for in place of another."""
    assert word in KNOWN
