"""A handout in a real Chromium, opened as a file: it plays, and asks for nothing but the file beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vizkit.handouts.folder import write_handouts

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, repository_notebooks: Path) -> Path:
    """Handouts of one lesson."""
    source = tmp_path_factory.mktemp("notebooks")
    shutil.copy(repository_notebooks / "01_collectives.ipynb", source)
    out = source / "handouts"
    write_handouts(source, out)
    return out


@pytest.mark.parametrize("visit", ["light", "dark"], indirect=True)
def test_a_handout_plays_from_a_file(visit, folder: Path):
    """Every figure is drawn, one plays to its end, a formula has its height, a solution unfolds."""
    page = visit.page
    page.goto((folder / "01_collectives.html").as_uri())
    page.wait_for_function("document.querySelectorAll('.plot').length > 3", timeout=30_000)
    page.wait_for_function(
        "document.querySelectorAll('.plot').length == document.querySelectorAll('.plot[data-ready]').length",
        timeout=60_000,
    )
    section = page.locator(".figure:has(.controls:not([hidden]))").first
    before = section.locator(".moment").inner_text()
    section.locator(".play").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("before => document.querySelector('.figure .moment').textContent != before", arg=before)
    assert page.locator("math").first.bounding_box()["height"] > 15
    solution = page.locator("details.folded").first
    solution.locator("summary").press("Enter")
    assert solution.locator("pre").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert visit.errors == []


def test_the_first_page_leads_to_the_lesson(visit, folder: Path):
    """From the list to the lesson by its link."""
    visit.page.goto((folder / "index.html").as_uri())
    visit.page.get_by_role("link", name="Collectives").click()
    assert visit.page.url.endswith("01_collectives.html")
