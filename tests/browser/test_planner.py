"""The planner in JupyterLab: sliders plan anew, a choice is looked into by keyboard and by click."""

from __future__ import annotations

import re

import pytest

import vizkit as vk
from tests.browser.conftest import Lab, Visit
from tests.browser.test_jupyterlab import open_notebook, run_all, write_notebook
from vizkit.widgets.plan_explorer import MODELS

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]

SHOW = """import vizkit as vk
view = vk.widgets.planner(count=1, global_batch=64)
view.controls["model"].value = "1.3 B"
view"""
OUTPUT = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea"
PLOT = f"{OUTPUT} .js-plotly-plot"
TITLE = "selector => document.querySelectorAll(selector)[1]?.querySelector('.gtitle')?.textContent"


def words_of(num_nodes: int) -> str:
    return str(vk.plan(MODELS["1.3 B"], vk.hardware.dgx_a100(num_nodes), 64))


LABELS = """selector => [...document.querySelector(selector).querySelectorAll('.y2tick text')].map(
    label => label.getBoundingClientRect().y + label.getBoundingClientRect().height / 2)"""
BARS = """selector => [...document.querySelector(selector).querySelectorAll('.bars')].map(
    bars => [...bars.querySelectorAll('.point path')].map(
        bar => bar.getBoundingClientRect().y + bar.getBoundingClientRect().height / 2))"""


@pytest.mark.parametrize(("visit", "theme"), [("dark", "dark")], indirect=["visit"])
def test_the_planner_obeys_keyboard_and_mouse(visit: Visit, lab: Lab, theme: str):
    """More nodes, another plan; number 2 by the slider, number 1 by a click on its bar; each shows its pipeline."""
    open_notebook(visit, lab, write_notebook(lab, f"planner-{theme}.ipynb", SHOW), theme)
    run_all(visit)
    page = visit.page
    page.locator(f"{PLOT} .bars .point").first.wait_for(state="attached", timeout=60_000)

    def wait_for_words(start: str) -> None:
        page.wait_for_function(
            """([selector, start]) => [...document.querySelectorAll(selector)].some(
                part => part.textContent.startsWith(start))""",
            arg=[f"{OUTPUT} .widget-html pre", start],
            timeout=30_000,
        )

    def slider(label: str):
        return page.locator(f"{OUTPUT} .widget-slider", has_text=re.compile(f"^{label}")).locator(".noUi-handle").first

    def wait_for_pipeline_of(number: int) -> None:
        page.wait_for_function(
            f"([selector, start]) => (({TITLE})(selector) ?? '').startsWith(start)",
            arg=[PLOT, f"Number {number}: "],
            timeout=30_000,
        )

    wait_for_words(words_of(1))
    slider("nodes or devices").press("ArrowRight")
    wait_for_words(words_of(2))
    wait_for_pipeline_of(1)
    labels, bars = page.evaluate(LABELS, PLOT), max(page.evaluate(BARS, PLOT), key=len)
    assert sorted(labels) == pytest.approx(sorted(bars), abs=3), "a label stands beside its bar"
    slider("look into number").press("ArrowRight")
    wait_for_pipeline_of(2)
    page.locator(PLOT).first.locator(".bars .point path").first.click(force=True)
    wait_for_pipeline_of(1)
    assert visit.errors == []
