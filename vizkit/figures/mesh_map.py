"""Which rank stands where on a mesh, and which groups it speaks in."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from vizkit.figures.animation import add_frames
from vizkit.figures.describe import counted, remember
from vizkit.figures.mesh_cells import CASING, CELL_COLORS, CORE, cells, on_grid, packed, shades
from vizkit.figures.mesh_grid import LABEL_PX, ROW_LABEL_PX, MeshGrid
from vizkit.figures.theme import AXIS_STYLE, TEXT, base_layout
from vizkit.mesh import Mesh

MAX_NUMBERED_RANKS = 128
MAX_LISTED_MEMBERS = 8
MAX_SPELLED_COLUMNS = 10
MAX_PARALLEL_LINES = 4
LINE_CHARACTERS, CAPTION_LINES = 84, 3
WIDEST = 16.0
FRAME_MS = 1_500
CELL_PX, LARGE_SIDE_PX, HEADER_PX, CAPTION_PX = 72, 560, 98, 76


def mesh_map(mesh: Mesh | object, colour_by: str | None = None, title: str | None = None) -> go.Figure:
    """Ranks of a mesh, inner axes as cells and outer axes as blocks, coloured by group along one axis.

    The slider chooses the axis, and begins with `colour_by` or the innermost axis with more than one rank. `mesh` is a
    `vizkit.Mesh` or a `DeviceMesh`. Up to 128 ranks each cell says rank and group, and lines join a group's ranks
    where there is room for them; above, colours remain, and hovering says the rest. Raises `InvalidInputError` for an
    unknown axis.

    >>> fig = mesh_map(Mesh(dp=2, tp=4), "tp")
    >>> [step.label for step in fig.layout.sliders[0].steps], fig.data[0].text[1][0]
    (['dp: 4 groups of 2', 'tp: 2 groups of 4'], '<b>4</b><br>group 1<br> ')
    """
    mesh = Mesh.of(mesh)
    if colour_by is not None:
        mesh.size(colour_by)
    shown = _innermost(mesh) if colour_by is None else mesh.names.index(colour_by)
    grid = MeshGrid.of(mesh, WIDEST)
    is_numbered = mesh.world_size <= MAX_NUMBERED_RANKS
    pictures = [_picture(grid, axis, is_numbered) for axis in mesh.names]
    colored, links = pictures[shown]
    fig = go.Figure([{**_cells(grid), **colored}, *({**look, **links} for look in _LINKS)])
    _lay_out(fig, grid, title, is_numbered)
    fig.layout.annotations = [_caption(mesh, mesh.names[shown]), *grid.block_labels()]
    frames = [
        {
            "name": f"{i}",
            "data": [{"type": "heatmap", **colored}, *[{"type": "scatter", **links}] * len(_LINKS)],
            "traces": [0, 1, 2],
            "layout": {"annotations": [{"text": _caption(mesh, axis)["text"]}]},
        }
        for i, (axis, (colored, links)) in enumerate(zip(mesh.names, pictures, strict=True))
    ]
    labels = [f"{axis}: {_groups_text(mesh, axis)}" for axis in mesh.names]
    add_frames(fig, frames, labels, redraw=True, frame_ms=FRAME_MS, shown=shown)
    return remember(fig, _in_words(mesh))


_LINKS = [
    {
        "type": "scatter", "mode": "lines+markers", "hoverinfo": "skip", "showlegend": False,
        "line": {"color": color, "width": width}, "marker": {"size": size, "color": color},
    }
    for color, width, size in ((CASING, 4.5, 9), (CORE, 1.5, 5))
]  # fmt: skip


def _innermost(mesh: Mesh) -> int:
    speaking = [position for position, size in enumerate(mesh.sizes) if size > 1]
    return speaking[-1] if speaking else len(mesh.sizes) - 1


def group_numbers(mesh: Mesh, axis: str) -> np.ndarray:
    """By rank, the position of its group in `mesh.groups(axis)`.

    >>> group_numbers(Mesh(dp=2, tp=2), "dp").tolist()
    [0, 1, 0, 1]
    """
    numbers = np.empty(mesh.world_size, np.int64)
    groups = np.array(mesh.groups(axis))
    numbers[groups] = np.arange(len(groups))[:, None]
    return numbers


def _picture(grid: MeshGrid, axis: str, is_numbered: bool) -> tuple[dict[str, object], dict[str, object]]:
    """What the two traces show for an axis: the cells' colours and texts, and the lines between a group's ranks."""
    numbers = group_numbers(grid.mesh, axis)
    z = shades(grid, numbers)
    if not is_numbered:
        return {"z": z}, {"x": [], "y": []}
    word = "group" if len(grid.column_starts) <= MAX_SPELLED_COLUMNS else "g"
    texts = np.array([f"<b>{rank}</b><br>{word} {number}<br> " for rank, number in enumerate(numbers.tolist())], object)
    return {"z": z, "text": on_grid(grid, texts, "")}, _links(grid, axis)


def _cells(grid: MeshGrid) -> dict[str, object]:
    mesh = grid.mesh
    small = mesh.world_size <= MAX_NUMBERED_RANKS
    gap = 3 if small else int(max(grid.width, grid.height) <= 64)
    facts, template = _hover(mesh)
    return {
        **cells(grid), "xgap": gap, "ygap": gap, "texttemplate": "%{text}" if small else None,
        "textfont": {"size": 12}, "customdata": on_grid(grid, facts, 0), "hovertemplate": template,
    }  # fmt: skip


def _hover(mesh: Mesh) -> tuple[np.ndarray, str]:
    """Numbers by rank, which take a tenth of the room of words, and the template that makes words of them."""
    ranks = np.arange(mesh.world_size)
    facts, lines = [ranks], ["<b>rank %{customdata[0]}</b>"]
    coordinates = np.unravel_index(ranks, mesh.sizes)
    step = mesh.world_size
    for name, size, place in zip(mesh.names, mesh.sizes, coordinates, strict=True):
        step //= size
        first = ranks - place * step
        i = len(facts)
        line = f"{name}=%{{customdata[{i}]}}: group %{{customdata[{i + 1}]}}"
        facts += [place, group_numbers(mesh, name)]
        if size <= (MAX_LISTED_MEMBERS if mesh.world_size <= MAX_NUMBERED_RANKS else 2):
            members = [first + member * step for member in range(size)]
            listed = ", ".join(f"%{{customdata[{len(facts) + member}]}}" for member in range(size))
            line += f", {'rank' if size == 1 else 'ranks'} {listed}"
        else:
            members = [first, first + (size - 1) * step]
            every = "" if step == 1 else f", each {step} apart"
            line += f", ranks %{{customdata[{len(facts)}]}} to %{{customdata[{len(facts) + 1}]}}{every}"
        facts += members
        lines.append(line)
    return packed(np.stack(facts, axis=1)), "<br>".join(lines) + "<extra></extra>"


def _links(grid: MeshGrid, axis: str) -> dict[str, object]:
    """A line through the ranks of each group, beside those of other groups that pass the same cells."""
    groups = np.array(grid.mesh.groups(axis))
    across, down = _spread(grid.column[groups]), _spread(grid.row[groups])
    if not (across ^ down).all():  # one rank alone, or a wrapped axis
        return {"x": [], "y": []}
    beside_x, beside_y = (_beside(grid, groups, is_across) for is_across in (True, False))
    if max(len(np.unique(beside_x)), len(np.unique(beside_y))) > MAX_PARALLEL_LINES:
        return {"x": [], "y": []}
    x = grid.x[groups] + 0.5 + np.where(across, 0, beside_y)
    y = grid.y[groups] + 0.5 + np.where(down, 0, beside_x)
    gap = np.full((len(groups), 1), np.nan)
    return {"x": np.hstack([x, gap]).ravel().round(4), "y": np.hstack([y, gap]).ravel().round(4)}


def _spread(places: np.ndarray) -> np.ndarray:
    """Whether a group's ranks stand in several columns (or rows), one answer a group."""
    return (places != places[:, :1]).any(axis=1, keepdims=True)


