"""One notebook as one page: text, code, outputs as they were saved, and figures that play."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from latex2mathml.converter import convert as as_mathml
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

from vizkit.figures.html import PLAYER, saved_section, whole_page

_TEMPLATES = Path(__file__).parent / "template"
_FIGURE = "application/vnd.plotly.v1+json"
_WIDGET = "application/vnd.jupyter.widget-view+json"
_NEEDS_KERNEL = '<p class="needs-kernel">The controls of this cell need a kernel: open the notebook in JupyterLab.</p>'
_CODE_OR_MATH = re.compile(r"(```.*?```|`[^`\n]*`)|\$\$(.+?)\$\$|\$([^$\n]+?)\$", re.S)
_LINK = re.compile(r'href="([\w.-]+)\.(ipynb|md)(#[^"]*)?"')
PLOTLY_FILE = "plotly.min.js"


@dataclass(frozen=True)
class Page:
    """A finished page: where it goes, its heading, its first sentence, and its HTML."""

    name: str
    title: str
    promise: str
    html: str


def page_of(name: str, notebook: NotebookNode, names: Collection[str], *, with_solutions: bool = True) -> Page:
    """The page of `notebook`; links to files in `names` lead to their pages, and figures need `PLOTLY_FILE` beside.

    >>> lesson = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Rings\\n\\nYou see $n-1$ steps.")])
    >>> page = page_of("01_rings", lesson, [])
    >>> page.title, page.promise, "<math" in page.html
    ('Rings', 'You see $n-1$ steps.', True)
    """
    cells = [cell for cell in notebook.cells if with_solutions or "solution" not in cell.metadata.get("tags", [])]
    title, promise = _opening(cells, name)
    sections = _Sections()
    shown = nbformat.v4.new_notebook(cells=[_shown(cell, sections) for cell in cells])
    exporter = HTMLExporter(template_name="handout", extra_template_basedirs=[str(_TEMPLATES)])
    body, _ = exporter.from_notebook_node(shown)
    return Page(name, title, promise, lesson_page(title, _linked(body, names), plays=sections.count > 0))


def lesson_page(title: str, body: str, *, plays: bool) -> str:
    """The page of a lesson; one that `plays` loads Plotly from the file beside it."""
    scripts = [f'<script src="{PLOTLY_FILE}"></script>', PLAYER] if plays else []
    return whole_page(title, f'<div class="lesson">\n{body}\n</div>', scripts, list(_styles()))


def _styles() -> Iterator[str]:
    yield (_TEMPLATES / "handout.css").read_text(encoding="utf-8")
    yield HtmlFormatter(style="default").get_style_defs(".highlight .hl, .highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight .hl, .highlight")
    yield f"@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n.highlight {{ background: var(--code); }}"


def _opening(cells: list[NotebookNode], name: str) -> tuple[str, str]:
    """The first heading and the first paragraph after it."""
    text = next((cell.source for cell in cells if cell.cell_type == "markdown"), "")
    heading, _, rest = text.partition("\n")
    paragraph = rest.strip().split("\n\n")[0].replace("\n", " ") if heading.startswith("# ") else ""
    return heading.removeprefix("# ").strip() or name, paragraph


class _Sections:
    """Numbers the figures of one page."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, content: dict[str, Any]) -> str:
        self.count += 1
        return saved_section(content, self.count)


def _shown(cell: NotebookNode, sections: _Sections) -> NotebookNode:
    if cell.cell_type == "markdown":
        return nbformat.v4.new_markdown_cell(_with_mathml(cell.source), id=cell.get("id", "cell"))
    if cell.cell_type != "code":
        return cell
    outputs = [_static(output, sections) for output in cell.outputs]
    return nbformat.v4.new_code_cell(cell.source, metadata=cell.metadata, outputs=outputs, id=cell.get("id", "cell"))


def _static(output: NotebookNode, sections: _Sections) -> NotebookNode:
    """The output as HTML where it holds a figure or controls; anything else as it is."""
    data = output.get("data", {})
    if _FIGURE not in data and _WIDGET not in data:
        return output
    still = sections.of(data[_FIGURE]) if _FIGURE in data else data.get("text/html", "")
    return nbformat.v4.new_output("display_data", {"text/html": (_NEEDS_KERNEL if _WIDGET in data else "") + still})


def _with_mathml(text: str) -> str:
    """TeX between dollars as MathML, which browsers draw by themselves; code stays as it is.

    >>> _with_mathml("costs `$5`, or $n$")
    'costs `$5`, or <math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"><mrow><mi>n</mi></mrow></math>'
    """

    def drawn(found: re.Match[str]) -> str:
        code, block, inline = found.groups()
        return code or as_mathml(block or inline, display="block" if block else "inline")

    return _CODE_OR_MATH.sub(drawn, text)


def _linked(body: str, names: Collection[str]) -> str:
    def link(found: re.Match[str]) -> str:
        target, _, anchor = found.groups()
        return f'href="{target}.html{anchor or ""}"' if target in names else found.group()

    return _LINK.sub(link, body)
