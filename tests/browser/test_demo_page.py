"""`python -m vizkit demo` and the page that it writes: opened from a file, it plays with no kernel and no network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.conftest import Visit
from tests.processes import marked_environment, new_mark, processes_with, stop, wait_until_gone

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]

SHAPES = """() => {
    const plot = document.querySelector('.plot');
    return [...plot.querySelectorAll('.shapelayer path')].map(path => path.getAttribute('d')).join();
}"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The page and what the command printed."""
    folder = tmp_path_factory.mktemp("demo")
    mark = new_mark()
    done = subprocess.run(
        [sys.executable, "-m", "vizkit", "demo"],
        cwd=folder,
        env=marked_environment(mark) | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    left = wait_until_gone(lambda: processes_with(mark))
    stop(processes_with(mark))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert left == []
    return folder / "demo.html", done.stdout


def test_the_summary_holds_against_theory(demo: tuple[Path, str]):
    """Real digits are learned, the bytes are the ring's to the byte, and the loss is one process's."""
    _, said = demo
    assert "4 ranks on cpu" in said or "4 ranks on cuda" in said
    accuracy = float(re.search(r"test accuracy +([\d.]+)%", said).group(1))
    assert accuracy > 80
    assert re.search(r"gradient traffic .*\(equal\)", said)
    assert "the same as one process at every step" in said


@pytest.mark.parametrize("visit", ["light", "dark"], indirect=True)
def test_the_page_plays_from_a_file(visit: Visit, demo: tuple[Path, str]):
    """Play and scrub by mouse and by keyboard; the words beside the figure say what it shows."""
    page = visit.page
    page.goto(demo[0].as_uri())
    plot, play, scrub, moment = (page.locator(s).first for s in (".plot[data-ready]", ".play", ".scrub", ".moment"))
    plot.wait_for()
    assert page.locator(".plot").count() == 2
    assert "virtual" in page.locator(".summary").first.inner_text()

    def drawn() -> str:
        return page.evaluate(SHAPES)

    def wait_until_redrawn(since: str) -> str:
        page.wait_for_function(f"since => ({SHAPES})() !== since", arg=since, timeout=15_000)
        return drawn()

    at_rest = drawn()
    play.click()
    playing = wait_until_redrawn(at_rest)
    wait_until_redrawn(playing)
    assert play.inner_text() == "❚❚ Pause"

    play.press("Enter")
    assert play.inner_text() == "▶ Play"
    page.wait_for_timeout(300)
    held = drawn()
    page.wait_for_timeout(400)
    assert drawn() == held

    scrub.focus()
    scrub.press("Home")
    start = wait_until_redrawn(held)
    first = moment.inner_text()
    scrub.press("ArrowRight")
    wait_until_redrawn(start)
    assert moment.inner_text() != first
    assert scrub.get_attribute("aria-valuetext") == moment.inner_text()
    assert visit.errors == []
