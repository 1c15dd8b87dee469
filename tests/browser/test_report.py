"""`python -m vizkit report`: the page of a run with a restart, opened from a file, with no kernel and no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Visit
from tests.unit.test_trace_folder import HOUR_NS, write
from vizkit.cli import main
from vizkit.formats.rank_file import Outcome

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for rank in range(2):
        write(folder, rank, outcome=Outcome.RAISED, offset_ns=rank * HOUR_NS)
        write(folder, rank, attempt=1, start_ms=100, offset_ns=rank * HOUR_NS)
    assert main(["report", str(folder), "-o", str(folder / "page.html")]) == 0
    return folder / "page.html"


@pytest.mark.parametrize("visit", ["light", "dark"], indirect=True)
def test_the_page_opens_from_a_file(visit: Visit, page_path: Path):
    """Words first, then figures that play by keyboard; nothing is fetched, nothing goes wrong."""
    page = visit.page
    page.goto(page_path.as_uri())
    page.locator(".plot[data-ready]").last.wait_for()
    assert page.locator(".plot").count() == 3
    headings = page.locator("h2").all_inner_texts()
    assert headings[0] == "The run"
    assert headings[-1] == "As it happened"
    said = page.locator("section.words").first.inner_text()
    assert "clocks of the hosts agree within" in said
    assert "attempt 0: 2 ranks, 30.5 ms" in said
    summaries = page.locator(".figure .summary").all_inner_texts()
    assert "virtual" in summaries[0]
    assert "wall" in summaries[1]
    assert "clock_error_s" in summaries[1]
    scrub, moment = (page.locator(s).first for s in (".scrub", ".moment"))
    scrub.focus()
    scrub.press("Home")
    first = moment.inner_text()
    scrub.press("End")
    page.wait_for_function("first => document.querySelector('.moment').innerText !== first", arg=first)
    assert visit.errors == []
