"""The pipeline explorer, driven by keyboard: in JupyterLab by its kernel, and as a page opened from a file."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.browser.conftest import Lab, Visit
from tests.browser.test_jupyterlab import THEMES, open_notebook, run_all, write_notebook
from vizkit.errors import InvalidInputError
from vizkit.figures import explorer_page as page_module
from vizkit.figures.explorer import ExplorerSettings, explore, explorer_figure, explorer_words
from vizkit.figures.explorer_page import explorer_page
from vizkit.trace import NS_PER_S

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]

SHOW = "import vizkit as vk\nvk.widgets.pipeline_explorer()"
OUTPUT = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea"
LAB_PLOT = f"{OUTPUT} .js-plotly-plot"
CELLS_DRAWN = "plot => plot.querySelectorAll('.bars .point').length"
BARS = """plot => plot.data.filter(trace => trace.type === 'bar').flatMap(trace => {
    const base = Array.from(trace.base), x = Array.from(trace.x), y = Array.from(trace.y);
    return base.map((start, i) => [trace.yaxis || 'y', y[i], start, start + x[i]]);
})"""


@pytest.fixture
def complaints(visit: Visit) -> list[str]:
    """What the page says on the console as an error."""
    said: list[str] = []
    visit.page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    return said


def num_cells(settings: ExplorerSettings) -> int:
    return sum(len(side.trace.filter(kind=["F", "B", "I", "W"])) for side in explore(settings))


@pytest.mark.parametrize(("visit", "theme"), [(theme, theme) for theme in THEMES], indirect=["visit"])
def test_sliders_in_jupyterlab_obey_the_keyboard(visit: Visit, lab: Lab, theme: str):
    """Arrow keys on a slider change words and picture; a refusal shows its message and keeps the picture."""
    open_notebook(visit, lab, write_notebook(lab, f"explorer-{theme}.ipynb", SHOW), theme)
    run_all(visit)
    page = visit.page
    plot = page.locator(LAB_PLOT).first
    settings = ExplorerSettings()

    def wait_until_drawn(settings: ExplorerSettings) -> None:
        page.wait_for_function(
            f"([selector, cells]) => ({CELLS_DRAWN})(document.querySelector(selector)) === cells",
            arg=[LAB_PLOT, num_cells(settings)],
            timeout=30_000,
        )
        words = page.locator(f"{OUTPUT} .widget-html pre").last.inner_text()
        assert words == explorer_words(explore(settings))

    plot.locator(".bars .point").first.wait_for(state="attached", timeout=60_000)
    wait_until_drawn(settings)

    def slider(label: str):
        return page.locator(f"{OUTPUT} .widget-slider", has_text=re.compile(f"^{label}")).locator(".noUi-handle").first

    for _ in range(2):
        slider("microbatches").press("ArrowRight")
    settings = replace(settings, num_microbatches=10)
    wait_until_drawn(settings)
    slider("ranks").press("ArrowLeft")
    settings = replace(settings, num_ranks=3)
    wait_until_drawn(settings)

    menu = page.locator(f"{OUTPUT} .widget-dropdown select").nth(1)
    menu.select_option("DualPipe")
    refusal = page.get_by_text("Not drawn:")
    refusal.wait_for()
    assert plot.evaluate(CELLS_DRAWN) == num_cells(settings)
    slider("ranks").press("ArrowLeft")
    settings = replace(settings, versus="DualPipe", num_ranks=2)
    wait_until_drawn(settings)
    assert page.get_by_text("Not drawn:").count() == 0
    assert visit.errors == []


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("explorer") / "explorer.html"
    target.write_text(explorer_page(), encoding="utf-8")
    assert target.stat().st_size < 12_000_000
    return target


def opened(visit: Visit, page_file: Path):
    visit.page.goto(page_file.as_uri())
    visit.page.locator(".plot[data-ready]").wait_for()
    return visit.page


def choose(page, settings: ExplorerSettings) -> None:
    """Menus by value, ranges by keys, and wait until the page has drawn it or refused it."""
    page.select_option("[name=schedule]", settings.schedule)
    page.select_option("[name=versus]", settings.versus or "")
    page.select_option("[name=transfer]", f"{settings.transfer_ms:g}")
    wanted = (settings.forward_ms, settings.input_ms, settings.weight_ms)
    page.select_option("[name=ratio]", next(name for name, ratio in page_module.RATIOS_MS.items() if ratio == wanted))
    page.evaluate("value => { document.querySelector('[name=stages]').value = value; }", str(settings.stages_per_rank))
    for name, values, value in (
        ("ranks", page_module.RANKS, settings.num_ranks),
        ("microbatches", page_module.MICROBATCHES, settings.num_microbatches),
    ):
        field = page.locator(f"[name={name}]")
        field.press("Home")
        for _ in range(values.index(value)):
            field.press("ArrowRight")
        assert field.get_attribute("aria-valuetext") == str(value)
    page.evaluate("() => show()")


POINTS = [
    ExplorerSettings("1F1B", "ZBVZeroBubble"),
    ExplorerSettings("GPipe", None, num_ranks=8, num_microbatches=32, transfer_ms=0.25),
    ExplorerSettings("InterleavedZeroBubble", "Interleaved1F1B", 4, 4, 16, 1.0, 1.5, 1.0),
    ExplorerSettings("ForwardOnly", "Sequential", 2, 2, 4),
    ExplorerSettings("DualPipe", "DualPipeV", 4, 2, 8, 1.0, 1.0, 0.5, 0.25),
    ExplorerSettings("V-Half", "V-Min", 8, 2, 16),
]


@pytest.mark.parametrize("settings", POINTS, ids=lambda point: f"{point.schedule}-{point.versus}")
def test_the_page_tells_and_draws_what_the_simulator_says(
    visit: Visit, page_file: Path, complaints: list[str], settings: ExplorerSettings
):
    """Words, and every cell at its time; computed by the page from the starts that it holds."""
    page = opened(visit, page_file)
    choose(page, settings)
    sides = explore(settings)
    told, expected = page.locator(".summary").inner_text(), explorer_words(sides)
    assert words_without_figures(told) == words_without_figures(expected)
    # a half in the last digit is rounded up by browsers and to even by Python
    assert figures(told) == pytest.approx(figures(expected), rel=0.009, abs=0.11)
    cells = sorted(
        [side.rows_axis, 100 * span.rank, span.start_ns / NS_PER_S * 1e3, span.end_ns / NS_PER_S * 1e3]
        for side in sides
        for span in side.trace.filter(kind=["F", "B", "I", "W"])
    )
    drawn = sorted(page.locator(".plot").evaluate(BARS))
    assert [row[:2] for row in drawn] == [row[:2] for row in cells]
    assert [row[2:] for row in drawn] == [pytest.approx(row[2:]) for row in cells]
    numbers = "plot => plot.data.filter(trace => trace.mode === 'text').map(trace => trace.x.length)"
    in_python = [len(part["x"]) for part in explorer_figure(settings)["data"] if part.get("mode") == "text"]
    assert page.locator(".plot").evaluate(numbers) == in_python
    assert visit.errors == complaints == []


def figures(words: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?<![\w.-])\d+\.?\d*", words)]


def words_without_figures(words: str) -> str:
    return re.sub(r"(?<![\w.-])\d+\.?\d*", "#", words)


def test_a_refusal_keeps_the_picture(visit: Visit, page_file: Path, complaints: list[str]):
    """What the schedule says about the sizes is shown, and read aloud."""
    page = opened(visit, page_file)
    choose(page, ExplorerSettings("DualPipe", None, num_ranks=4, num_microbatches=8))
    before = page.locator(".plot").evaluate(BARS), page.locator(".summary").inner_text()
    page.locator("[name=microbatches]").press("Home")
    alert = page.locator("[role=alert]")
    with pytest.raises(InvalidInputError) as refusal:
        explore(ExplorerSettings("DualPipe", None, num_ranks=4, num_microbatches=4))
    assert alert.inner_text() == f"Not drawn: {refusal.value}"
    assert (page.locator(".plot").evaluate(BARS), page.locator(".summary").inner_text()) == before
    page.locator("[name=microbatches]").press("End")
    assert alert.inner_text() == ""
    assert page.locator(".plot").evaluate(BARS) != before[0]
    assert visit.errors == complaints == []


@pytest.mark.parametrize("visit", ["light", "dark"], indirect=True)
def test_everything_is_reached_by_tab(visit: Visit, page_file: Path):
    """In the order of the page; a disabled menu is skipped. The menu obeys letters, the picture follows."""
    page = opened(visit, page_file)
    names = []
    for _ in range(6):
        page.keyboard.press("Tab")
        names.append(page.evaluate("() => document.activeElement.name"))
    assert names == ["schedule", "versus", "ratio", "transfer", "ranks", "microbatches"]
    page.locator("[name=schedule]").focus()
    page.keyboard.type("GP")
    page.wait_for_function("() => document.querySelector('.summary').textContent.startsWith('GPipe: ')")
    assert page.locator(".gtitle").text_content().startswith("GPipe against ZBVZeroBubble")
    ink = page.evaluate("() => getComputedStyle(document.documentElement).getPropertyValue('--ink').trim()")
    assert page.locator(".plot").evaluate("plot => plot.layout.font.color") == ink
    assert visit.errors == []


def test_nothing_overlaps_on_a_page_of_900_pixels(visit: Visit, page_file: Path):
    """Title, subtitle, legend and the first row stand below each other."""
    visit.page.set_viewport_size({"width": 900, "height": 900})
    page = opened(visit, page_file)
    parts = (".gtitle", ".gtitle-subtitle", ".legend", ".bars")
    boxes = [page.locator(f".plot {selector}").first.bounding_box() for selector in parts]
    for upper, lower in pairwise(boxes):
        assert upper["y"] + upper["height"] <= lower["y"] + 2
    assert visit.errors == []
