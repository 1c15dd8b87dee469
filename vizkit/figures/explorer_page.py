"""The pipeline explorer as one static page, for a grid of settings computed beforehand."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from vizkit.activations import PER_RANK
from vizkit.durations import Durations
from vizkit.errors import InvalidInputError
from vizkit.figures import pipeline_cells as cells
from vizkit.figures import pipeline_memory as memory
from vizkit.figures.explorer import MS_PER_S, ExplorerSettings, explore
from vizkit.figures.html import PLOTLY_INLINE, whole_page
from vizkit.figures.pipeline import picture
from vizkit.figures.placement import ROW_SCALE
from vizkit.figures.theme import CLOCK_MEANINGS, OUTLINE, STYLES, TEXT
from vizkit.hardware import Link
from vizkit.schedules.actions import ACTION_KINDS
from vizkit.schedules.catalogue import recipe, schedule_names
from vizkit.schedules.schedule import Schedule
from vizkit.simulator import simulate
from vizkit.trace import NS_PER_S, Clock

_ASSETS = Path(__file__).parent / "page"

RANKS = (2, 4, 8)
MICROBATCHES = (4, 8, 16, 32)
STAGES_PER_RANK = (2, 4)
RATIOS_MS = {"1 : 1 : 1": (1.0, 1.0, 1.0), "1 : 1 : 0.5": (1.0, 1.0, 0.5), "1 : 1.5 : 1": (1.0, 1.5, 1.0)}
TRANSFERS_MS = (0.0, 0.25)
TICK_MS = 0.125
"""All times of the grid are whole ticks."""
HEADING = "Pipeline schedules, side by side"
INTRODUCTION = (
    "Simulated with a device for each rank. F, I and W are milliseconds for one microbatch on all layers of a rank, "
    "which its stages share; a full backward B is I + W. Transfer is what a message between ranks takes."
)


def explorer_page(settings: ExplorerSettings | None = None) -> str:
    """The page as text: menus and sliders of the browser, pictures and words for each point of the grid.

    Under 8 MB, most of it plotly.js; it fetches nothing. The page begins with the schedules of `settings`, at the
    grid's point that is nearest to its sizes. Takes some seconds, in which every point is simulated.
    """
    begin = settings or ExplorerSettings()
    content = {
        "grid": {
            "ranks": RANKS,
            "microbatches": MICROBATCHES,
            "stages": STAGES_PER_RANK,
            "ratios": RATIOS_MS,
            "transfers": TRANSFERS_MS,
            "tick_ms": TICK_MS,
            "kinds": [kind.value for kind in ACTION_KINDS],
        },
        "start": _start(begin),
        "schedules": {name: _sizes(name) for name in schedule_names()},
        "layouts": {f"{ranks} {sides}": _layout(ranks, sides) for ranks in RANKS for sides in (1, 2)},
        "style": _style(),
    }
    section = Template((_ASSETS / "explorer.html").read_text(encoding="utf-8")).substitute(
        heading=html.escape(HEADING),
        introduction=html.escape(INTRODUCTION),
        # "</script" inside a string would end the element
        data=json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/"),
    )
    style = (_ASSETS / "explorer.css").read_text(encoding="utf-8")
    return whole_page(HEADING, section, [PLOTLY_INLINE, "explorer.js"], [style])


def _start(settings: ExplorerSettings) -> dict[str, Any]:
    given = (settings.forward_ms, settings.input_ms, settings.weight_ms)
    return {
        "schedule": recipe(settings.schedule).name,
        "versus": recipe(settings.versus).name if settings.versus else "",
        "ranks": _nearest(RANKS, settings.num_ranks),
        "microbatches": _nearest(MICROBATCHES, settings.num_microbatches),
        "stages": str(_nearest(STAGES_PER_RANK, settings.stages_per_rank)),
        "ratio": min(RATIOS_MS, key=lambda name: float(np.abs(np.subtract(RATIOS_MS[name], given)).sum())),
        "transfer": f"{_nearest(TRANSFERS_MS, settings.transfer_ms):g}",
    }


def _nearest(values: tuple[Any, ...], wanted: float) -> Any:
    return min(values, key=lambda value: abs(value - wanted))


def _sizes(name: str) -> dict[str, Any]:
    """What the page knows of a schedule, by "ranks microbatches stages": its columns, or why it has not these sizes."""
    fixed = recipe(name).fixed_stages
    choices: tuple[int | None, ...] = (None,) if fixed else STAGES_PER_RANK
    sizes: dict[str, Any] = {}
    for ranks, microbatches, local in product(RANKS, MICROBATCHES, choices):
        try:
            schedule = recipe(name).build(ranks, microbatches, local)
        except InvalidInputError as refusal:
            sizes[f"{ranks} {microbatches} {local or '-'}"] = str(refusal)
        else:
            sizes[f"{ranks} {microbatches} {local or '-'}"] = _columns(schedule)
    return {"fixed": fixed, "sizes": sizes}


def _columns(schedule: Schedule) -> dict[str, Any]:
    position = np.zeros(256, np.uint8)
    position[[kind.code for kind in ACTION_KINDS]] = range(len(ACTION_KINDS))
    return {
        "offsets": schedule.offsets.tolist(),
        "kind": _text(position[schedule.kind], np.uint8),
        "stage": _text(schedule.stage, np.uint8),
        "microbatch": _text(schedule.microbatch, np.uint8),
        "share": schedule.num_ranks / schedule.stages_per_pipeline,
        "starts": dict(_starts(schedule)),
    }


def _starts(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """When each action starts, in ticks, by "ratio transfer"."""
    share = schedule.num_ranks / schedule.stages_per_pipeline / MS_PER_S
    for (name, ratio), transfer in product(RATIOS_MS.items(), TRANSFERS_MS):
        durations = Durations(**{kind: ms * share for kind, ms in zip("FIW", ratio, strict=True)})
        link = Link(transfer / MS_PER_S) if transfer else None
        start_ns = simulate(schedule, durations, link).start_ns[: len(schedule)]
        yield f"{name} {transfer:g}", _text(start_ns * MS_PER_S / NS_PER_S / TICK_MS, np.uint16)


def _text(values: np.ndarray, dtype: type[np.unsignedinteger[Any]]) -> str:
    """Whole numbers as base64; the page reads them back as typed arrays."""
    return base64.b64encode(np.rint(values).astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()


def _layout(ranks: int, num_sides: int) -> dict[str, Any]:
    """The layout of this many ranks and schedules; the page fills in texts and the length of the time axis."""
    settings = ExplorerSettings(
        "ZBVZeroBubble", "1F1B" if num_sides == 2 else None, num_ranks=ranks, num_microbatches=2 * ranks
    )
    return picture(explore(settings))["layout"]


def _style() -> dict[str, Any]:
    return {
        "kinds": {
            kind.value: {
                "label": STYLES[kind].label,
                "pattern": STYLES[kind].pattern,
                "colors": {
                    count: [cells.stage_color(kind, place, count) for place in range(count)]
                    for count in sorted({1, 2, *STAGES_PER_RANK})
                },
            }
            for kind in ACTION_KINDS
        },
        "pattern": cells.HATCHING,
        "outline": OUTLINE,
        "bubble": cells.BUBBLE,
        "text": TEXT,
        "half_cell": cells.HALF_CELL,
        "row_scale": ROW_SCALE,
        "width_px": cells.USUAL_WIDTH_PX,
        "digit_width": cells.DIGIT_WIDTH,
        "number_px": (cells.SMALLEST_NUMBER_PX, cells.LARGEST_NUMBER_PX),
        "memory_area": memory.AREA,
        "memory_line": memory.PURPLE,
        "memory_height": memory.ROW_HEIGHT,
        "memory_unit": PER_RANK,
        "clock": CLOCK_MEANINGS[Clock.IDEAL],
    }
