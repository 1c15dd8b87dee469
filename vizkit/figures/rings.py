"""A collective step by step: which chunks each rank holds, and which travel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import plotly.graph_objects as go

from vizkit import collectives
from vizkit.collectives import Algorithm, Step, Transfer
from vizkit.errors import InvalidInputError
from vizkit.figures.animation import add_frames
from vizkit.figures.describe import counted, remember
from vizkit.figures.theme import (
    AXIS_STYLE,
    EMPTY_CELL,
    ORANGE,
    OUTLINE,
    STYLES,
    VERMILLION,
    base_layout,
    sequential_scale,
)
from vizkit.trace import SpanKind
from vizkit.units import bytes_text

MAX_CELLS = 600
MOVES_PER_STEP = 4
MAX_FRAMES = 160
FRAME_MS = 350
HEADER_PX, ROW_PX, CAPTION_LINE_PX = 118, 52, 18
MAX_SPELLED_STEPS = 12
MAX_SPELLED_TRANSFERS = 8
SPELLED_A_LINE = 4
EMPTY_EDGE = 0.005


def collective_steps(
    kind: SpanKind | str,
    algorithm: Algorithm | str | None = None,
    world_size: int = 4,
    *,
    payload_bytes: int | None = None,
    root: int = 0,
) -> go.Figure:
    """The chunks of one collective travelling from rank to rank, step by step: one row a rank, one column a chunk.

    A cell says whose contributions the rank's copy of the chunk holds, and is darker the more complete. `algorithm` is
    one of `vizkit.collectives.algorithms_for(kind)` and defaults to the textbook's choice; with `payload_bytes` the
    steps also say bytes. Raises `InvalidInputError` for what `vizkit.collectives.steps` refuses, and over 600 cells.

    >>> fig = collective_steps("all_reduce", "ring", world_size=4)
    >>> fig.layout.title.text, [step.label for step in fig.layout.sliders[0].steps][-1]
    ('all-reduce by ring, 4 ranks', 'done after 6 steps')
    """
    play = _Play.of(kind, algorithm, world_size, root, payload_bytes)
    moments = play.moments()
    fig = go.Figure(play.picture(moments[0]))
    _lay_out(fig, play)
    fig.add_annotation(
        text=play.caption(moments[0]), x=0, y=0, xref="paper", yref="paper", xanchor="left", yanchor="top", yshift=-8,
        align="left", showarrow=False, font={"size": 13},
    )  # fmt: skip
    frames = [
        {
            "name": f"{i}",
            "data": play.picture(moment),
            "traces": [0, 1, 2],
            "layout": {"annotations": [{"text": play.caption(moment)}]},
        }
        for i, moment in enumerate(moments)
    ]
    add_frames(fig, frames, [play.label(m) for m in moments], redraw=True, frame_ms=FRAME_MS, shown=play.first_shown)
    for trace, update in zip(fig.data, play.picture(moments[play.first_shown]), strict=True):
        trace.update(update)
    fig.layout.annotations[0].text = play.caption(moments[play.first_shown])
    return remember(fig, play.summary())


@dataclass(frozen=True)
class _Moment:
    """`step` counts from 0; `progress` is how far its transfers are, from 0 to 1."""

    step: int
    progress: float


@dataclass(frozen=True, eq=False)
class _Play:
    kind: SpanKind
    algorithm: Algorithm
    world_size: int
    root: int
    payload_bytes: int | None
    steps: Sequence[Step]
    holdings: np.ndarray

    @classmethod
    def of(
        cls, kind: SpanKind | str, algorithm: Algorithm | str | None, world_size: int, root: int, payload: int | None
    ) -> _Play:
        kind = SpanKind.parse(kind)
        chosen = collectives.algorithm_for(kind) if algorithm is None else algorithm
        steps = collectives.steps(kind, chosen, world_size, root)
        if (cells := world_size * collectives.num_chunks(kind, world_size)) > MAX_CELLS:
            raise InvalidInputError.because(
                "world_size",
                world_size,
                f"{cells} cells are more than the {MAX_CELLS} that a picture has room for",
                "use fewer ranks; vizkit.collectives.steps has no limit",
            )
        holdings = collectives.holdings(kind, chosen, world_size, root)
        return cls(kind, Algorithm(chosen), world_size, root, payload, steps, holdings)

    @property
    def name(self) -> str:
        return f"{STYLES[self.kind].label} by {self.algorithm.replace('_', '-')}, {counted(self.world_size, 'rank')}"

    @property
    def num_chunks(self) -> int:
        return self.holdings.shape[2]

    @property
    def first_shown(self) -> int:
        """The first step with its messages under way: the picture that says most while nothing plays."""
        return min(self._moves_per_step // 2, len(self.moments()) - 1)

    @property
    def _moves_per_step(self) -> int:
        return max(1, min(MOVES_PER_STEP, MAX_FRAMES // max(len(self.steps), 1)))

    def moments(self) -> list[_Moment]:
        moves = self._moves_per_step
        under_way = [_Moment(step, move / moves) for step in range(len(self.steps)) for move in range(moves)]
        return [*under_way, _Moment(len(self.steps), 0.0)]

    def picture(self, moment: _Moment) -> list[dict[str, object]]:
        """The three traces: cells, the ways of this step's messages, and the messages on their way."""
        held = self.holdings[moment.step]
        in_flight = self.steps[moment.step] if moment.step < len(self.steps) else ()
        cells = {
            "type": "heatmap", "z": self._completeness(held), "text": self._contents(held), "texttemplate": "%{text}",
            "zmin": 0, "zmax": 1, "xgap": 3, "ygap": 3, "showscale": False, "textfont": {"size": self._text_px},
            "colorscale": [[0, EMPTY_CELL], [EMPTY_EDGE, EMPTY_CELL], *sequential_scale(EMPTY_EDGE)],
            "hovertemplate": "rank %{y}, chunk %{x}<br>holds: %{text}<extra></extra>",
        }  # fmt: skip
        return [cells, *_arrows(in_flight, moment.progress)]

    @property
    def _text_px(self) -> int:
        return 13 if self.num_chunks <= 8 else 9

    def _completeness(self, held: np.ndarray) -> np.ndarray:
        final = collectives.promise(self.kind, self.world_size, self.root).max(axis=0)
        wanted = np.maximum((final > 0).sum(-1), 1)
        return ((held > 0).sum(-1) / wanted).astype(np.float32)

    def _contents(self, held: np.ndarray) -> list[list[str]]:
        # how often a barrier's signal has come by does not matter, only from whom
        counts = np.minimum(held, 1) if self.kind is SpanKind.BARRIER else held
        return [[_contributors(cell) for cell in row] for row in counts.tolist()]

    def label(self, moment: _Moment) -> str:
        total = len(self.steps)
        return f"step {moment.step + 1} of {total}" if moment.step < total else f"done after {counted(total, 'step')}"

    def caption(self, moment: _Moment) -> str:
        if not self.steps:
            return "One rank has nothing to send."
        sent = sum((self._share(t) for step in self.steps[: moment.step] for t in step), Fraction(0))
        so_far = f"On the wire before this step: {self._amount(sent)}"
        if moment.step == len(self.steps):
            return f"<b>Done after {counted(len(self.steps), 'step')}.</b><br>On the wire in all: {self._amount(sent)}"
        step = self.steps[moment.step]
        spelled = [f"{t.src}→{t.dst}: {self._chunks(t)}" for t in step[:MAX_SPELLED_TRANSFERS]]
        more = f" and {len(step) - len(spelled)} more" if len(step) > len(spelled) else ""
        rows = [";  ".join(spelled[i : i + SPELLED_A_LINE]) for i in range(0, len(spelled), SPELLED_A_LINE)]
        verb = "adds" if step[0].reduces else "keeps"
        each = self._amount(max(self._share(t) for t in step))
        head = f"<b>Step {moment.step + 1} of {len(self.steps)}</b>: {counted(len(step), 'message')} of {each}"
        return f"{head}; the receiver {verb} what comes<br>{'<br>'.join(rows)}{more}<br>{so_far}"

    def summary(self) -> str:
        lines = [f"{self.name}: {counted(len(self.steps), 'step')}."]
        for number, step in enumerate(self.steps[:MAX_SPELLED_STEPS], 1):
            each = self._amount(max(self._share(t) for t in step))
            moves = "; ".join(f"{t.src} to {t.dst} {self._chunks(t)}" for t in step[:MAX_SPELLED_TRANSFERS])
            more = f"; and {len(step) - MAX_SPELLED_TRANSFERS} more" if len(step) > MAX_SPELLED_TRANSFERS else ""
            lines.append(f"Step {number}, {'added' if step[0].reduces else 'kept'}, {each} each: {moves}{more}.")
        if len(self.steps) > MAX_SPELLED_STEPS:
            lines.append(f"And {len(self.steps) - MAX_SPELLED_STEPS} more steps.")
        total = sum((self._share(t) for step in self.steps for t in step), Fraction(0))
        return "\n".join([*lines, f"On the wire in all: {self._amount(total)}."])

    def _share(self, transfer: Transfer) -> Fraction:
        """Of one rank's payload."""
        return Fraction(0) if self.kind is SpanKind.BARRIER else Fraction(len(transfer.chunks), self.world_size)

    def _amount(self, share: Fraction) -> str:
        if not share:
            return "no payload"
        if share.denominator == 1:
            words = "the payload" if share == 1 else f"{share} × the payload"
        else:
            words = f"{share} of the payload"
        size = "" if self.payload_bytes is None else f" ({bytes_text(float(share * self.payload_bytes))})"
        return words + size

    def _chunks(self, transfer: Transfer) -> str:
        if len(transfer.chunks) == self.num_chunks and self.num_chunks > 1:
            return "all chunks"
        names = [self.chunk_name(chunk) for chunk in transfer.chunks]
        return f"chunk{'s' if len(names) > 1 else ''} {', '.join(names)}"

    def chunk_name(self, chunk: int) -> str:
        if self.kind is SpanKind.ALL_TO_ALL:
            src, dst = divmod(chunk, self.world_size)
            return f"{src}→{dst}"
        return f"{chunk}"


