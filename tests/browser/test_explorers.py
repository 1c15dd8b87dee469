"""Each strategy notebook's explorer in JupyterLab: the keyboard moves a control, words (and picture) follow."""

from __future__ import annotations

import ast
import symtable
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
ERROR = ".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']"
CONTROL = f"{OUTPUT} .widget-slider .noUi-handle, {OUTPUT} .widget-dropdown select"
WORDS = f"{OUTPUT} .widget-html pre"


def names_used(source: str) -> set[str]:
    """Names that the cell takes from those before it, itself or in its functions."""
    tables, used = [symtable.symtable(source, "cell", "exec")], set()
    own = {symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_assigned()}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module")
        }
    return used - own


def names_changed(source: str) -> set[str]:
    """Names that running the cell binds, or whose values it fills: `x = …`, `x[i] = …`, `x.append(…)`."""
    statements = [ast.parse(source)]
    changed = names_bound(source)
    while statements:
        for node in ast.iter_child_nodes(statements.pop()):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
                continue
            statements.append(node)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                changed.add(node.id)
            is_filled = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
            is_asked = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            owner = node.value if is_filled else node.func.value if is_asked else None
            if isinstance(owner, ast.Name):
                changed.add(owner.id)
    return changed


def cells_that_lead_to(sources: list[str], wanted: int) -> list[str]:
    """The imports, the wanted cell, and those before it that change what these use."""
    imported = {
        (name.asname or name.name).split(".")[0]
        for node in ast.walk(ast.parse(sources[0]))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in node.names
    }
    chosen, needed = [wanted], names_used(sources[wanted]) - imported
    for position in range(wanted - 1, 0, -1):
        if names_changed(sources[position]) & needed:
            chosen.append(position)
            needed |= names_used(sources[position]) - imported
    return [sources[position] for position in sorted({0, *chosen})]


def test_only_what_an_explorer_needs_is_run() -> None:
    """Cells that change nothing it uses, directly or through others, are left out."""
    needed = ["import a", "x = {}", "for i in a.b(): x[i] = i", "y = []", "y.append(x)", "def f(): return y", "f()"]
    others = ["a.b()", "def g():\n    x = 1", "print(x)"]
    mixed = [*needed[:3], *others, *needed[3:]]
    assert cells_that_lead_to(mixed, len(mixed) - 1) == needed


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_keyboard_moves_it(visit: Visit, lab: Lab, name: str) -> None:
    """Arrow keys on the first slider or menu change the words; nothing fails, and nothing is said on stderr."""
    sources = [cell.source for cell in nbformat.read(NOTEBOOKS[name], as_version=4).cells if cell.cell_type == "code"]
    wanted = next(i for i, source in enumerate(sources) if "widgets.explorer(" in source)
    open_notebook(visit, lab, write_notebook(lab, f"explore-{name}", *cells_that_lead_to(sources, wanted)))
    run_all(visit)
    page = visit.page
    page.locator(CONTROL).or_(page.locator(ERROR)).first.wait_for(timeout=150_000)
    assert page.locator(ERROR).all_inner_texts() == []
    before = page.locator(WORDS).last.inner_text()
    control = page.locator(CONTROL).first
    control.scroll_into_view_if_needed()
    control.focus()
    for key in ("ArrowUp", "ArrowUp", "ArrowDown", "ArrowDown", "ArrowDown"):
        control.press(key)
        page.wait_for_timeout(300)
        if page.locator(WORDS).last.inner_text() != before:
            break
    page.wait_for_function(
        "([words, before]) => [...document.querySelectorAll(words)].at(-1).innerText !== before",
        arg=[WORDS, before],
        timeout=30_000,
    )
    assert page.locator(ERROR).count() == 0
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    assert visit.errors == []
