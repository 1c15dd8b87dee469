"""The live view in JupyterLab: it moves while the cell runs, names the slow rank, and Stop stops the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.browser.conftest import Lab, Visit
from tests.browser.test_jupyterlab import open_notebook, outputs, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]

SETUP = """\
import time
import torch
import torch.distributed as dist
import vizkit as vk"""
LAUNCH = """\
def train(steps):
    for step in vk.progress(range(steps), label="step"):
        time.sleep(0.06 if dist.get_rank() == 1 else 0.02)
        dist.all_reduce(torch.ones(1000))
        vk.log(loss=1 / (step + 1))

run = vk.launch(train, 5_000, world_size=3, live=True)"""
PANEL = ".jp-NotebookPanel:not(.lm-mod-hidden)"
STOP = f"{PANEL} button.vk-live-stop"
COMMS = "how => { window.jupyterapp.serviceManager.kernels.commsOverSubshells = how; }"


def steps_shown(visit: Visit) -> int:
    text = visit.page.locator(f"{PANEL} .vk-live", has=visit.page.locator("table")).inner_text()
    return int(re.search(r"step (\d+) of 5000", text)[1])


@pytest.mark.parametrize(
    ("visit", "theme", "subshells", "error"),
    [
        pytest.param("light", "light", "perCommTarget", "RunStoppedError: stopped at step", id="light-subshell"),
        pytest.param("dark", "dark", "disabled", "KeyboardInterrupt: the ranks were stopped", id="dark-interrupt"),
    ],
    indirect=["visit"],
)
def test_the_panel_moves_names_the_slow_rank_and_stops_by_keyboard(
    visit: Visit, lab: Lab, screenshots: Path, theme: str, subshells: str, error: str
):
    """Stop is heard while the cell runs; where the front end cannot reach a busy kernel, it interrupts it instead."""
    name = write_notebook(lab, f"live-{theme}.ipynb", SETUP, LAUNCH)
    open_notebook(visit, lab, name, theme)
    page = visit.page
    page.evaluate(COMMS, subshells)
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")

    page.wait_for_selector(f"{PANEL} .vk-live [role=alert]")
    assert "Slow: rank 1 takes" in page.locator(f"{PANEL} [role=alert]").inner_text()
    assert "1 slow" in page.locator(f"{PANEL} .vk-live table").inner_text()
    before = steps_shown(visit)
    page.wait_for_function(
        """([panel, before]) => {
            const text = document.querySelector(panel + ' .vk-live table').closest('.vk-live').innerText;
            return Number(/step (\\d+) of 5000/.exec(text)[1]) > before;
        }""",
        arg=[PANEL, before],
    )
    page.screenshot(path=screenshots / f"live-{theme}.png")

    page.focus(STOP)
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{PANEL} .jp-OutputArea-output:has-text('{error}')")
    said = outputs(visit)
    assert "slow: steps" in said
    assert page.locator(STOP).count() == 0
    assert visit.errors == []

    page.evaluate("async () => { await window.jupyterapp.commands.execute('docmanager:save'); }")
    saved = json.loads((lab.folder / name).read_text())
    summary, _ = saved["cells"][-1]["outputs"]
    assert list(summary["data"]) == ["text/plain"]
    assert "widgets" not in saved["metadata"]
