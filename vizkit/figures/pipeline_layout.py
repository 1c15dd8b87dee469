"""Where the parts of a pipeline picture stand: captions, rows of cells, rows of memory, one time axis."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vizkit.figures.comparison import speed_up
from vizkit.figures.pipeline_cells import stage_on_rank
from vizkit.figures.pipeline_memory import Memory
from vizkit.figures.theme import AXIS_STYLE, CLEAR, CLOCK_MEANINGS, TimeAxis, base_layout, duration_text
from vizkit.figures.timeline import MAX_RANK_LABELS, rank_axis, time_axis
from vizkit.metrics import Bubble
from vizkit.trace import Trace

TITLE_PX, LEGEND_PX, CAPTION_PX, FOOTER_PX = 60, 30, 26, 52
LEFT_PX, RIGHT_PX = 66, 44
ROW_PX, ROW_OF_SEVERAL_PX = 34, 28
"""A rank's row, in a picture of one trace and of several."""


@dataclass(frozen=True)
class Side:
    """One trace of the picture, with the axes that its rows and its memory stand on."""

    trace: Trace
    label: str
    axis: TimeAxis
    memory: Memory | None
    bubble: Bubble
    number: int

    @property
    def rows_axis(self) -> str:
        return f"y{2 * self.number + 1}" if self.number else "y"

    @property
    def memory_axis(self) -> str:
        return f"y{2 * self.number + 2}"

    @property
    def lowest_axis(self) -> str:
        return self.memory_axis if self.memory else self.rows_axis

    def facts(self) -> str:
        """Duration and both bubbles."""
        return (
            f"{duration_text(self.trace.duration_ns)} · bubble {self.bubble.over_total:.1%} of the total time, "
            f"{self.bubble.over_ideal:.1%} of the ideal time"
        )


class Part(enum.Enum):
    """What a section of the plot holds."""

    CAPTION = enum.auto()
    CELLS = enum.auto()
    MEMORY = enum.auto()


@dataclass(frozen=True)
class Section:
    """A horizontal strip of the plot."""

    part: Part
    height_px: int
    side: Side
    text: str = ""


def pipeline_layout(sides: Sequence[Side], title: str, duration: float, highest: float) -> dict[str, Any]:
    """Plotly's layout; `duration` is the time axis's length in its unit, `highest` the memory that fills a row."""
    sections = _sections(sides, highest)
    plot_px = sum(section.height_px for section in sections)
    header_px = TITLE_PX + LEGEND_PX
    layout = base_layout(title, _subtitle(sides), plot_px + header_px + FOOTER_PX)
    layout |= {
        "margin": {"l": LEFT_PX, "r": RIGHT_PX, "t": header_px, "b": FOOTER_PX},
        "legend": {
            "orientation": "h", "x": 0, "xanchor": "left", "y": 1 + 4 / plot_px, "yanchor": "bottom",
            "itemwidth": 30, "bgcolor": CLEAR, "tracegroupgap": 0,
        },
        "xaxis": {**time_axis(sides[0].axis, duration, sides[-1].lowest_axis), "domain": (0, 1)},
        "barmode": "overlay",
    }  # fmt: skip
    annotations = []
    top = plot_px
    for section in sections:
        domain = (max(top - section.height_px, 0) / plot_px, top / plot_px)
        top -= section.height_px
        if section.part is Part.CAPTION:
            annotations.append(_caption(section.text, domain[0]))
        elif section.part is Part.CELLS:
            layout[_layout_name(section.side.rows_axis)] = rank_axis(section.side.trace.world_size, domain)
        else:
            layout[_layout_name(section.side.memory_axis)] = _memory_rows(section.side.trace.world_size, domain)
    layout["annotations"] = annotations
    return layout


def _sections(sides: Sequence[Side], highest: float) -> list[Section]:
    """From top to bottom."""
    sections = []
    for side in sides:
        ranks = side.trace.world_size
        row_px = ROW_PX if len(sides) == 1 else ROW_OF_SEVERAL_PX
        if len(sides) > 1:
            caption = f"<b>{side.label}</b> · {side.facts()} · {side.trace.clock} clock"
            sections.append(Section(Part.CAPTION, CAPTION_PX, side, caption))
        sections.append(Section(Part.CELLS, max(56, min(row_px * ranks, 180 + 8 * ranks)), side))
        if side.memory:
            unit = "bytes" if side.memory.unit == "bytes" else side.memory.unit
            caption = f"memory of activations, {unit}; a row is {side.memory.text(highest)} high"
            sections.append(Section(Part.CAPTION, CAPTION_PX, side, caption))
            sections.append(Section(Part.MEMORY, max(44, min((row_px - 8) * ranks, 90 + 4 * ranks)), side))
    return sections


def _subtitle(sides: Sequence[Side]) -> str:
    several_stages = max(stage_on_rank(side.trace)[1] for side in sides)
    paler = " · paler: a rank's later stage" if several_stages > 1 else ""
    if len(sides) == 1:
        return f"{CLOCK_MEANINGS[sides[0].trace.clock]} · {sides[0].facts()}{paler}"
    a, b = sides[0], sides[1]
    verdict = speed_up(a.trace, b.trace, (a.label, b.label)) if len(sides) == 2 else "each from its own first span"
    clocks = dict.fromkeys(CLOCK_MEANINGS[side.trace.clock] for side in sides)
    return f"{verdict} · {'; '.join(clocks)}{paler}"


def _caption(text: str, bottom: float) -> dict[str, Any]:
    return {
        "text": text, "x": 0, "y": bottom, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom",
        "showarrow": False,
    }  # fmt: skip


def _memory_rows(ranks: int, domain: tuple[float, float]) -> dict[str, Any]:
    """A row for each rank, rank 0 on top; row r lies between r and r + 1."""
    shown = range(0, ranks, -(-ranks // MAX_RANK_LABELS))
    return {
        **AXIS_STYLE, "domain": domain, "range": (ranks, 0), "showgrid": False, "fixedrange": True,
        "tickvals": [rank + 0.55 for rank in shown], "ticktext": [f"rank {rank}" for rank in shown],
    }  # fmt: skip


def _layout_name(axis: str) -> str:
    """`yaxis3` for `y3`."""
    return "yaxis" + axis[1:]
