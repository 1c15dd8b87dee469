"""Which rank holds which piece of a tensor, and how pieces travel when its placements change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from vizkit.figures.animation import add_frames
from vizkit.figures.describe import remember
from vizkit.figures.mesh_cells import CASING, CELL_COLORS, CORE, cells, on_grid, packed, shades
from vizkit.figures.mesh_grid import LABEL_PX, ROW_LABEL_PX
from vizkit.figures.sharding_panels import TOP, Boxes
from vizkit.figures.sharding_play import Moment, Play
from vizkit.figures.theme import AXIS_STYLE, CLEAR, EMPTY_CELL, HATCH, OUTLINE, TEXT, base_layout
from vizkit.mesh import Mesh
from vizkit.sharding import Pieces, Placements, check_placements, pieces, redistribution

MAX_SLICED_COLUMNS = 8
FRAME_MS = 450
CELL_PX, LARGE_SIDE_PX, HEADER_PX, CAPTION_PX, STILL_CAPTION_PX = 104, 560, 98, 92, 50


def sharding_map(
    mesh: Mesh | object,
    shape: Sequence[int],
    before: Placements,
    after: Placements | None = None,
    title: str | None = None,
    *,
    element_bytes: int = 4,
    backend: str = "",
) -> go.Figure:
    """A panel for each rank, where it stands on the mesh: the tensor in outline, what the rank holds in colour.

    `before` has one placement for each axis of the mesh: "S(0)", "R", "P" or torch's. With `after` the figure plays the
    redistribution that `vizkit.sharding.redistribution` computes: the pieces that travel, the collective and its bytes.
    Ranks that hold the same part have the same colour; partial values are hatched. Up to 64 ranks panels have words,
    and messages are seen where they are 260 at most. Raises `InvalidInputError` for what `redistribution` refuses.

    >>> fig = sharding_map(Mesh(tp=4), (8, 4), ["S(0)"], ["R"])
    >>> fig.layout.sliders[0].steps[0].label, fig.layout.sliders[0].steps[-1].label
    ('before: S(0)', 'after: R')
    """
    mesh = Mesh.of(mesh)
    held = pieces(mesh, shape, check_placements(mesh, shape, before, "before"))
    steps = (
        redistribution(mesh, shape, before, after, element_bytes=element_bytes, backend=backend)
        if after is not None
        else ()
    )
    play = Play.of(held, steps, element_bytes, backend)
    draw = _panel_traces if play.is_lettered else _cell_traces
    moments = list(play.moments())
    fig = go.Figure(draw(play, moments[0]))
    _lay_out(fig, play, title)
    fig.layout.annotations = [_caption(play.caption(moments[0])), *play.panels.grid.block_labels()]
    frames = []
    for i, moment in enumerate(moments):
        traces = draw(play, moment)
        moving = [{"type": trace["type"], **{k: trace[k] for k in _MOVING & trace.keys()}} for trace in traces]
        words = {"annotations": [{"text": play.caption(moment)}]}
        frames.append({"name": f"{i}", "data": moving, "traces": list(range(len(traces))), "layout": words})
    add_frames(fig, frames, [play.label(m) for m in moments], redraw=True, frame_ms=FRAME_MS, shown=0)
    return remember(fig, play.in_words())


_MOVING = {"x", "y", "z", "text", "customdata"}


def _panel_traces(play: Play, moment: Moment) -> list[dict[str, object]]:
    """Outlines, one trace a colour, hatching, the edges of what travels, and words, in this order at each moment."""
    state, panels = play.states[moment.done], play.panels
    held, travelling = play.held(moment), play.under_way(moment)
    together = Boxes.joined([held, travelling])
    hatched = held if state.partial_axes else held.first(0)
    area = {"type": "scatter", "mode": "lines", "fill": "toself", "hoverinfo": "skip"}
    thin: dict[str, object] = {"color": OUTLINE, "width": 1}
    colored: list[tuple[str, Boxes, dict[str, object]]] = [
        (f"pieces {i}", together.of_color(i, len(CELL_COLORS)), {"fillcolor": color, "line": thin})
        for i, color in enumerate(CELL_COLORS)
    ]
    pattern = {"shape": "/", "fgcolor": HATCH, "bgcolor": CLEAR, "size": 7, "fillmode": "overlay"}
    looks: list[tuple[str, Boxes, dict[str, object]]] = [
        ("whole tensor", panels.outlines(), {"fillcolor": EMPTY_CELL, "line": thin}),
        *colored,
        ("partial", hatched, {"fillcolor": CLEAR, "line": {"color": CLEAR, "width": 0}, "fillpattern": pattern}),
        ("travelling, casing", travelling, {"fillcolor": CLEAR, "line": {"color": CASING, "width": 4}}),
        ("travelling", travelling, {"fillcolor": CLEAR, "line": {"color": CORE, "width": 1.5}}),
    ]
    return [
        *({**area, "name": name, **panels.polygons(boxes), **look} for name, boxes, look in looks),
        _words(play, state),
    ]


def _words(play: Play, state: Pieces) -> dict[str, object]:
    grid = play.panels.grid
    has_room = len(grid.column_starts) <= MAX_SLICED_COLUMNS
    mark = " partial" if state.partial_axes else ""
    texts = [
        f"<b>rank {rank}</b><br>{state.text(rank)}{mark}" if has_room else f"<b>{rank}</b>"
        for rank in range(play.mesh.world_size)
    ]
    return {
        "type": "scatter", "name": "ranks", "mode": "text", "textfont": {"size": 12, "color": TEXT},
        "x": grid.x + 0.5, "y": grid.y + TOP / 2, "text": texts,
        "customdata": _facts(state), "hovertemplate": _hover(play.mesh, len(state.shape)),
    }  # fmt: skip


def _cell_traces(play: Play, moment: Moment) -> list[dict[str, object]]:
    """One heat map: a cell a rank, coloured by piece."""
    state, grid = play.states[moment.done], play.panels.grid
    return [
        {
            **cells(grid), "name": "pieces", "z": shades(grid, state.numbers),
            "customdata": on_grid(grid, _facts(state), 0),
            "hovertemplate": _hover(play.mesh, len(state.shape)),
        }
    ]  # fmt: skip


def _facts(state: Pieces) -> np.ndarray:
    """By rank, what the hover text names: number, coordinates, start and stop by dim; in as few bytes as hold it."""
    coordinates = np.indices(state.mesh.sizes).reshape(len(state.mesh.sizes), -1).T
    ends = np.stack([state.start, state.stop], axis=2).reshape(len(coordinates), -1)
    facts = np.hstack([np.arange(len(coordinates))[:, None], coordinates, ends])
    return packed(facts)


def _hover(mesh: Mesh, num_dims: int) -> str:
    first = 1 + len(mesh.names)
    place = [f"%{{customdata[{i}]}}" for i in range(first + 2 * num_dims)]
    where = ", ".join(f"{name}={place[1 + i]}" for i, name in enumerate(mesh.names))
    held = ", ".join(f"{place[first + 2 * dim]}:{place[first + 2 * dim + 1]}" for dim in range(num_dims))
    return f"<b>rank {place[0]}</b>, {where}<br>holds [{held}]<extra></extra>"


def _caption(text: str) -> dict[str, object]:
    return {
        "text": text, "x": 0, "y": 0, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top",
        "yshift": -8, "align": "left", "showarrow": False, "font": {"size": 13, "color": TEXT},
    }  # fmt: skip


def _lay_out(fig: go.Figure, play: Play, title: str | None) -> None:
    grid, shape = play.panels.grid, play.panels.shape
    plot_px = grid.height * CELL_PX if play.is_lettered else LARGE_SIDE_PX
    top = HEADER_PX + LABEL_PX * grid.depth(True)
    drawn = f"dim {play.panels.columns} runs across; "
    if play.panels.rows is not None:
        drawn = f"dim {play.panels.rows} runs down, {drawn}"
    repeat = "" if play.is_lettered else f", which repeats after {len(CELL_COLORS)}"
    same = f"ranks with the same part have the same colour{repeat}"
    subtitle = f"a tensor of {' × '.join(map(str, shape))}; {drawn * play.is_lettered}{same}"
    caption_px = CAPTION_PX if play.steps else STILL_CAPTION_PX
    heading = title or f"Which rank holds which piece{' as placements change' * bool(play.steps)}"
    fig.layout = base_layout(heading, subtitle, round(plot_px + top + caption_px))
    fig.layout.margin.update(t=top, b=caption_px, l=20 + ROW_LABEL_PX * (1 + grid.depth(False)))
    common = {**AXIS_STYLE, "showgrid": False, "fixedrange": play.is_lettered}
    fig.layout.update(
        showlegend=False,
        xaxis={**common, "side": "top", "range": (0, grid.width), **grid.ticks(True)},
        yaxis={**common, "range": (grid.height, 0), **grid.ticks(False)},
    )
