"""Play, pause and scrub: frames that move two layout shapes and touch nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from vizkit.errors import InvalidInputError
from vizkit.figures.theme import CLEAR, CURSOR, TEXT, VEIL

VEIL_SHAPE, CURSOR_SHAPE = 0, 1
"""Positions in `layout.shapes`. Plotly merges a frame's shapes one by one: shapes after these two stay as they are."""
PLAY_SECONDS = 8.0
CONTROLS_PX = 66
"""Height of the buttons and the slider, at the very bottom of a figure."""


def frame_times(duration: float, max_frames: int) -> np.ndarray:
    """Evenly spaced moments from 0 to `duration`, both included, `max_frames` in number."""
    if not (isinstance(max_frames, int) and max_frames >= 2):
        raise InvalidInputError.because(
            "max_frames", max_frames, "an animation has a first and a last frame", "use 2 or more"
        )
    return np.linspace(0, duration, max_frames)


def cursor_shapes(time: float, duration: float) -> list[dict[str, float]]:
    """What the veil over the future and the cursor become at `time`."""
    return [{"x0": time, "x1": duration}, {"x0": time, "x1": time}]


def add_cursor(fig: go.Figure, duration: float, times: np.ndarray, labels: list[str]) -> None:
    """Give `fig` the two shapes, a frame for each time, buttons and a slider; at first the whole trace is seen."""
    looks: list[dict[str, Any]] = [
        {"type": "rect", "fillcolor": VEIL, "line": {"width": 0}, "name": "veil"},
        {"type": "line", "line": {"color": CURSOR, "width": 2}, "name": "cursor"},
    ]
    everywhere = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "above"}
    places = cursor_shapes(duration, duration)
    shapes = [{**look, **everywhere, **place} for look, place in zip(looks, places, strict=True)]
    fig.layout.shapes = [*shapes, *fig.layout.shapes]
    frames = [{"name": f"{i}", "layout": {"shapes": cursor_shapes(t, duration)}} for i, t in enumerate(times.tolist())]
    add_frames(fig, frames, labels, redraw=False, frame_ms=round(1000 * PLAY_SECONDS / len(frames)))


def add_frames(
    fig: go.Figure, frames: list[dict], labels: list[str], *, redraw: bool, frame_ms: int, shown: int = -1
) -> None:
    """Give `fig` these frames, with buttons and a slider that names each by its label.

    `shown` is the frame to begin with. The controls stand under the bottom margin that the layout has by now;
    a single frame needs none.
    """
    if len(frames) < 2:
        return
    fig.frames = frames
    top = {"t": fig.layout.margin.b + 8}
    fig.layout.margin.b += CONTROLS_PX
    fig.layout.height += CONTROLS_PX
    how = {"mode": "immediate", "transition": {"duration": 0}}
    play = {"frame": {"duration": frame_ms, "redraw": redraw}, "fromcurrent": True, **how}
    jump = {"frame": {"duration": 0, "redraw": redraw}, **how}
    fig.layout.updatemenus = [
        {
            "type": "buttons",
            "direction": "left",
            "showactive": False,
            "x": 0, "xanchor": "left", "y": 0, "yanchor": "top",
            "pad": {**top, "l": 0, "r": 10},
            "bgcolor": CLEAR, "bordercolor": TEXT, "font": {"color": TEXT},
            "buttons": [
                {"label": "▶ Play", "method": "animate", "args": [None, play]},
                {"label": "❚❚ Pause", "method": "animate", "args": [[None], jump]},
            ],
        }
    ]  # fmt: skip
    fig.layout.sliders = [
        {
            "active": shown % len(frames),
            "x": 0, "len": 1, "y": 0, "yanchor": "top",
            "pad": {**top, "l": 175, "r": 10, "b": 10},
            "bgcolor": TEXT, "activebgcolor": CURSOR, "bordercolor": CLEAR, "tickcolor": CLEAR, "ticklen": 0,
            "minorticklen": 0,
            "font": {"color": CLEAR, "size": 1},
            "currentvalue": {"prefix": "", "font": {"size": 13, "color": TEXT}, "offset": 8, "xanchor": "left"},
            "transition": {"duration": 0},
            "steps": [
                {"label": label, "method": "animate", "args": [[frame["name"]], jump]}
                for frame, label in zip(frames, labels, strict=True)
            ],
        }
    ]  # fmt: skip


def show_frame(fig: go.Figure, frame: go.Frame) -> None:
    """Make `fig` look as `frame` says, in one update: what Plotly's own player does, where a kernel drives."""
    with fig.batch_update():
        for kind in ("shapes", "annotations"):
            for target, change in zip(fig.layout[kind], frame.layout[kind] or (), strict=False):
                target.update(change.to_plotly_json())
        for position, change in zip(frame.traces or (), frame.data, strict=True):
            fig.data[position].update(change.to_plotly_json())
