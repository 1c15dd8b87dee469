"""A mesh and a tensor on it, drawn anew at each move of a slider: sizes and order of the axes, and placements."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any

import ipywidgets

from vizkit.errors import InvalidInputError
from vizkit.figures.animation import show_frame
from vizkit.figures.describe import counted, describe
from vizkit.figures.html import to_html
from vizkit.figures.mesh_map import mesh_map
from vizkit.figures.redraw import redraw, widget_of
from vizkit.figures.sharding_map import sharding_map
from vizkit.mesh import Mesh
from vizkit.sharding import Placements, check_placements, check_shape, redistribution
from vizkit.units import bytes_text
from vizkit.widgets.player import PLOTLY_MIME_TYPE
from vizkit.widgets.words import preformatted

if TYPE_CHECKING:
    import plotly.graph_objects as go

MAX_AXIS, MAX_AXES, MAX_DIM = 16, 4, 64
MAX_WORLD_SIZE = 1024
TIMES = " × "


def mesh_explorer(
    mesh: Mesh | object | None = None,
    shape: Sequence[int] = (8, 8),
    before: Placements | None = None,
    after: Placements | None = None,
) -> MeshExplorer:
    """Sliders for the sizes of a mesh's axes and of a tensor's dims, menus for their order and for the placements.

    Above, the ranks by group along the chosen axis; below, the piece that each rank holds before and after, and the
    collectives and bytes of the way from one to the other in words. Begins with `Mesh(dp=2, tp=2)`, the tensor cut
    along the last axis, then whole. Needs a kernel; `to_html` gives the present pictures without one. Raises
    `InvalidInputError` for over four axes or dims, sizes over the sliders' and what `vizkit.sharding_map` refuses.

    >>> explorer = mesh_explorer()
    >>> explorer.controls["tp"].value = 4
    >>> explorer.words.splitlines()[0]
    'Mesh(dp=2, tp=4): 8 ranks. dp R, tp S(0) to dp R, tp R: all-gather along tp, 256 B of payload'
    """
    mesh = Mesh(dp=2, tp=2) if mesh is None else Mesh.of(mesh)
    sizes = check_shape(shape)
    for name, found in (("mesh", mesh.sizes), ("shape", sizes)):
        if len(found) > MAX_AXES or max(found) > (MAX_AXIS if name == "mesh" else MAX_DIM):
            limit = f"up to {MAX_AXES} axes of {MAX_AXIS}" if name == "mesh" else f"up to {MAX_AXES} dims of {MAX_DIM}"
            raise InvalidInputError.because(name, tuple(found), f"sliders hold {limit}", "use vizkit.sharding_map")
    start = ["R"] * (len(mesh.names) - 1) + ["S(0)"] if before is None else before
    placed = [
        {axis: str(placement) for axis, placement in zip(mesh.names, check_placements(mesh, sizes, side), strict=True)}
        for side in (start, ["R"] * len(mesh.names) if after is None else after)
    ]
    return MeshExplorer(mesh, sizes, *placed)


class MeshExplorer(ipywidgets.VBox):
    """The explorer; `controls` by name, `map`, `tensor` (the pictures), `moment`, `summary` and `message` are parts."""

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], before: Mapping[str, str], after: Mapping[str, str]) -> None:
        self._num_dims = len(shape)
        self.controls = _controls(mesh, shape, before, after)
        self._figures, self.words = self._computed()
        self._drawn = [_still(figure) for figure in self._figures]
        self.map, self.tensor = (widget_of(picture) for picture in self._drawn)
        self.summary = ipywidgets.HTML(preformatted(self.words))
        self.message = ipywidgets.HTML("")
        self.moment = ipywidgets.IntSlider(
            description="moment", readout=False, style=_STYLE, layout={"width": "36em"}, max=self._last_moment
        )
        self.moment_name = ipywidgets.Label(self._moment_text(0))
        self.moment.observe(self._moment_changed, "value")
        for control in self.controls.values():
            control.observe(self._settings_changed, "value")
        panel = ipywidgets.Box(list(self.controls.values()), layout={"flex_flow": "row wrap"})
        playing = ipywidgets.HBox([self.moment, self.moment_name])
        super().__init__([panel, self.message, self.summary, self.map, playing, self.tensor])

    def to_html(self) -> str:
        """The present pictures as one page, offline and without a kernel; the redistribution plays."""
        return to_html(self._figures)

    def _computed(self) -> tuple[list[go.Figure], str]:
        """Both figures and the words for the controls as they stand; raises `InvalidInputError` where they clash."""
        value = {name: control.value for name, control in self.controls.items()}
        order = value["order"].split(TIMES)
        shape = tuple(value[f"dim {dim}"] for dim in range(self._num_dims))
        before, after = ([value[f"{axis} {when}"] for axis in order] for when in ("before", "after"))
        sizes = {axis: value[axis] for axis in order}
        if math.prod(sizes.values()) > MAX_WORLD_SIZE:
            raise InvalidInputError.because(
                "mesh", sizes, f"the explorer draws up to {MAX_WORLD_SIZE:,} ranks", "use vizkit.mesh_map for more"
            )
        mesh = Mesh(**sizes)
        figures = [mesh_map(mesh, value["colour by"]), sharding_map(mesh, shape, before, after)]
        sides = (", ".join(f"{axis} {p}" for axis, p in zip(order, side, strict=True)) for side in (before, after))
        doings = [
            f"{step.action} along {step.axis}"
            + (f", {bytes_text(max(step.payload_bytes))} of payload" if step.kind is not None else "")
            for step in redistribution(mesh, shape, before, after)
        ]
        head = f"{mesh}: {counted(mesh.world_size, 'rank')}. {' to '.join(sides)}: {'; '.join(doings) or 'no change'}"
        return figures, "\n".join([head, *map(describe, figures)])

    def _settings_changed(self, _: dict[str, Any]) -> None:
        try:
            figures, words = self._computed()
        except InvalidInputError as refusal:
            self.message.value = f'<span role="alert"><b>Not drawn:</b> {html.escape(str(refusal))}</span>'
            return
        self.message.value = ""
        self.moment.value = 0  # the pictures are then as they were drawn
        self._figures, self.words = figures, words
        self.summary.value = preformatted(words)
        drawn = [_still(figure) for figure in figures]
        for widget, old, new in zip((self.map, self.tensor), self._drawn, drawn, strict=True):
            redraw(widget, old, new)
        self._drawn = drawn
        self.moment.max = self._last_moment
        self.moment_name.value = self._moment_text(0)

    def _moment_changed(self, change: dict[str, Any]) -> None:
        self.moment_name.value = self._moment_text(change["new"])
        if self._last_moment:
            show_frame(self.tensor, self._figures[1].frames[change["new"]])

    @property
    def _last_moment(self) -> int:
        return max(len(self._figures[1].frames) - 1, 0)

    def _moment_text(self, moment: int) -> str:
        sliders = self._figures[1].layout.sliders
        return str(sliders[0].steps[moment].label) if sliders else "nothing moves"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and what shows where no kernel answers: the tensor's picture, and the words."""
        return {
            **super()._repr_mimebundle_(**kwargs),
            "text/plain": self.words,
            "text/html": preformatted(self.words),
            PLOTLY_MIME_TYPE: json.loads(self._figures[1].to_json()),
        }


