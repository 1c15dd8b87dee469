"""Handouts: a folder of notebooks becomes a folder of pages that fetch nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import vizkit as vk
from vizkit.handouts.__main__ import main
from vizkit.handouts.folder import write_handouts
from vizkit.handouts.pages import page_of

FIGURE = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
FIGURE_PART = re.compile(r'<section[^>]* class="figure"')
TRACE = vk.simulate(vk.schedule("GPipe", num_ranks=2, num_microbatches=2), vk.Durations(F=1, B=2))


def lesson(*cells) -> nbformat.NotebookNode:
    return new_notebook(cells=[new_markdown_cell("# Bubbles\n\nYou count\nthem.\n\nMore."), *cells])


def html_of(*cells, names=(), **options) -> str:
    return page_of("06_bubbles", lesson(*cells), names, **options).html


def code(source: str, *outputs, tags=(), hidden=False) -> nbformat.NotebookNode:
    metadata = {"tags": list(tags)} | ({"jupyter": {"source_hidden": True}} if hidden else {})
    return new_code_cell(source, outputs=list(outputs), metadata=metadata)


def figure_output(**others) -> nbformat.NotebookNode:
    return new_output("display_data", {FIGURE: json.loads(vk.timeline(TRACE).to_json())} | others)


def test_heading_and_promise():
    """The first heading and the first paragraph after it stand for the page."""
    page = page_of("06_bubbles", lesson(), [])
    assert (page.title, page.promise) == ("Bubbles", "You count them.")
    assert "<title>Bubbles</title>" in page.html


def test_a_figure_plays_and_says_itself_in_words():
    """A saved Plotly output becomes the kit's own player: button, slider, summary, data; Plotly is a file beside it."""
    page = html_of(code("vk.timeline(trace)", figure_output()))
    assert len(FIGURE_PART.findall(page)) == 1
    assert 'class="play"' in page
    assert 'type="range"' in page
    assert vk.describe(TRACE).splitlines()[0].split(",")[0] in page
    assert '<script src="plotly.min.js"></script>' in page


def test_controls_are_replaced_by_a_sentence_and_what_stood_beside_them():
    """Widgets need a kernel: the page says so, and shows the saved picture or text."""
    still = html_of(code("vk.widgets.player(t)", figure_output(**{WIDGET: {"model_id": "1"}})))
    assert "need a kernel" in still
    assert FIGURE_PART.search(still)
    words = html_of(code("x", new_output("execute_result", {WIDGET: {"model_id": "1"}, "text/html": "<b>four</b>"})))
    assert "need a kernel" in words
    assert "<b>four</b>" in words


def test_a_page_without_figures_loads_no_script():
    """What has nothing to play needs no 5 MB."""
    assert "<script" not in html_of(code("print(1)", new_output("stream", name="stdout", text="1\n")))


def test_solutions_are_folded_or_left_out():
    """Hidden code is folded under its name; `with_solutions=False` takes solutions away, outputs included."""
    cells = (
        code("def mine(): ...", tags=["exercise"]),
        code("answer = 42", new_output("stream", name="stdout", text="passed"), tags=["solution"], hidden=True),
    )
    folded = html_of(*cells)
    assert re.search(r"<details class=\"folded\"><summary>Solution</summary>.*answer.*</details>", folded, re.S)
    assert "passed" in folded
    without = html_of(*cells, with_solutions=False)
    assert "answer" not in without
    assert "passed" not in without
    assert "mine" in without


@pytest.mark.parametrize(
    "source, link",
    [
        ("[next](07_zero_bubble.ipynb)", 'href="07_zero_bubble.html"'),
        ("[words](GLOSSARY.md#bubble)", 'href="GLOSSARY.html#bubble"'),
        ("[elsewhere](99_other.ipynb)", 'href="99_other.ipynb"'),
    ],
)
def test_links_lead_to_pages(source: str, link: str):
    """A link to a notebook or text that has a page leads there; others stay."""
    assert link in html_of(new_markdown_cell(source), names={"07_zero_bubble", "GLOSSARY"})


def test_formulas_are_drawn_by_the_browser_and_code_keeps_its_dollars():
    """TeX becomes MathML, for MathJax would be fetched."""
    page = html_of(new_markdown_cell("$$\\frac{p-1}{m}$$ and $p$, in `$HOME` and `$RANK`"))
    assert page.count("<math") == 2
    assert "<mfrac>" in page
    assert "$HOME" in page
    assert "$RANK" in page


def test_nothing_is_fetched():
    """No page holds an address that a browser would load by itself."""
    page = html_of(new_markdown_cell("[a paper](https://arxiv.org/abs/2104.04473)"), code("x", figure_output()))
    loads = re.findall(r"""(?:src|data-src|@import|url\()\s*=?\s*["'(]?(https?:|//)""", page)
    assert loads == []


@pytest.fixture
def notebooks(tmp_path: Path) -> Path:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    nbformat.write(lesson(code("x", figure_output())), folder / "06_bubbles.ipynb")
    (folder / "GLOSSARY.md").write_text("# Glossary\n\nAll words.\n\n| English | 中文 |\n|--|--|\n| rank | 进程 |\n")
    return folder


def test_a_folder_of_pages(notebooks: Path, tmp_path: Path):
    """Each notebook and text has a page, the first page lists them, and Plotly lies there once."""
    said: list[str] = []
    pages = write_handouts(notebooks, tmp_path / "out", say=said.append)
    assert [page.name for page in pages] == ["index.html", "06_bubbles.html", "GLOSSARY.html"]
    assert (tmp_path / "out" / "plotly.min.js").stat().st_size > 1e6
    first = pages[0].read_text()
    assert '<a href="06_bubbles.html">Bubbles</a><br>You count them.' in first
    assert "<td>进程</td>" in pages[2].read_text()
    assert [line.split()[0] for line in said] == ["06_bubbles.html", "GLOSSARY.html"]


def test_a_broken_file_loses_nothing(notebooks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What can be read is written; then the file that cannot is named."""
    (notebooks / "07_torn.ipynb").write_text('{"cells": [')
    assert main([str(notebooks), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("vizkit: notebooks='07_torn.ipynb (Notebook does not appear to be JSON")
    assert "cannot be read as a notebook; mend or remove it; the others are done" in error
    assert (tmp_path / "out" / "06_bubbles.html").exists()
    assert (tmp_path / "out" / "index.html").exists()


def test_a_folder_without_notebooks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Value, rule, remedy; exit status 2; nothing is made."""
    assert main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "holds no notebook; name a folder with .ipynb files, such as notebooks" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_where_the_folder_should_be(notebooks: Path, tmp_path: Path):
    """A file is never overwritten by a folder."""
    (tmp_path / "out").write_text("mine")
    with pytest.raises(vk.InvalidInputError, match="is a file; name a folder to write to"):
        write_handouts(notebooks, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
