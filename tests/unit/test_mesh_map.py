"""The mesh map: every rank in its place, coloured and numbered by its group; and the explorer that drives it."""

from __future__ import annotations

import json

import ipywidgets
import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vizkit as vk
from vizkit.errors import InvalidInputError
from vizkit.figures.mesh_cells import CELL_COLORS
from vizkit.figures.mesh_grid import MeshGrid
from vizkit.figures.mesh_map import group_numbers
from vizkit.widgets import mesh_explorer

AXES = ("pp", "dp", "cp", "tp")
MESHES = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(
    lambda sizes: vk.Mesh(**dict(zip(AXES[-len(sizes) :], sizes, strict=True)))
)
LARGE = vk.Mesh(pp=4, dp=8, cp=16, tp=8)


def cells(fig: go.Figure) -> np.ndarray:
    """Customdata of all ranks' cells, in the order of ranks; the first column is the rank."""
    facts = np.asarray(fig.data[0].customdata).reshape(-1, np.asarray(fig.data[0].customdata).shape[-1])
    colors = np.asarray(fig.data[0].z, float).ravel()
    present = facts[~np.isnan(colors)]
    return present[np.argsort(present[:, 0], kind="stable")]


class TestGrid:
    @given(MESHES)
    def test_no_two_ranks_share_a_cell(self, mesh: vk.Mesh):
        for widest in (8, 16):
            grid = MeshGrid.of(mesh, widest)
            assert len({*zip(grid.column.tolist(), grid.row.tolist(), strict=True)}) == mesh.world_size

    @pytest.mark.parametrize(
        ("mesh", "columns", "rows"),
        [
            (vk.Mesh(tp=1), 1, 1), (vk.Mesh(tp=8), 8, 1), (vk.Mesh(tp=64), 8, 8), (vk.Mesh(dp=2, tp=4), 4, 2),
            (vk.Mesh(pp=2, dp=3, tp=4), 8, 3), (vk.Mesh(pp=2, dp=3, cp=4, tp=5), 15, 8), (vk.Mesh(dp=1, tp=4), 4, 1),
            (vk.Mesh(dp=512, tp=8), 64, 64), (vk.Mesh(dp=8, tp=512), 64, 64), (vk.Mesh(tp=61), 11, 6), (LARGE, 64, 64),
        ],
        ids=str,
    )  # fmt: skip
    def test_axes_go_across_and_down_in_turn(self, mesh: vk.Mesh, columns: int, rows: int):
        """The innermost across; axes of one rank take no turn, and a long strip is wrapped."""
        grid = MeshGrid.of(mesh, 8)
        assert (len(grid.column_starts), len(grid.row_starts)) == (columns, rows)

    def test_blocks_of_the_outer_axis_stand_apart(self):
        """pp 2 × dp 2 × tp 2: two columns, a gap, two columns."""
        assert MeshGrid.of(vk.Mesh(pp=2, dp=2, tp=2), 8).column_starts.tolist() == [0, 1, 2.3, 3.3]


