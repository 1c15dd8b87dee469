"""The page of `vk.to_html` as text: whole, self-contained, and safe with any name. `tests/browser` plays it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

import vizkit as vk
from vizkit.errors import InvalidInputError
from vizkit.figures.html import write_html
from vizkit.trace import Span, Trace

LOADING = {"src", "href", "srcset", "data", "poster", "action"}


def trace(name: str = "step") -> Trace:
    return Trace.from_spans([Span(0, "F", 0, 3_000_000, name)], clock="ideal")


class Page(HTMLParser):
    """Elements with their attributes, and the text of each element that has any."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text.replace(get_plotlyjs().replace("</script", "<\\/script"), ""))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.elements[-1][0] if self.elements else "", data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def data(self) -> list[dict]:
        return [json.loads(text) for tag, text in self.texts if tag == "script" and text.startswith("{")]


def test_nothing_is_loaded_from_anywhere():
    """No element of the page names an address, and its styles import none."""
    page = vk.to_html([vk.timeline(trace()), vk.collective_steps("all_reduce")])
    assert [(tag, set(attrs) & LOADING) for tag, attrs in Page(page).elements if set(attrs) & LOADING] == []
    own = page.replace(get_plotlyjs().replace("</script", "<\\/script"), "")
    assert re.findall(r"https?:|@import|url\(|mathjax", own, re.I) == []


def test_controls_are_native_and_labelled():
    """A button and a range input for each figure that plays, each with a name that is read aloud."""
    page = Page(vk.to_html(vk.timeline(trace(), max_frames=7)))
    (button,), (slider,) = page.of("button"), page.of("input")
    assert (button["type"], button["aria-label"]) == ("button", "Play")
    assert (slider["type"], slider["min"], slider["max"], slider["value"]) == ("range", "0", "6", "6")
    assert slider["aria-label"] == "Time in: What each rank did"


def test_summary_stands_below_and_describes_the_picture():
    fig = vk.timeline(trace())
    page = Page(vk.to_html(fig))
    picture = next(attrs for attrs in page.of("div") if attrs.get("role") == "img")
    (summary,) = page.of("pre")
    assert picture["aria-describedby"] == summary["id"]
    assert ("pre", vk.describe(fig)) in page.texts


def test_page_has_language_title_and_both_themes():
    page = vk.to_html(vk.timeline(trace()), title="Run <1>")
    assert "<title>Run &lt;1&gt;</title>" in page
    assert '<html lang="en">' in page
    assert "prefers-color-scheme: dark" in page


def test_several_figures_share_one_plotly():
    figures = [vk.timeline(trace()), vk.traffic_map(trace()), vk.collective_steps("broadcast")]
    page = vk.to_html(figures)
    assert page.count(get_plotlyjs()[:2_000].replace("</script", "<\\/script")) == 1
    assert len(Page(page).data()) == 3
    ids = [attrs["id"] for _, attrs in Page(page).elements if "id" in attrs]
    assert len(ids) == len(set(ids)) == 6


def test_plotlys_own_controls_make_room_for_the_pages():
    """The picture loses the height of the controls, and their labels go to the page's player."""
    fig = vk.timeline(trace(), max_frames=3)
    (content,) = Page(vk.to_html(fig)).data()
    assert {"sliders", "updatemenus"} & set(content["layout"]) == set()
    assert content["layout"]["height"] < fig.layout.height
    assert content["player"]["labels"] == ["0 ms · 0 B moved", "1.5 ms · 0 B moved", "3 ms · 0 B moved"]


@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "<!--<script>", "$title", "é\u2028☃"])
def test_any_name_stays_a_name(name: str):
    """A span's name or a title cannot end the script that holds it, nor fill a placeholder of the template."""
    page = Page(vk.to_html(vk.timeline(trace(name), title=name)))
    plain = Page(vk.to_html(vk.timeline(trace(), title="t")))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    assert page.data()[0]["layout"]["title"]["text"] == name


def test_a_figure_of_plotlys_own_keeps_its_controls():
    """No player for a figure whose frames vizkit does not know; it is shown as it is."""
    fig = go.Figure(go.Scatter(y=[1, 2])).update_layout(title="Loss", sliders=[{"steps": []}])
    page = Page(vk.to_html(fig))
    assert "sliders" in page.data()[0]["layout"]
    assert "player" not in page.data()[0]
    assert [attrs for attrs in page.of("div") if "hidden" in attrs] != []


def test_figure_itself_is_left_as_it_was():
    fig = vk.timeline(trace())
    before = fig.to_json()
    vk.to_html(fig)
    assert fig.to_json() == before


def test_write_html_returns_where(tmp_path: Path):
    path = write_html(tmp_path / "page.html", vk.timeline(trace()))
    assert path == tmp_path / "page.html"
    assert path.read_text(encoding="utf-8") == vk.to_html(vk.timeline(trace()))


@pytest.mark.parametrize("wrong", [[], "fig", [1]])
def test_refuses_what_is_no_figure(wrong: object):
    with pytest.raises(InvalidInputError, match="must be a Plotly figure or several; draw one"):
        vk.to_html(wrong)