def _beside(grid: MeshGrid, groups: np.ndarray, is_across: bool) -> np.ndarray:
    """How far from the middle of the cell a group's line runs, so that those that pass the same cells stay apart."""
    places = (grid.column if is_across else grid.row)[groups]
    steps = np.diff(np.unique(places[0]))
    order = places[:, :1] % int(steps.min()) if len(steps) else np.zeros((len(groups), 1), np.int64)
    return 0.26 + 0.16 * order / max(int(order.max()), 1)


def _groups_text(mesh: Mesh, axis: str) -> str:
    size = mesh.size(axis)
    return f"{counted(mesh.world_size // size, 'group')} of {size}"


def _listed_groups(mesh: Mesh, axis: str) -> list[str]:
    """The groups with their ranks, in lines, as many as two lines hold."""
    groups = mesh.groups(axis)
    lines, listed = [""], 0
    for number, group in enumerate(groups):
        text = f"{number}: {_members(group)}"
        if len(lines[-1]) + len(text) > LINE_CHARACTERS:
            if len(lines) == CAPTION_LINES - 1:
                break
            lines.append("")
        lines[-1] += f"  {text}" if lines[-1] else text
        listed += 1
    rest = f"  … and {len(groups) - listed:,} more" if listed < len(groups) else ""
    return [*lines[:-1], lines[-1] + rest]