class TestMap:
    @pytest.mark.parametrize("sizes", [(4,), (2, 4), (2, 2, 2), (2, 1, 2, 2), (1,), (1, 1)], ids=str)
    def test_every_rank_says_its_group_along_every_axis(self, sizes: tuple[int, ...]):
        mesh = vk.Mesh(**dict(zip(AXES, sizes, strict=False)))
        for axis in mesh.names:
            fig = vk.mesh_map(mesh, axis)
            texts = {text for row in np.asarray(fig.data[0].text).tolist() for text in row if text}
            groups = mesh.groups(axis)
            assert texts == {
                f"<b>{rank}</b><br>group {number}<br> " for number, group in enumerate(groups) for rank in group
            }

    def test_ranks_of_one_group_have_one_colour(self):
        """And neighbours' groups another, up to seven groups."""
        mesh = vk.Mesh(dp=7, tp=3)
        colors = np.asarray(vk.mesh_map(mesh, "tp").data[0].z)
        assert (colors == colors[:, :1]).all()
        assert len({*colors[:, 0].tolist()}) == len(CELL_COLORS)

    def test_a_frame_for_each_axis(self):
        """The slider begins with the chosen axis, by default the innermost of more than one rank."""
        fig = vk.mesh_map(vk.Mesh(dp=2, tp=4, ep=1))
        assert [step.label for step in fig.layout.sliders[0].steps] == [
            "dp: 4 groups of 2", "tp: 2 groups of 4", "ep: 8 groups of 1",
        ]  # fmt: skip
        assert fig.layout.sliders[0].active == 1
        assert vk.mesh_map(vk.Mesh(dp=2, tp=4), "dp").layout.sliders[0].active == 0
        assert {frame.traces for frame in fig.frames} == {tuple(range(len(fig.data)))}

    def test_lines_join_the_ranks_of_a_group(self):
        """Along dp of 2 × 2: from rank 0's column down to rank 2's row, from rank 1's to rank 3's."""
        line = vk.mesh_map(vk.Mesh(dp=2, tp=2), "dp").data[1]
        x, y = (np.asarray(values).reshape(2, 3)[:, :2] for values in (line.x, line.y))
        assert np.floor(x).tolist() == [[0, 0], [1, 1]]
        assert np.floor(y).tolist() == [[0, 1], [0, 1]]

    @pytest.mark.parametrize("mesh", [vk.Mesh(dp=2, tp=4), vk.Mesh(dp=12, tp=2), LARGE], ids=str)
    def test_hovering_says_coordinates_and_groups(self, mesh: vk.Mesh):
        """The numbers that the template names are those of `Mesh.coordinates` and `Mesh.groups`."""
        fig = vk.mesh_map(mesh)
        facts = cells(fig)
        assert facts[:, 0].tolist() == list(range(mesh.world_size))
        for rank in (0, mesh.world_size // 2 + 1, mesh.world_size - 1):
            said = fig.data[0].hovertemplate
            for position in reversed(range(facts.shape[1])):
                said = said.replace(f"%{{customdata[{position}]}}", str(facts[rank, position]))
            for axis, place in mesh.coordinates(rank).items():
                group = mesh.group(axis, rank)
                assert f"{axis}={place}: group {group_numbers(mesh, axis)[rank]}, ranks " in said
                listed = (
                    ", ".join(map(str, group))
                    if len(group) <= (8 if mesh is not LARGE else 2)
                    else f"{group[0]} to {group[-1]}"
                )
                assert f"ranks {listed}" in said

    def test_many_ranks_are_one_heat_map(self):
        """No trace, shape or annotation a rank, no words in cells, and under 500 kB."""
        fig = vk.mesh_map(LARGE)
        assert len(fig.data) == 3
        assert len(fig.layout.annotations) < 20
        assert not fig.layout.shapes
        assert len(fig.to_json()) < 500_000

    def test_a_device_mesh_will_do(self):
        """Anything that has a DeviceMesh's `mesh` and `mesh_dim_names`."""

        class DeviceMesh:
            mesh = np.arange(4).reshape(2, 2)
            mesh_dim_names = ("dp", "tp")

        assert vk.describe(vk.mesh_map(DeviceMesh())) == vk.describe(vk.mesh_map(vk.Mesh(dp=2, tp=2)))

    def test_says_the_same_in_words(self):
        assert vk.describe(vk.mesh_map(vk.Mesh(dp=2, tp=2))) == (
            "Mesh(dp=2, tp=2): 4 ranks, the last axis varies fastest.\n"
            "Along dp, 2 groups of 2. 0: [0 2]  1: [1 3]\n"
            "Along tp, 2 groups of 2. 0: [0 1]  1: [2 3]"
        )

    def test_caption_says_what_colour_means(self):
        caption = vk.mesh_map(LARGE, "tp").layout.annotations[0].text
        assert caption.startswith(
            "<b>Colour: the group (g) along tp</b>, 512 groups of 8: ranks of one colour speak together; "
            "colours repeat after 7"
        )
        alone = vk.mesh_map(vk.Mesh(tp=1)).layout.annotations[0].text
        assert "each rank is alone, and nothing is sent" in alone

    def test_title_can_be_given(self):
        assert vk.mesh_map(vk.Mesh(tp=2), title="Ours").layout.title.text == "Ours"

    def test_refuses_an_unknown_axis_and_what_is_no_mesh(self):
        with pytest.raises(InvalidInputError, match=r"^axis='cp': Mesh\(dp=2, tp=2\) has no such axis; use dp or tp$"):
            vk.mesh_map(vk.Mesh(dp=2, tp=2), "cp")
        with pytest.raises(InvalidInputError, match=r"^mesh='int': must be a vk.Mesh or a DeviceMesh"):
            vk.mesh_map(8)


class TestExplorer:
    def test_controls_change_pictures_and_words(self):
        explorer = mesh_explorer()
        explorer.controls["tp"].value = 4
        explorer.controls["dp before"].value = "S(1)"
        assert explorer.words.startswith(
            "Mesh(dp=2, tp=4): 8 ranks. dp S(1), tp S(0) to dp R, tp R: "
            "all-gather along tp, 128 B of payload; all-gather along dp, 256 B of payload\n"
        )
        assert explorer.words.splitlines()[0] in explorer.summary.value
        assert "dp 2 × tp 4 = 8 ranks" in explorer.map.layout.title.subtitle.text

    def test_pictures_are_as_if_drawn_anew(self):
        """Whatever came before; also from panels to cells, which are other traces."""
        explorer = mesh_explorer()
        steps = {"tp": 3, "order": "tp × dp", "dim 0": 5, "tp after": "S(1)", "colour by": "dp", "dp": 1}
        for name, value in [*steps.items(), ("dp", 16), ("tp", 16), ("dp", 2)]:
            explorer.controls[name].value = value
            assert explorer.message.value == ""
            sizes = {axis: explorer.controls[axis].value for axis in explorer.controls["order"].value.split(" × ")}
            fresh = vk.mesh_map(vk.Mesh(**sizes), explorer.controls["colour by"].value)
            for shown, drawn in zip(explorer.map.data, fresh.data, strict=True):
                assert (
                    json.loads(go.Figure(shown).to_json())["data"][0]["z" if shown.type == "heatmap" else "x"]
                    == (json.loads(go.Figure(drawn).to_json())["data"][0]["z" if drawn.type == "heatmap" else "x"])
                )

    def test_the_moment_plays_the_redistribution(self):
        explorer = mesh_explorer()
        explorer.moment.value = explorer.moment.max
        assert explorer.moment_name.value == "after: R, R"
        assert "<b>Done.</b>" in explorer.tensor.layout.annotations[0].text
        explorer.controls["tp after"].value = "S(0)"
        assert (explorer.moment.value, explorer.moment_name.value) == (0, "nothing moves")

    def test_a_refusal_keeps_the_pictures(self):
        explorer = mesh_explorer()
        words = explorer.words
        explorer.controls["tp after"].value = "P(sum)"
        assert "no collective makes it of S(0); use" in explorer.message.value
        assert explorer.words == words
        explorer.controls["tp after"].value = "R"
        assert explorer.message.value == ""

    def test_controls_take_the_keyboard(self):
        """ipywidgets' own, each with a description."""
        controls = mesh_explorer().controls.values()
        assert {type(control) for control in controls} == {ipywidgets.IntSlider, ipywidgets.Dropdown}
        assert all(control.description for control in controls)

    def test_leaves_picture_and_words_where_no_kernel_answers(self):
        explorer = mesh_explorer(vk.Mesh(tp=2), (4,))
        bundle = explorer._repr_mimebundle_()
        assert bundle["text/plain"] == explorer.words
        assert bundle["application/vnd.plotly.v1+json"]["frames"]
        assert explorer.to_html().startswith("<!DOCTYPE html>")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"mesh": vk.Mesh(tp=32)}, r"^mesh=\(32,\): sliders hold up to 4 axes of 16; use vizkit.sharding_map$"),
            ({"shape": (128,)}, r"^shape=\(128,\): sliders hold up to 4 dims of 64; use vizkit.sharding_map$"),
            ({"before": ["P(max)", "R"]}, r"^dp before='P\(max\)': its menu has S\(0\), S\(1\), R, P\(sum\); use"),
        ],
    )
    def test_refuses_what_it_has_no_control_for(self, arguments: dict, message: str):
        with pytest.raises(InvalidInputError, match=message):
            mesh_explorer(**arguments)

    def test_refuses_meshes_that_no_picture_has_room_for(self):
        explorer = mesh_explorer(vk.Mesh(pp=4, dp=4, cp=4, tp=4), before=["R"] * 4)
        for axis in ("pp", "dp", "cp"):
            explorer.controls[axis].value = 16
        assert "the explorer draws up to 1,024 ranks; use vizkit.mesh_map for more" in explorer.message.value