_STYLE = {"description_width": "7em"}


def _controls(
    mesh: Mesh, shape: tuple[int, ...], before: Mapping[str, str], after: Mapping[str, str]
) -> dict[str, ipywidgets.Widget]:
    """Sliders by axis and by "dim 0", menus "order" and "colour by", and menus by "tp before" and "tp after"."""
    common = {"style": _STYLE, "layout": {"width": "18em"}}
    placements = [*(f"S({dim})" for dim in range(len(shape))), "R", "P(sum)"]
    controls: dict[str, ipywidgets.Widget] = {
        axis: ipywidgets.IntSlider(value=size, min=1, max=MAX_AXIS, description=axis, **common)
        for axis, size in mesh.axes.items()
    }
    orders = [TIMES.join(order) for order in permutations(mesh.names)]
    menus = {
        "order": (orders, orders[0]),
        "colour by": (list(mesh.names), mesh.names[-1]),
        **{f"{axis} before": (placements, before[axis]) for axis in mesh.names},
        **{f"{axis} after": (placements, after[axis]) for axis in mesh.names},
    }
    for name, (options, value) in menus.items():
        if value not in options:
            raise InvalidInputError.because(
                name, value, f"its menu has {', '.join(options)}", "use vizkit.sharding_map"
            )
        controls[name] = ipywidgets.Dropdown(options=options, value=value, description=name, **common)
    for dim, size in enumerate(shape):
        controls[f"dim {dim}"] = ipywidgets.IntSlider(
            value=size, min=1, max=MAX_DIM, description=f"dim {dim}", **common
        )
    return controls


def _still(figure: go.Figure) -> dict[str, Any]:
    """The first picture as `redraw` compares it, without Plotly's controls, which its widget does not have."""
    content = figure.to_plotly_json()
    layout = {name: part for name, part in content["layout"].items() if name not in ("sliders", "updatemenus")}
    return {"data": [{"name": None, "yaxis": "y", **trace} for trace in content["data"]], "layout": layout}
