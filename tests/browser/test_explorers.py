"""Each strategy notebook's explorer in JupyterLab: the keyboard moves a slider, words (and picture) follow."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

from tests.browser.conftest import Lab, Visit
from tests.browser.test_jupyterlab import open_notebook, run_all, write_notebook
from tests.notebooks.lint import names_bound

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]

NOTEBOOKS = {
    path.name: path
    for path in sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
    if "widgets.explorer(" in path.read_text()
}
OUTPUT = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea"
WORDS = f"{OUTPUT} .widget-html pre"


def names_used(source: str) -> set[str]:
    """Every name that the cell mentions."""
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def cells_that_lead_to(sources: list[str], wanted: int) -> list[str]:
    """The imports, the wanted cell, and those before it that bind what these use."""
    chosen, needed = [wanted], names_used(sources[wanted])
    for position in range(wanted - 1, 0, -1):
        if names_bound(sources[position]) & needed:
            chosen.append(position)
            needed |= names_used(sources[position])
    return [sources[position] for position in sorted({0, *chosen})]


def test_only_what_an_explorer_needs_is_run() -> None:
    """Cells that bind nothing it uses, directly or through others, are left out."""
    cells = ["import a", "x = 1", "y = 2", "def f(): return x", "print(y)", "f()"]
    assert cells_that_lead_to(cells, 5) == ["import a", "x = 1", "def f(): return x", "f()"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_keyboard_moves_it(visit: Visit, lab: Lab, name: str) -> None:
    """Arrow keys on the first slider change the words; nothing fails, and nothing is said on stderr."""
    sources = [cell.source for cell in nbformat.read(NOTEBOOKS[name], as_version=4).cells if cell.cell_type == "code"]
    wanted = next(i for i, source in enumerate(sources) if "widgets.explorer(" in source)
    open_notebook(visit, lab, write_notebook(lab, f"explore-{name}", *cells_that_lead_to(sources, wanted)))
    run_all(visit)
    page = visit.page
    page.locator(f"{OUTPUT} .widget-slider .noUi-handle").first.wait_for(timeout=120_000)
    before = page.locator(WORDS).last.inner_text()
    handle = page.locator(f"{OUTPUT} .widget-slider .noUi-handle").first
    handle.scroll_into_view_if_needed()
    handle.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft", "ArrowLeft"):
        handle.press(key)
        page.wait_for_timeout(300)
        if page.locator(WORDS).last.inner_text() != before:
            break
    page.wait_for_function(
        "([words, before]) => [...document.querySelectorAll(words)].at(-1).innerText !== before",
        arg=[WORDS, before],
        timeout=30_000,
    )
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count() == 0
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    assert visit.errors == []
