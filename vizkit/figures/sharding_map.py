"""Which rank holds which piece of a tensor, and how pieces travel when its placements change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import plotly.graph_objects as go

from vizkit.collectives.backends import algorithm_for
from vizkit.figures.animation import add_frames
from vizkit.figures.describe import MAX_RANKS_LISTED, counted, remember
from vizkit.figures.mesh_grid import LABEL_PX, ROW_LABEL_PX, MeshGrid
from vizkit.figures.mesh_map import GROUP_COLORS
from vizkit.figures.sharding_panels import TOP, Boxes, Panels, drawn_dims
from vizkit.figures.theme import AXIS_STYLE, CLEAR, EMPTY_CELL, HATCH, OUTLINE, TEXT, VERMILLION, base_layout
from vizkit.mesh import Mesh
from vizkit.sharding import (
    Move,
    Pieces,
    PlacementKind,
    Placements,
    RedistributionStep,
    pieces,
    redistribution,
)
from vizkit.units import bytes_text

PIECE_COLORS = GROUP_COLORS
MAX_LETTERED_RANKS = 64
MAX_SLICED_COLUMNS = 8
MAX_MOVES = 260
MOVES_PER_STEP = 5
FRAME_MS = 450
WIDEST = 8.0
EDGE = VERMILLION
CELL_PX, LARGE_SIDE_PX, HEADER_PX, CAPTION_PX = 104, 560, 98, 92


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
    held = pieces(mesh, shape, before)
    steps = (
        redistribution(mesh, shape, before, after, element_bytes=element_bytes, backend=backend)
        if after is not None
        else ()
    )
    play = _Play.of(held, steps, element_bytes, backend)
    moments = list(play.moments())
    fig = go.Figure(
        [{**look, **data} for look, data in zip(_looks(play.is_lettered), play.picture(moments[0]), strict=True)]
    )
    _lay_out(fig, play, title)
    fig.layout.annotations = [_caption(play.caption(moments[0])), *play.panels.grid.block_labels()]
    moving = list(range(1, len(fig.data)))  # the outlines of the panels stay
    frames = [
        {
            "name": f"{i}",
            "data": [{"type": "scatter", **data} for data in play.picture(moment)[1:]],
            "traces": moving,
            "layout": {"annotations": [{"text": play.caption(moment)}]},
        }
        for i, moment in enumerate(moments)
    ]
    add_frames(fig, frames, [play.label(m) for m in moments], redraw=True, frame_ms=FRAME_MS, shown=0)
    return remember(fig, play.in_words())


@dataclass(frozen=True)
class _Moment:
    """`done` steps are over; the next one is `progress` of its way, from 0 to 1."""

    done: int
    progress: float


@dataclass(frozen=True, eq=False)
class _Play:
    states: Sequence[Pieces]
    steps: Sequence[RedistributionStep]
    panels: Panels
    element_bytes: int
    backend: str
    moves: Sequence[Sequence[Move]] = field(repr=False)

    @classmethod
    def of(cls, held: Pieces, steps: Sequence[RedistributionStep], element_bytes: int, backend: str) -> _Play:
        states = [held, *(step.after for step in steps)]
        sharded = [p.dim for s in (states[0], states[-1]) for p in s.placements if p.kind is PlacementKind.SHARD]
        rows, columns = drawn_dims(held.shape, sharded)
        is_lettered = held.mesh.world_size <= MAX_LETTERED_RANKS
        grid = MeshGrid.of(held.mesh, WIDEST)
        panels = Panels(grid, held.shape, rows, columns, _colored(states) if is_lettered else None)
        moves = [list(step.moves()) if is_lettered else [] for step in steps]
        drawn = [found if len(found) <= MAX_MOVES else [] for found in moves]
        return cls(states, steps, panels, element_bytes, backend, drawn)

    @property
    def mesh(self) -> Mesh:
        return self.states[0].mesh

    @property
    def is_lettered(self) -> bool:
        return self.mesh.world_size <= MAX_LETTERED_RANKS

    def moments(self) -> Iterator[_Moment]:
        yield _Moment(0, 0.0)
        for number in range(len(self.steps)):
            stops = range(1, MOVES_PER_STEP) if self.moves[number] else ()
            yield from (_Moment(number, stop / MOVES_PER_STEP) for stop in stops)
            yield _Moment(number + 1, 0.0)

    def picture(self, moment: _Moment) -> list[dict[str, object]]:
        """What the traces show: outlines, one trace a colour, hatching, the edges of what travels, and words."""
        state = self.states[moment.done]
        held = self.panels.held(state)
        travelling = self.panels.under_way(self.moves[moment.done] if moment.progress else [], moment.progress)
        together = Boxes.joined([held, travelling])
        colors = [together.of_color(color, len(PIECE_COLORS)) for color in range(len(PIECE_COLORS))]
        hatched = held if state.partial_axes else _none_of(held)
        shown = [*map(self.panels.polygons, (*colors, hatched, travelling))]
        outlines = self.panels.outlines()
        return [*({"x": x, "y": y} for x, y in (outlines, *shown)), self._words(state)]

    def _words(self, state: Pieces) -> dict[str, object]:
        grid, ranks = self.panels.grid, range(self.mesh.world_size)
        words: dict[str, object] = {
            "x": grid.x + 0.5, "y": grid.y + TOP / 2, "customdata": _facts(state, self.element_bytes)
        }  # fmt: skip
        if self.is_lettered:
            sliced = len(grid.column_starts) <= MAX_SLICED_COLUMNS
            mark = " partial" if state.partial_axes else ""
            words["text"] = [f"<b>{rank}</b>{f'<br>{state.text(rank)}{mark}' * sliced}" for rank in ranks]
        return words

    def label(self, moment: _Moment) -> str:
        names = ", ".join(map(str, self.states[moment.done].placements))
        if moment.progress:
            step = self.steps[moment.done]
            return f"{step.action} along {step.axis}: {moment.progress:.0%} of the way"
        if moment.done == len(self.steps):
            return f"after: {names}"
        return f"before: {names}" if not moment.done else f"between: {names}"

    def caption(self, moment: _Moment) -> str:
        state = self.states[moment.done]
        lines = [self._held_text(state)]
        if moment.done < len(self.steps):
            step = self.steps[moment.done]
            head = "Now" if moment.progress else "Next"
            place = f", step {moment.done + 1} of {len(self.steps)}" if len(self.steps) > 1 else ""
            lines.append(f"<b>{head}{place}: {step.action} along {step.axis}</b>, {step.change}")
            lines.append(self._bytes_text(step))
        elif self.steps:
            sent = np.sum([step.wire_bytes for step in self.steps], axis=0)
            lines.append(f"<b>Done.</b> On the wire in all: {_range(sent)} from each rank")
        return "<br>".join(lines)

    def _held_text(self, state: Pieces) -> str:
        copies = len({*state.numbers[state.lengths.all(axis=1)].tolist()})
        names = ", ".join(
            f"{axis} {placement}" for axis, placement in zip(self.mesh.names, state.placements, strict=True)
        )
        held = _range(state.lengths.prod(axis=1) * self.element_bytes)
        partial = f"; hatched: summands, partial along {' and '.join(state.partial_axes)}" * bool(state.partial_axes)
        return f"{names}: {counted(copies, 'distinct piece')}, {held} a rank{partial}"

    def _bytes_text(self, step: RedistributionStep) -> str:
        if step.kind is None:
            return "No communication"
        algorithm = algorithm_for(step.kind, self.backend).value.replace("_", "-")
        return (
            f"Payload {_range(step.payload_bytes)}; on the wire {_range(step.wire_bytes)} from each rank ({algorithm})"
        )

    def in_words(self) -> str:
        shape = " × ".join(map(str, self.states[0].shape))
        lines = [f"A tensor of {shape}, {self.element_bytes} B an element, on {self.mesh}."]
        lines += [self._held_text(self.states[0]).replace("hatched: ", "") + "."]
        lines += self._ranks_text(self.states[0])
        for number, step in enumerate(self.steps, 1):
            lines.append(f"Step {number}: {step.action} along {step.axis}, {step.change}. {self._bytes_text(step)}.")
        if self.steps:
            lines += [self._held_text(self.states[-1]).replace("hatched: ", "") + "."]
            lines += self._ranks_text(self.states[-1])
        return "\n".join(lines)

    def _ranks_text(self, state: Pieces) -> list[str]:
        listed = range(min(self.mesh.world_size, MAX_RANKS_LISTED))
        rest = self.mesh.world_size - len(listed)
        return [
            *(f"  rank {rank}: {state.text(rank)}" for rank in listed),
            *([f"  and {rest:,} more ranks"] * (rest > 0)),
        ]


def _colored(states: Sequence[Pieces]) -> tuple[np.ndarray, np.ndarray]:
    """The pieces that have colours: those of the first state that has several, so that a colour stays with its data."""
    for state in states:
        boxes = np.unique(np.concatenate([state.start, state.stop], axis=1), axis=0)
        start, stop = np.split(boxes, 2, axis=1)
        full = (start < stop).all(axis=1)
        if full.sum() > 1 or state is states[-1]:
            return start[full], stop[full]
    raise AssertionError("there is a last state")


def _none_of(boxes: Boxes) -> Boxes:
    return replace(boxes, **{name: getattr(boxes, name)[:0] for name in boxes.__dataclass_fields__})


def _range(values: Sequence[float] | np.ndarray) -> str:
    least, most = (bytes_text(float(value)) for value in (min(values), max(values)))
    return most if least == most else f"{least} to {most}"


def _looks(is_lettered: bool) -> list[dict[str, object]]:
    """The traces without their data, in the order of `_Play.picture`."""
    area = {"type": "scatter", "mode": "lines", "fill": "toself", "hoverinfo": "skip", "showlegend": False}
    thin = {"color": OUTLINE, "width": 1 if is_lettered else 0}
    return [
        {**area, "name": "whole tensor", "fillcolor": EMPTY_CELL, "line": thin},
        *({**area, "name": f"pieces {i}", "fillcolor": color, "line": thin} for i, color in enumerate(PIECE_COLORS)),
        {
            **area, "name": "partial", "line": {"color": CLEAR, "width": 0}, "fillcolor": CLEAR,
            "fillpattern": {"shape": "/", "fgcolor": HATCH, "bgcolor": CLEAR, "size": 7, "fillmode": "overlay"},
        },
        {**area, "name": "travelling", "fillcolor": CLEAR, "line": {"color": EDGE, "width": 2.5}},
        {
            "type": "scatter", "name": "ranks", "mode": "text" if is_lettered else "markers", "showlegend": False,
            "textfont": {"size": 12, "color": TEXT}, "marker": {"size": 8, "opacity": 0},
        },
    ]  # fmt: skip


def _facts(state: Pieces, element_bytes: int) -> np.ndarray:
    """By rank: its number, coordinates, start and stop by dim, elements and bytes; what the hover text names."""
    coordinates = np.indices(state.mesh.sizes).reshape(len(state.mesh.sizes), -1).T
    elements = state.lengths.prod(axis=1, keepdims=True)
    ends = np.stack([state.start, state.stop], axis=2).reshape(len(elements), -1)
    ranks = np.arange(len(elements))[:, None]
    return np.hstack([ranks, coordinates, ends, elements, elements * element_bytes]).astype(np.int32)


def _hover(mesh: Mesh, num_dims: int) -> str:
    place = [f"%{{customdata[{i}]}}" for i in range(3 + len(mesh.names) + 2 * num_dims)]
    where = ", ".join(f"{name}={place[1 + i]}" for i, name in enumerate(mesh.names))
    first = 1 + len(mesh.names)
    held = ", ".join(f"{place[first + 2 * dim]}:{place[first + 2 * dim + 1]}" for dim in range(num_dims))
    return f"<b>rank {place[0]}</b>, {where}<br>[{held}]<br>{place[-2]} elements, {place[-1]} B<extra></extra>"


def _caption(text: str) -> dict[str, object]:
    return {
        "text": text, "x": 0, "y": 0, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top",
        "yshift": -8, "align": "left", "showarrow": False, "font": {"size": 13, "color": TEXT},
    }  # fmt: skip


def _lay_out(fig: go.Figure, play: _Play, title: str | None) -> None:
    grid, shape = play.panels.grid, play.panels.shape
    plot_px = grid.height * CELL_PX if play.is_lettered else LARGE_SIDE_PX
    top = HEADER_PX + LABEL_PX * grid.depth(True)
    drawn = f"dim {play.panels.columns} runs across"
    if play.panels.rows is not None:
        drawn = f"dim {play.panels.rows} runs down, {drawn}"
    subtitle = f"a tensor of {' × '.join(map(str, shape))}, {drawn}; ranks with the same part have the same colour"
    heading = title or f"Which rank holds which piece{' as placements change' * bool(play.steps)}"
    fig.layout = base_layout(heading, subtitle, round(plot_px + top + CAPTION_PX))
    fig.layout.margin.update(t=top, b=CAPTION_PX, l=20 + ROW_LABEL_PX * (1 + grid.depth(False)))
    fig.data[-1].hovertemplate = _hover(play.mesh, len(shape))
    common = {**AXIS_STYLE, "showgrid": False, "fixedrange": play.is_lettered}
    fig.layout.update(
        showlegend=False,
        xaxis={**common, "side": "top", "range": (0, grid.width), **grid.ticks(True)},
        yaxis={**common, "range": (grid.height, 0), **grid.ticks(False)},
    )
