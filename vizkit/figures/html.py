"""One page that plays with no kernel and no network, with controls that the keyboard reaches."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from vizkit.errors import InvalidInputError
from vizkit.figures.describe import describe

_ASSETS = Path(__file__).parent / "page"


def to_html(fig: go.Figure | Sequence[go.Figure], *, title: str | None = None) -> str:
    """One HTML page with one figure or several, as text; about 5 MB, nearly all of it plotly.js.

    Each figure has a button and a slider that the keyboard reaches, and its summary in words. The page fetches nothing and
    follows the reader's light or dark setting. Raises `InvalidInputError` where there is no figure.

    >>> page = to_html(go.Figure())
    >>> page.startswith("<!DOCTYPE html>"), "<title>" in page
    (True, True)
    """
    figures = [fig] if isinstance(fig, go.Figure) else list(fig)
    if not figures or not all(isinstance(figure, go.Figure) for figure in figures):
        raise InvalidInputError.because(
            "fig", fig, "must be a Plotly figure or several", "draw one, for instance with vizkit.timeline(trace)"
        )
    page = Template((_ASSETS / "page.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=html.escape(title or _heading(figures[0])),
        style=(_ASSETS / "page.css").read_text(encoding="utf-8"),
        figures="\n".join(_section(figure, number) for number, figure in enumerate(figures)),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        player=(_ASSETS / "player.js").read_text(encoding="utf-8"),
    )


def write_html(path: str | Path, fig: go.Figure | Sequence[go.Figure], *, title: str | None = None) -> Path:
    """Write the page of `to_html` to `path` and return the path."""
    target = Path(path)
    target.write_text(to_html(fig, title=title), encoding="utf-8")
    return target


def _section(fig: go.Figure, number: int) -> str:
    figure = Template((_ASSETS / "figure.html").read_text(encoding="utf-8"))
    return figure.substitute(
        number=number,
        heading=html.escape(_heading(fig)),
        summary=html.escape(describe(fig)),
        controls="" if fig.frames else "hidden",
        last=max(len(fig.frames) - 1, 0),
        height=fig.layout.height or 450,
        data=_without_plotly_controls(fig),
    )


def _without_plotly_controls(fig: go.Figure) -> str:
    """The figure as JSON for the player, which has better controls of its own; their labels go with the frames."""
    content = json.loads(fig.to_json())
    layout = content["layout"]
    sliders = layout.pop("sliders", [])
    if layout.pop("updatemenus", None):
        controls_px = (layout.get("meta") or {}).get(CONTROLS_KEY, 0)
        layout["height"] -= controls_px
        layout["margin"]["b"] -= controls_px
    steps = sliders[0]["steps"] if sliders else []
    content["labels"] = [step["label"] for step in steps]
    content["animation"] = steps[0]["args"][1] if steps else {}
    # "</script" inside a string would end the element
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")


CONTROLS_KEY = "vizkit_controls_px"


def _heading(fig: go.Figure) -> str:
    return fig.layout.title.text or "vizkit figure"
