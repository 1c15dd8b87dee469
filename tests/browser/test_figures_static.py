"""Each figure's page, opened from a file in a real browser: it plays, scrubs by keyboard, and nothing overlaps."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
import pytest

import vizkit as vk
from tests.browser.conftest import Visit
from vizkit.figures.html import write_html
from vizkit.trace import KINDS, Span, SpanKind, Trace

pytestmark = pytest.mark.browser

MS = 1_000_000
RANKS = 4


def data_parallel() -> Trace:
    """Two steps on 4 ranks: forward, a backward that two buckets overlap, an optimizer step."""
    spans = []
    for step in range(2):
        begin = step * 20 * MS
        for rank in range(RANKS):
            spans += [
                Span(rank, SpanKind.FORWARD, begin, begin + (4 + rank) * MS, microbatch=step),
                Span(rank, SpanKind.BACKWARD, begin + (4 + rank) * MS, begin + 14 * MS, microbatch=step),
                Span(rank, SpanKind.OPTIMIZER, begin + 18 * MS, begin + 20 * MS),
            ]
            spans += [
                Span(rank, SpanKind.ALL_REDUCE, begin + (10 + 4 * k) * MS, begin + (13 + 4 * k) * MS, f"bucket {k}",
                     payload_bytes=4_000_000, group=tuple(range(RANKS)), operation=2 * step + k)
                for k in range(2)
            ]  # fmt: skip
    return Trace.from_spans(spans, clock="virtual")


def every_kind() -> Trace:
    """One span of each kind, so the legend is as long as it gets."""
    return Trace.from_spans(
        [
            Span(0, kind, i * MS, (i + 1) * MS, payload_bytes=10**13, peer=int(kind is SpanKind.SEND), group=(0, 1))
            for i, kind in enumerate(KINDS)
        ],
        clock="wall", world_size=2,
    )  # fmt: skip


FIGURES = {
    "timeline": lambda: vk.timeline(data_parallel()),
    "timeline of every kind": lambda: vk.timeline(every_kind()),
    "compare": lambda: vk.compare(data_parallel(), every_kind(), labels=("before", "after")),
    "traffic map": lambda: vk.traffic_map(data_parallel()),
    "ring": lambda: vk.collective_steps("all_reduce", "ring", 4, payload_bytes=10**9),
    "halving-doubling": lambda: vk.collective_steps("all_reduce", "halving_doubling", 8),
}


def open_page(visit: Visit, folder: Path, *figures: go.Figure) -> None:
    visit.page.goto(write_html(folder / "page.html", figures).as_uri())
    for i in range(len(figures)):
        visit.page.locator(f"#plot-{i}[data-ready]").wait_for()


def cursor(visit: Visit) -> float:
    """Where the drawn cursor is, on the time axis."""
    return visit.page.evaluate("() => document.querySelector('.plot')._fullLayout.shapes[1].x0")


def drawn(visit: Visit) -> str:
    """The drawn picture as text: shapes, cells and captions."""
    return visit.page.evaluate("() => document.querySelector('.plot .main-svg').innerHTML")


def test_play_moves_the_cursor_and_pause_holds_it(visit: Visit, tmp_path: Path):
    """From the end, play starts over at 0 and goes on by itself; pause stops it where it is."""
    open_page(visit, tmp_path, vk.timeline(data_parallel()))
    assert cursor(visit) == 40
    play = visit.page.get_by_role("button", name="Play")
    play.click()
    visit.page.wait_for_function("() => document.querySelector('.plot')._fullLayout.shapes[1].x0 < 20")
    early = cursor(visit)
    visit.page.wait_for_function(f"() => document.querySelector('.plot')._fullLayout.shapes[1].x0 > {early + 2}")
    visit.page.get_by_role("button", name="Pause").click()
    visit.page.wait_for_timeout(300)
    held = cursor(visit)
    visit.page.wait_for_timeout(500)
    assert cursor(visit) == held
    assert visit.errors == []


def test_plotlys_toolbar_stays_small_and_sends_nothing(visit: Visit, tmp_path: Path):
    """Its buttons keep Plotly's own size, beside the title and not over it; none uploads the figure."""
    open_page(visit, tmp_path, vk.timeline(data_parallel()))
    buttons = visit.page.locator(".modebar-btn")
    titles = [buttons.nth(i).get_attribute("data-title") for i in range(buttons.count())]
    assert "Download plot as a PNG" in titles
    assert not [title for title in titles if title and ("share" in title.lower() or "cloud" in title.lower())]
    widths = visit.page.evaluate("() => [...document.querySelectorAll('.modebar-btn')].map((b) => b.offsetWidth)")
    assert max(widths) <= 40


def test_everything_is_reached_and_driven_by_the_keyboard(visit: Visit, tmp_path: Path):
    """Tab to the button, Space plays and pauses; Tab to the slider, its keys scrub; the moment is told in words."""
    open_page(visit, tmp_path, vk.timeline(data_parallel(), max_frames=41))
    keyboard = visit.page.keyboard
    for _ in range(20):
        keyboard.press("Tab")
        if visit.page.evaluate("() => document.activeElement.className") == "play":
            break
    keyboard.press("Space")
    visit.page.wait_for_function("() => document.querySelector('.play').getAttribute('aria-label') === 'Pause'")
    keyboard.press("Space")
    visit.page.wait_for_function("() => document.querySelector('.play').getAttribute('aria-label') === 'Play'")
    keyboard.press("Tab")
    for key, time in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 40)):
        keyboard.press(key)
        visit.page.wait_for_function(f"() => document.querySelector('.plot')._fullLayout.shapes[1].x0 === {time}")
    scrub = visit.page.get_by_role("slider")
    assert scrub.get_attribute("aria-valuetext") == visit.page.locator(".moment").inner_text() == "40 ms · 96 MB moved"
    assert visit.errors == []


