"""Where the parts of a pipeline picture stand: captions, rows of cells, rows of memory, one time axis."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vizkit.figures.comparison import speed_up
from vizkit.figures.pipeline_cells import USUAL_WIDTH_PX, stage_on_rank
from vizkit.figures.pipeline_memory import Memory
from vizkit.figures.theme import AXIS_STYLE, CLEAR, CLOCK_MEANINGS, TimeAxis, base_layout, duration_text
from vizkit.figures.timeline import rank_axis, time_axis
from vizkit.metrics import Bubble
from vizkit.trace import Trace

TITLE_PX, CAPTION_PX, FOOTER_PX = 66, 26, 52
LEGEND_LINE_PX, LEGEND_KEY_PX, LETTER_PX = 20, 44, 6
SAME_WORK = 0.05
"""The share by which two traces' compute may differ before one is not called faster than the other."""
TICK_PX = 13
"""Between neighbouring labels of ranks."""
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

    @property
    def compute_ns(self) -> int:
        """What a rank computes, on average."""
        return round(self.trace.duration_ns * (1 - self.bubble.over_total))

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


def pipeline_layout(
    sides: Sequence[Side], title: str, duration: float, highest: float, legend: Sequence[str]
) -> dict[str, Any]:
    """Plotly's layout; `duration` is the time axis's length in its unit, `highest` the memory that fills a row.

    `legend` are the names that it lists: room is kept for as many lines of them as a narrow page needs.
    """
    sections = _sections(sides, highest)
    plot_px = sum(section.height_px for section in sections)
    legend_lines = -(-sum(LEGEND_KEY_PX + LETTER_PX * len(name) for name in legend) // USUAL_WIDTH_PX)
    header_px = TITLE_PX + LEGEND_LINE_PX * max(legend_lines, 1) + 10
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
            layout[_layout_name(section.side.memory_axis)] = _memory_rows(section.side, len(sides), domain)
    layout["annotations"] = annotations
    return layout


def _sections(sides: Sequence[Side], highest: float) -> list[Section]:
    """From top to bottom."""
    sections = []
    for side in sides:
        ranks = side.trace.world_size
        if len(sides) > 1:
            caption = f"<b>{side.label}</b> · {side.facts()} · {side.trace.clock} clock"
            sections.append(Section(Part.CAPTION, CAPTION_PX, side, caption))
        sections.append(Section(Part.CELLS, max(56, min(_row_px(len(sides)) * ranks, 180 + 8 * ranks)), side))
        if side.memory:
            unit = "bytes" if side.memory.unit == "bytes" else side.memory.unit
            caption = f"memory of activations, {unit}; a row is {side.memory.text(highest)} high"
            sections.append(Section(Part.CAPTION, CAPTION_PX, side, caption))
            sections.append(Section(Part.MEMORY, memory_px(ranks, len(sides)), side))
    return sections


def _subtitle(sides: Sequence[Side]) -> str:
    several_stages = max(stage_on_rank(side.trace)[1] for side in sides)
    paler = " · paler: a rank's higher-numbered stage" if several_stages > 1 else ""
    if len(sides) == 1:
        return f"{CLOCK_MEANINGS[sides[0].trace.clock]} · {sides[0].facts()}{paler}"
    verdict = _verdict(*sides) if len(sides) == 2 else "each from its own first span"
    clocks = dict.fromkeys(CLOCK_MEANINGS[side.trace.clock] for side in sides)
    return f"{verdict} · {'; '.join(clocks)}{paler}"


def _verdict(a: Side, b: Side) -> str:
    """Which is faster; where they do not do the same work, that."""
    least, most = sorted((a.compute_ns, b.compute_ns))
    if most - least > SAME_WORK * most:
        return f"not the same work: a rank computes {duration_text(a.compute_ns)} and {duration_text(b.compute_ns)}"
    return speed_up(a.trace, b.trace, (a.label, b.label))


def _caption(text: str, bottom: float) -> dict[str, Any]:
    return {
        "text": text, "x": 0, "y": bottom, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom",
        "showarrow": False,
    }  # fmt: skip


def _memory_rows(side: Side, num_sides: int, domain: tuple[float, float]) -> dict[str, Any]:
    """A row for each rank, rank 0 on top; row r lies between r and r + 1."""
    shown = labelled_ranks(side.trace.world_size, num_sides)
    return {
        **AXIS_STYLE, "domain": domain, "range": (side.trace.world_size, 0), "showgrid": False, "fixedrange": True,
        "tickvals": [rank + 0.55 for rank in shown], "ticktext": [f"rank {rank}" for rank in shown],
    }  # fmt: skip


def memory_px(ranks: int, num_sides: int) -> int:
    """Height of the memory of all ranks together."""
    return max(44, min((_row_px(num_sides) - 8) * ranks, 90 + 4 * ranks))


def labelled_ranks(ranks: int, num_sides: int) -> range:
    """The ranks whose row of memory is named: every first, second, fourth, … so that names do not touch."""
    step = 1
    while step * memory_px(ranks, num_sides) < TICK_PX * ranks:
        step *= 2
    return range(0, ranks, step)


def _row_px(num_sides: int) -> int:
    return ROW_PX if num_sides == 1 else ROW_OF_SEVERAL_PX


def _layout_name(axis: str) -> str:
    """`yaxis3` for `y3`."""
    return "yaxis" + axis[1:]