def _members(group: tuple[int, ...]) -> str:
    if len(group) <= MAX_LISTED_MEMBERS:
        return f"[{' '.join(map(str, group))}]"
    return f"[{group[0]} {group[1]} {group[2]} … {group[-1]}]"


def _caption(mesh: Mesh, axis: str) -> dict[str, object]:
    size = mesh.size(axis)
    number = " and number" if mesh.world_size <= MAX_NUMBERED_RANKS else ""
    head = f"<b>Colour{number}: the group (g) along {axis}</b>"
    speaks = "ranks of one colour speak together" if size > 1 else "each rank is alone, and nothing is sent"
    repeat = f"; colours repeat after {len(CELL_COLORS)}" if mesh.world_size // size > len(CELL_COLORS) else ""
    return {
        "text": "<br>".join([f"{head}, {_groups_text(mesh, axis)}: {speaks}{repeat}", *_listed_groups(mesh, axis)]),
        "x": 0, "y": 0, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top", "yshift": -8,
        "align": "left", "showarrow": False, "font": {"size": 13, "color": TEXT},
    }  # fmt: skip


def _in_words(mesh: Mesh) -> str:
    lines = [f"{mesh}: {counted(mesh.world_size, 'rank')}, the last axis varies fastest."]
    lines += [
        f"Along {axis}, {_groups_text(mesh, axis)}. {'  '.join(_listed_groups(mesh, axis))}" for axis in mesh.names
    ]
    return "\n".join(lines)


def _lay_out(fig: go.Figure, grid: MeshGrid, title: str | None, is_numbered: bool) -> None:
    mesh = grid.mesh
    plot_px = max(grid.height * CELL_PX, 90) if is_numbered else LARGE_SIDE_PX
    top = HEADER_PX + LABEL_PX * grid.depth(True)
    size = " × ".join(f"{name} {size}" for name, size in mesh.axes.items())
    subtitle = f"{size} = {counted(mesh.world_size, 'rank')}; the last axis varies fastest"
    fig.layout = base_layout(
        title or "Ranks of the mesh and the groups they speak in", subtitle, round(plot_px + top + CAPTION_PX)
    )
    fig.layout.margin.update(t=top, b=CAPTION_PX, l=20 + ROW_LABEL_PX * (1 + grid.depth(False)))
    common = {**AXIS_STYLE, "showgrid": False, "fixedrange": is_numbered}
    fig.layout.update(
        showlegend=False,
        xaxis={**common, "side": "top", "range": (0, grid.width), **grid.ticks(True)},
        yaxis={**common, "range": (grid.height, 0), **grid.ticks(False)},
    )