def _arrows(step: Step, progress: float) -> list[dict[str, object]]:
    """Ways from row to row within each column, side by side where one column has several; and a marker on each."""
    in_column: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in step:
        for chunk in transfer.chunks:
            in_column[chunk].append(transfer)
    way_x: list[float | None] = []
    way_y: list[float | None] = []
    here_x: list[float] = []
    here_y: list[float] = []
    for chunk, transfers in in_column.items():
        for place, transfer in enumerate(transfers):
            x = chunk - 0.36 + 0.72 * (place + 0.5) / len(transfers) if len(transfers) > 1 else chunk + 0.3
            way_x += [x, x, None]
            way_y += [transfer.src, transfer.dst, None]
            here_x.append(x)
            here_y.append(transfer.src + (transfer.dst - transfer.src) * progress)
    line = {"color": VERMILLION, "width": 2}
    return [
        {
            "type": "scatter", "x": way_x, "y": way_y, "mode": "lines+markers", "line": line, "hoverinfo": "skip",
            "marker": {"symbol": "arrow", "angleref": "previous", "color": VERMILLION,
                       "size": [0, 13, 0] * (len(way_x) // 3)},
        },
        {
            "type": "scatter", "x": here_x, "y": here_y, "mode": "markers", "hoverinfo": "skip",
            "marker": {"symbol": "square", "size": 13, "color": ORANGE, "line": {"color": OUTLINE, "width": 1.5}},
        },
    ]  # fmt: skip


def _contributors(counts: list[int]) -> str:
    """Whose data a copy holds: all of them up to four, then their number.

    >>> _contributors([1, 0, 1]), _contributors([0, 0]), _contributors([1] * 6), _contributors([2, 1])
    ('0+2', '', '6 ranks', '2×0+1')
    """
    held = [(rank, count) for rank, count in enumerate(counts) if count]
    if len(held) > 4 and all(count == 1 for _, count in held):
        return f"{len(held)} ranks"
    return "+".join(f"{rank}" if count == 1 else f"{count}×{rank}" for rank, count in held)


def _lay_out(fig: go.Figure, play: _Play) -> None:
    rows_px = max(play.world_size * (ROW_PX if play.world_size <= 8 else 30), 90)
    subtitle = "rows: ranks; columns: chunks of the payload; a cell names the ranks whose data it holds"
    most = min(max((len(step) for step in play.steps), default=0), MAX_SPELLED_TRANSFERS)
    bottom = CAPTION_LINE_PX * (2 + -(-most // SPELLED_A_LINE)) + 16
    fig.layout = base_layout(play.name, subtitle, rows_px + HEADER_PX + bottom)
    fig.layout.margin.update(t=HEADER_PX, b=bottom)
    chunks = range(play.num_chunks)
    common = {**AXIS_STYLE, "showgrid": False, "fixedrange": True}
    prefix = "" if play.num_chunks > 8 else "chunk "
    fig.layout.update(
        showlegend=False,
        xaxis={**common, "side": "top", "tickvals": list(chunks), "range": (-0.5, play.num_chunks - 0.5),
               "ticktext": [prefix + play.chunk_name(chunk) for chunk in chunks]},
        yaxis={**common, "tickvals": list(range(play.world_size)), "range": (play.world_size - 0.5, -0.5),
               "ticktext": [f"rank {rank}" for rank in range(play.world_size)]},
    )  # fmt: skip