def test_frames_leave_the_users_shapes_alone(visit: Visit, tmp_path: Path):
    """Plotly merges a frame's two shapes into the layout's: a line that the user added stays where it was."""
    fig = vk.timeline(data_parallel(), max_frames=5).add_vline(x=12, line_color="#D55E00")
    open_page(visit, tmp_path, fig)
    visit.page.get_by_role("slider").press("Home")
    visit.page.wait_for_function("() => document.querySelector('.plot')._fullLayout.shapes[1].x0 === 0")
    places = visit.page.evaluate("() => document.querySelector('.plot')._fullLayout.shapes.map(s => [s.x0, s.x1])")
    assert places == [[0, 40], [0, 0], [12, 12]]


@pytest.mark.parametrize("name", ["traffic map", "ring"])
def test_pictures_that_change_are_drawn_anew(visit: Visit, tmp_path: Path, name: str):
    """Cells, numbers and captions follow the slider."""
    open_page(visit, tmp_path, FIGURES[name]())
    scrub = visit.page.get_by_role("slider")
    scrub.press("Home")
    visit.page.wait_for_timeout(400)
    first = drawn(visit)
    scrub.press("End")
    visit.page.wait_for_timeout(400)
    assert drawn(visit) != first
    assert visit.errors == []


def test_plotlys_own_button_and_slider_play_too(visit: Visit, tmp_path: Path):
    """In JupyterLab the figure comes with these; here it is Plotly's plain page of it."""
    page = tmp_path / "plain.html"
    fig = vk.timeline(data_parallel(), max_frames=30)
    page.write_text(fig.to_html(include_plotlyjs=True, include_mathjax=False, auto_play=False), encoding="utf-8")
    visit.page.goto(page.as_uri())
    visit.page.locator(".updatemenu-button").first.click()
    in_plotly = "document.querySelector('.js-plotly-plot')._fullLayout"
    visit.page.wait_for_function(f"() => {in_plotly}.shapes[1].x0 < 20")
    visit.page.wait_for_function(f"() => {in_plotly}.shapes[1].x0 > 5")
    frame, time = visit.page.evaluate(f"() => [{in_plotly}.sliders[0].active, {in_plotly}.shapes[1].x0]")
    assert time == pytest.approx(frame * 40 / 29, abs=2 * 40 / 29)


BOXES = """() => [...document.querySelectorAll('.plot')].map(plot => {
  const parts = {title: '.gtitle', subtitle: '.gtitle-subtitle', legend: '.legend', xtitle: '.xtitle', right: '.y3tick',
                 left: '.ytick', bytes: '.y2tick', caption: '.annotation-text', colorbar: '.colorbar'};
  const page = plot.getBoundingClientRect();
  const found = [['page', page.left, page.top, page.right, page.bottom]];
  for (const [name, selector] of Object.entries(parts))
    for (const element of plot.querySelectorAll(selector)) {
      const box = element.getBoundingClientRect();
      if (box.width && box.height) found.push([name, box.left, box.top, box.right, box.bottom]);
    }
  return found;
})"""
TICKS = ("left", "right", "bytes")


@pytest.mark.parametrize("width", [900, 1400])
def test_nothing_is_clipped_or_overlaps(visit: Visit, tmp_path: Path, width: int):
    """Titles, legend, tick labels, captions and colour bar lie inside the picture and apart from each other."""
    visit.page.set_viewport_size({"width": width, "height": 900})
    open_page(visit, tmp_path, *(draw() for draw in FIGURES.values()))
    pictures = visit.page.evaluate(BOXES)
    assert len(pictures) == len(FIGURES)
    for name, (picture, *boxes) in zip(FIGURES, pictures, strict=True):
        assert {"title", "left"} < {part for part, *_ in boxes}, name
        for part, left, top, right, bottom in boxes:
            assert min(left - picture[1], top - picture[2]) >= -1, f"{name}: {part} is clipped"
            assert max(right - picture[3], bottom - picture[4]) <= 1, f"{name}: {part} is clipped"
        for i, (part, left, top, right, bottom) in enumerate(boxes):
            for other, left2, top2, right2, bottom2 in boxes[i + 1 :]:
                apart = right <= left2 + 1 or right2 <= left + 1 or bottom <= top2 + 1 or bottom2 <= top + 1
                assert apart or (part == other and part in TICKS), f"{name}: {part} and {other} overlap"


def test_text_takes_the_themes_ink(visit: Visit, tmp_path: Path):
    """On the page contrast is full, 16 to 1 on white and 15 to 1 on #111, also when the theme changes later."""
    open_page(visit, tmp_path, vk.timeline(data_parallel()))
    for theme, ink in (("light", "rgb(31, 31, 31)"), ("dark", "rgb(230, 230, 230)")):
        visit.page.emulate_media(color_scheme=theme)
        for selector in (".gtitle", ".xtitle", ".legendtext", ".ytick text"):
            visit.page.wait_for_function(
                "([selector, ink]) => getComputedStyle(document.querySelector(selector)).fill === ink",
                arg=[f".plot {selector}", ink],
            )
