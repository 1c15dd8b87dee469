"""The player in JupyterLab: shown again and again, each one draws, reads well, and obeys its own keyboard controls."""

from __future__ import annotations

import pytest

from tests.browser.conftest import Lab, Visit
from tests.browser.test_jupyterlab import THEMES, open_notebook, run_all, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]

SHOWN = 5
PREPARE = """\
import vizkit as vk
from vizkit.trace import Span, Trace

ms = 1_000_000
spans = [Span(rank, kind, i * ms, (i + 1) * ms) for rank in range(2) for i, kind in enumerate("FB")]
trace = Trace.from_spans(spans, clock="ideal")"""
SHOW = "vk.widgets.player(trace)"
BARS_DRAWN = 4
PLOTS = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea .js-plotly-plot"
HANDLES = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea .widget-slider .noUi-handle"
CURSOR = "plot => plot._fullLayout.shapes[1].x0"


def boxes(visit: Visit, number: int) -> tuple[dict[str, float], dict[str, float]]:
    plot = visit.page.locator(PLOTS).nth(number)
    return plot.locator(".gtitle").bounding_box(), plot.locator(".gtitle-subtitle").bounding_box()


@pytest.mark.parametrize(("visit", "theme"), [(theme, theme) for theme in THEMES], indirect=["visit"])
def test_each_of_five_players_draws_and_obeys(visit: Visit, lab: Lab, theme: str):
    """All load at once. None is blank, in none does the title touch the subtitle, each follows its keys."""
    open_notebook(visit, lab, write_notebook(lab, f"players-{theme}.ipynb", PREPARE, *[SHOW] * SHOWN), theme)
    run_all(visit)
    for number in range(SHOWN):
        handle = visit.page.locator(HANDLES).nth(number)
        handle.wait_for()
        handle.scroll_into_view_if_needed()
        plot = visit.page.locator(PLOTS).nth(number)
        plot.locator(".bars .point").nth(BARS_DRAWN - 1).wait_for(state="attached", timeout=30_000)
        assert plot.locator(".bars .point").count() == BARS_DRAWN
        title, subtitle = boxes(visit, number)
        assert title["y"] + title["height"] <= subtitle["y"] + 1
        assert plot.evaluate(CURSOR) == 2.0
        handle.focus()
        handle.press("Home")
        visit.page.wait_for_function(
            "([plots, number]) => document.querySelectorAll(plots)[number]._fullLayout.shapes[1].x0 === 0",
            arg=[PLOTS, number],
            timeout=30_000,
        )
    assert [visit.page.locator(PLOTS).nth(i).evaluate(CURSOR) for i in range(SHOWN)] == [0] * SHOWN
    assert visit.errors == []


def test_keys_pressed_while_plotly_loads_are_not_lost(visit: Visit, lab: Lab):
    """The kernel moves the cursor before the browser has loaded plotly.js: it is drawn where it was moved to."""
    moved = "view = vk.widgets.player(trace)\nview.slider.value = 0\nview.slider.value = 1\nview"
    open_notebook(visit, lab, write_notebook(lab, "early.ipynb", PREPARE, moved))
    run_all(visit)
    plot = visit.page.locator(PLOTS).first
    plot.locator(".bars .point").nth(BARS_DRAWN - 1).wait_for(state="attached", timeout=30_000)
    assert plot.evaluate(CURSOR) == pytest.approx(2 / 99)
    assert visit.errors == []
