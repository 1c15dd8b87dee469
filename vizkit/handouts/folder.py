"""A folder of pages from a folder of notebooks, with a first page that lists them."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from vizkit.errors import InvalidInputError
from vizkit.figures.html import plotly_script
from vizkit.handouts.pages import PLOTLY_FILE, Page, lesson_page, page_of

FIRST_PAGE = "index.html"


def write_handouts(
    notebooks: str | Path,
    out: str | Path,
    *,
    with_solutions: bool = True,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Write a page for each notebook and Markdown file in the folder `notebooks` to `out`; returns the pages' paths.

    Pages need nothing but the files beside them, so that the folder works from a memory stick. Plotly lies there once.
    `say` hears of each page as it is written. Raises `InvalidInputError` where there is no notebook and, after all
    others are written, for files that are no notebooks.
    """
    source, target = Path(notebooks), Path(out)
    files = sorted([*source.glob("*.ipynb"), *source.glob("*.md")])
    if not any(file.suffix == ".ipynb" for file in files):
        raise InvalidInputError.because(
            "notebooks", str(source), "holds no notebook", "name a folder with .ipynb files, such as notebooks"
        )
    if target.exists() and not target.is_dir():
        raise InvalidInputError.because("out", str(target), "is a file", "name a folder to write to")
    target.mkdir(parents=True, exist_ok=True)
    (target / PLOTLY_FILE).write_text(plotly_script(), encoding="utf-8")
    names = {file.stem for file in files}
    pages, unreadable = [], []
    for file in files:
        try:
            notebook = _read(file)
        except (ValueError, KeyError, AttributeError, nbformat.ValidationError) as error:
            unreadable.append(f"{file.name} ({error})")
            continue
        page = page_of(file.stem, notebook, names, with_solutions=with_solutions)
        (target / f"{page.name}.html").write_text(page.html, encoding="utf-8")
        pages.append(page)
        say(f"{page.name}.html  {len(page.html) / 1e6:.1f} MB")
    first = lesson_page("Handouts", "\n".join(_contents(pages)), plays=False)
    (target / FIRST_PAGE).write_text(first, encoding="utf-8")
    if unreadable:
        raise InvalidInputError.because(
            "notebooks", "; ".join(unreadable), "cannot be read as a notebook", "mend or remove it; the others are done"
        )
    return [target / FIRST_PAGE, *(target / f"{page.name}.html" for page in pages)]


def _read(file: Path) -> NotebookNode:
    if file.suffix == ".md":
        return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(file.read_text(encoding="utf-8"))])
    return nbformat.read(file, as_version=4)


def _contents(pages: list[Page]) -> Iterator[str]:
    yield "<h1>Parallel deep learning, run for real</h1>"
    yield "<p>The lessons with the outputs of a real run. Figures play here; notebooks let you change the code.</p>"
    yield "<ul>"
    for page in pages:
        promise = html.escape(page.promise.replace("`", ""))
        yield f'<li><a href="{page.name}.html">{html.escape(page.title)}</a><br>{promise}</li>'
    yield "</ul>"
