"""One page that plays with no kernel and no network, with controls that the keyboard reaches."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from vizkit.errors import InvalidInputError
from vizkit.figures.animation import CONTROLS_PX
from vizkit.figures.describe import META_KEY, describe

PLOTLY_INLINE = "plotly inline"
"""In a page's scripts, the source of plotly.js, 5 MB."""
PLAYER = "player.js"
_ASSETS = Path(__file__).parent / "page"

Words = Sequence[tuple[str, str]]


def to_html(fig: go.Figure | Sequence[go.Figure], *, title: str | None = None, sections: Words = ()) -> str:
    """One HTML page with one figure or several, as text; about 5 MB, nearly all of it plotly.js.

    `sections` are pairs of heading and text that stand before the figures.

    Each figure has a button and a slider that the keyboard reaches, and its summary in words. The page fetches nothing
    and follows the reader's light or dark setting. Raises `InvalidInputError` where there is no figure.

    >>> page = to_html(go.Figure())
    >>> page.startswith("<!DOCTYPE html>"), "<title>" in page
    (True, True)
    """
    figures = [fig] if isinstance(fig, go.Figure) else list(fig)
    if not figures or not all(isinstance(figure, go.Figure) for figure in figures):
        raise InvalidInputError.because(
            "fig", fig, "must be a Plotly figure or several", "draw one, for instance with vizkit.timeline(trace)"
        )
    parts = [*_words(title, sections), *(figure_section(figure, number) for number, figure in enumerate(figures))]
    return whole_page(title or _heading(figures[0]), "\n".join(parts), [PLOTLY_INLINE, PLAYER])


def write_html(
    path: str | Path, fig: go.Figure | Sequence[go.Figure], *, title: str | None = None, sections: Words = ()
) -> Path:
    """Write the page of `to_html` to `path` and return the path."""
    target = Path(path)
    target.write_text(to_html(fig, title=title, sections=sections), encoding="utf-8")
    return target


def _words(title: str | None, sections: Words) -> list[str]:
    if not sections:
        return []
    heading = [f"<h1>{html.escape(title)}</h1>"] if title else []
    return heading + [
        f'<section class="words"><h2>{html.escape(name)}</h2>\n<pre class="summary">{html.escape(text)}</pre></section>'
        for name, text in sections
    ]


def whole_page(title: str, body: str, scripts: Sequence[str], styles: Sequence[str] = ()) -> str:
    """The page around `body`, as text.

    `scripts` are names of files of this package, `PLOTLY_INLINE`, or elements such as '<script src="plotly.min.js">';
    `styles` follow the page's own.
    """
    page = Template(_asset("page.html"))
    return page.substitute(
        title=html.escape(title),
        style="\n".join([_asset("page.css"), *styles]),
        body=body,
        scripts="\n".join(map(_script, scripts)),
    )


def _script(name: str) -> str:
    if name.startswith("<"):
        return name
    source = plotly_script().replace("</script", "<\\/script") if name == PLOTLY_INLINE else _asset(name)
    return f"<script>\n{source}\n</script>"


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def plotly_script() -> str:
    """The source of plotly.js, about 5 MB: what a page needs to draw."""
    return str(get_plotlyjs())


def saved_section(content: Mapping[str, Any], number: int) -> str:
    """The section of a figure as a notebook saved it: Plotly's JSON with data, layout and frames."""
    return figure_section(
        go.Figure({key: content[key] for key in ("data", "layout", "frames") if key in content}), number
    )


def figure_section(fig: go.Figure, number: int) -> str:
    """One figure as a part of a page: the plot, its controls, its summary, and its data for the page's player."""
    figure = Template(_asset("figure.html"))
    content = _without_plotly_controls(fig)
    return figure.substitute(
        number=number,
        heading=html.escape(_heading(fig)),
        summary=html.escape(describe(fig)),
        controls="" if "player" in content else "hidden",
        last=max(len(fig.frames) - 1, 0),
        shown=content.get("player", {}).get("first", 0),
        height=content["layout"].get("height", 450),
        # "</script" inside a string would end the element
        data=json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/"),
    )


def _without_plotly_controls(fig: go.Figure) -> dict[str, Any]:
    """The figure as plain data for the page's player, which has controls of its own in place of Plotly's."""
    content = json.loads(fig.to_json())
    layout = content["layout"]
    if META_KEY not in layout.get("meta", {}) or "sliders" not in layout:
        return content
    (slider,), (menu,) = layout.pop("sliders"), layout.pop("updatemenus")
    layout["height"] -= CONTROLS_PX
    layout["margin"]["b"] -= CONTROLS_PX
    content["player"] = {
        "labels": [step["label"] for step in slider["steps"]],
        "jump": slider["steps"][0]["args"][1],
        "frame_ms": menu["buttons"][0]["args"][1]["frame"]["duration"],
        "first": slider["active"],
    }
    return content


def _heading(fig: go.Figure) -> str:
    return fig.layout.title.text or "vizkit figure"
