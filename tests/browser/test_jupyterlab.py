"""A learner at JupyterLab: cells run on real ranks, the timeline plays, pauses and scrubs, on light and dark themes."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.browser.conftest import Lab, Visit

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]

THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
LAUNCH = """\
def step():
    with vk.span("forward", kind="forward"):
        x = torch.ones(1000) * dist.get_rank()
    dist.all_reduce(x)
    return float(x[0])

run = vk.launch(step, world_size=4, device="cpu")
run.results"""
CELLS = (
    "import torch\nimport torch.distributed as dist\nimport vizkit as vk",
    LAUNCH,
    "vk.timeline(run.replay())",
)
PLAYER = "vk.widgets.player(run.replay())"
PLOT = ".jp-NotebookPanel:not(.lm-mod-hidden) .js-plotly-plot"
CURSOR = """plot => {
    const drawn = [...plot.querySelectorAll('.shapelayer path')].map(path => path.getAttribute('d')).join();
    return [plot.layout.shapes[1].x0, drawn];
}"""


def write_notebook(lab: Lab, name: str, *sources: str) -> str:
    cells = [new_markdown_cell("# Mine"), *(new_code_cell(source) for source in sources)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), lab.folder / name)
    return name


def open_notebook(visit: Visit, lab: Lab, name: str, theme: str = "light") -> None:
    """Opens it, waits until it is drawn and its kernel is there, and chooses the theme."""
    visit.page.set_default_timeout(90_000)
    visit.page.goto(lab.address_of(name), wait_until="domcontentloaded")
    visit.page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell")
    visit.page.evaluate(
        """async theme => {
            const app = window.jupyterapp, panel = app.shell.currentWidget;
            await panel.context.ready;
            await panel.sessionContext.ready;
            await app.commands.execute('apputils:change-theme', { theme });
        }""",
        THEMES[theme],
    )
    visit.page.wait_for_selector(f"body[data-jp-theme-light='{str(theme == 'light').lower()}']", state="attached")


def run_all(visit: Visit) -> None:
    """Run > Run All Cells, and wait until the last one has finished."""
    visit.page.evaluate(
        """async () => { await window.jupyterapp.commands.execute('notebook:run-all-cells'); }""",
    )


def outputs(visit: Visit) -> str:
    return "\n".join(
        visit.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea-output").all_inner_texts()
    )


def cursor(visit: Visit) -> list:
    """Where the cursor stands, on the time axis and as drawn."""
    return visit.page.locator(PLOT).first.evaluate(CURSOR)


def wait_until_moved(visit: Visit, since: list) -> list:
    """The cursor's next place; both the number and the drawing must have changed."""
    visit.page.wait_for_function(
        f"""since => {{
            const [x, drawn] = ({CURSOR})(document.querySelector('{PLOT}'));
            return x !== since[0] && drawn !== since[1];
        }}""",
        arg=since,
        timeout=15_000,
    )
    return cursor(visit)


@pytest.mark.parametrize(("visit", "theme"), [("light", "light"), ("dark", "dark")], indirect=["visit"])
def test_the_timeline_plays_pauses_and_scrubs(visit: Visit, lab: Lab, theme: str):
    """Four real ranks in a cell; play moves the cursor, pause holds it, a click on the slider puts it there."""
    open_notebook(visit, lab, write_notebook(lab, f"timeline-{theme}.ipynb", *CELLS), theme)
    run_all(visit)
    assert "[6.0, 6.0, 6.0, 6.0]" in outputs(visit)
    visit.page.wait_for_selector(f"{PLOT} .slider-group")
    plot = visit.page.locator(PLOT).first
    plot.scroll_into_view_if_needed()

    at_rest = cursor(visit)
    plot.locator(".updatemenu-button").nth(0).click()
    playing = wait_until_moved(visit, at_rest)
    further = wait_until_moved(visit, playing)
    assert further[0] > playing[0]

    plot.locator(".updatemenu-button").nth(1).click()
    visit.page.wait_for_timeout(500)
    held = cursor(visit)
    visit.page.wait_for_timeout(500)
    assert cursor(visit) == held

    rail = plot.locator(".slider-rail-touch-rect").first.bounding_box()
    visit.page.mouse.click(rail["x"] + rail["width"] * 0.9, rail["y"] + rail["height"] / 2)
    late = wait_until_moved(visit, held)
    visit.page.mouse.click(rail["x"] + rail["width"] * 0.1, rail["y"] + rail["height"] / 2)
    early = wait_until_moved(visit, late)
    end = visit.page.evaluate(f"() => document.querySelector('{PLOT}').layout.shapes[0].x1")
    assert early[0] < 0.3 * end < 0.7 * end < late[0]
    assert visit.errors == []


def test_the_player_obeys_the_keyboard(visit: Visit, lab: Lab):
    """Home, End and the arrows move the moment; the words beside it and the drawn cursor follow."""
    open_notebook(visit, lab, write_notebook(lab, "player.ipynb", *CELLS[:2], PLAYER))
    run_all(visit)
    visit.page.wait_for_selector(f"{PLOT} .shapelayer path", state="attached")
    panel = visit.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    handle = panel.locator(".widget-slider .noUi-handle").first
    handle.focus()
    at_end = cursor(visit)
    handle.press("Home")
    at_start = wait_until_moved(visit, at_end)
    assert at_start[0] == 0
    assert "0 B moved" in panel.inner_text()
    handle.press("ArrowRight")
    later = wait_until_moved(visit, at_start)
    assert 0 < later[0] < at_end[0]
    assert "virtual clock" in panel.inner_text()
    assert visit.errors == []


def test_nobody_is_asked_about_news_and_nothing_is_fetched(visit: Visit, lab: Lab):
    """A first visit: no question covers the page, and JupyterLab's server is not sent out for news or updates."""
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url))
    open_notebook(visit, lab, "00_start_here.ipynb")
    visit.page.wait_for_timeout(5_000)
    assert [url for url in asked if "/api/news" in url or "/api/update" in url] == []
    assert visit.page.locator(".Toastify__toast").all_inner_texts() == []


@pytest.mark.parametrize("script", [".ci/setup", "binder/postBuild"])
def test_make_lab_and_binder_switch_the_news_off(script: str):
    """`make lab` takes the settings that these tests run with; Binder switches the same extensions off."""
    repository = Path(__file__).parents[2]
    settings = json.loads((repository / ".ci/page_config.json").read_text())
    commands = (repository / script).read_text().splitlines()
    if script == ".ci/setup":
        assert 'cp .ci/page_config.json "$venv/etc/jupyter/labconfig/"' in commands
    else:
        for extension in settings["disabledExtensions"]:
            assert f"python -m jupyterlab.labextensions disable --level=sys_prefix {extension}" in commands


NOTEBOOKS = sorted(path.name for path in (Path(__file__).parents[2] / "notebooks").glob("0[0-9]_*.ipynb"))[:1]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_first_notebook_runs_for_a_learner(visit: Visit, lab: Lab, name: str):
    """Run All on an untouched notebook: no error that is not meant, and no warning."""
    open_notebook(visit, lab, name)
    run_all(visit)
    panel = visit.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    node = nbformat.read(lab.folder / name, as_version=4)
    meant = sum("raises-exception" in cell.metadata.get("tags", []) for cell in node.cells)
    failed = panel.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count()
    assert failed == meant
    assert panel.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    assert visit.errors == []
