"""The sharding map: what is drawn in each rank's panel is what it holds, before, on the way and after."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vizkit as vk
from vizkit.errors import InvalidInputError
from vizkit.figures.mesh_cells import CELL_COLORS
from vizkit.figures.mesh_grid import MeshGrid
from vizkit.figures.sharding_panels import HEIGHT, LEFT, TOP, WIDTH
from vizkit.sharding import pieces, redistribution

PAIRS = [("S(0)", "R"), ("S(0)", "S(1)"), ("P", "R"), ("P", "S(0)"), ("R", "S(1)"), ("R", "P")]


def labels(fig: go.Figure) -> list[str]:
    return [step.label for step in fig.layout.sliders[0].steps]


def trace(traces: tuple, fig: go.Figure, name: str) -> go.Scatter:
    return traces[[trace.name for trace in fig.data].index(name)]


def areas(traces: tuple, fig: go.Figure, shape: tuple[int, int], mesh: vk.Mesh) -> np.ndarray:
    """By rank, how many elements of the tensor are covered with colour in its panel."""
    grid = MeshGrid.of(mesh, 8)
    covered = np.zeros((mesh.world_size, *shape), bool)
    for color in range(len(CELL_COLORS)):
        part = trace(traces, fig, f"pieces {color}")
        for x, y in zip(np.reshape(part.x, (-1, 6)), np.reshape(part.y, (-1, 6)), strict=True):
            columns = (x[None, :2] - grid.x[:, None] - LEFT) / WIDTH * shape[1]
            rows = (y[None, 1:3] - grid.y[:, None] - TOP) / HEIGHT * shape[0]
            inside = (np.concatenate([columns, rows], 1) > -0.01).all(1) & (columns[:, 1] < shape[1] + 0.01)
            (rank,) = np.flatnonzero(inside & (rows[:, 1] < shape[0] + 0.01))
            (left, right), (top, bottom) = np.rint(columns[rank]).astype(int), np.rint(rows[rank]).astype(int)
            covered[rank, top:bottom, left:right] = True
    return covered


@pytest.mark.parametrize("mesh", [vk.Mesh(tp=1), vk.Mesh(tp=2), vk.Mesh(tp=3), vk.Mesh(tp=8)], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_first_and_last_picture_cover_what_ranks_hold(pair: tuple[str, str], mesh: vk.Mesh):
    """Element for element, in each rank's panel; 5 × 3 leaves some ranks with less, or nothing."""
    shape = (5, 3)
    fig = vk.sharding_map(mesh, shape, *pair)
    last = fig.frames[-1].data if fig.frames else fig.data
    for traces, placed in ((fig.data, pair[0]), (last, pair[1])):
        found, covered = pieces(mesh, shape, placed), areas(traces, fig, shape, mesh)
        for rank in range(mesh.world_size):
            held = np.zeros(shape, bool)
            held[found.slices(rank)] = True
            assert (covered[rank] == held).all()


@pytest.mark.parametrize("pair", PAIRS[:4], ids=" to ".join)
def test_each_message_travels_once(pair: tuple[str, str]):
    """In all rounds together one outline for each part that a rank comes to need."""
    mesh, shape = vk.Mesh(tp=4), (8, 8)
    fig = vk.sharding_map(mesh, shape, *pair)
    (step,) = redistribution(mesh, shape, *pair)
    starts = [i for i, label in enumerate(labels(fig)) if "round" in label and label != labels(fig)[i - 1]]
    outlines = [len(trace(fig.frames[i].data, fig, "travelling").x) // 6 for i in starts]
    assert sum(outlines) == len(list(step.moves()))


def test_a_colour_stays_with_its_data():
    """After S(0) → S(1) each rank's columns show the four colours of the rows that they came from."""
    fig = vk.sharding_map(vk.Mesh(tp=4), (8, 8), "S(0)", "S(1)")
    assert [len(trace(fig.data, fig, f"pieces {i}").x) // 6 for i in range(7)] == [1, 1, 1, 1, 0, 0, 0]
    assert [len(trace(fig.frames[-1].data, fig, f"pieces {i}").x) // 6 for i in range(7)] == [4, 4, 4, 4, 0, 0, 0]


def test_partial_values_are_hatched_and_named():
    """Hatching and the word, beside the colour; and both end with the reduction."""
    fig = vk.sharding_map(vk.Mesh(tp=2), (4, 4), "P", "S(0)")
    assert len(trace(fig.data, fig, "partial").x)
    assert fig.data[-1].text[0] == "<b>rank 0</b><br>[:, :] partial"
    assert not len(trace(fig.frames[-1].data, fig, "partial").x)
    assert fig.frames[-1].data[-1].text[0] == "<b>rank 0</b><br>[0:2, :]"


def test_captions_name_collective_and_bytes():
    """Next before it begins, now while it runs, and the sum at the end."""
    fig = vk.sharding_map(vk.Mesh(dp=2, tp=4), (1000, 8), ["S(0)", "P"], ["S(0)", "R"])
    texts = [frame.layout.annotations[0].text for frame in fig.frames]
    assert texts[0] == (
        "dp S(0), tp P(sum): 2 distinct pieces, 16 kB a rank; hatched: summands, partial along tp<br>"
        "<b>Next: all-reduce along tp</b>, P(sum) → R<br>"
        "Payload 16 kB; on the wire 24 kB from each rank (ring)"
    )
    assert "<b>Now: all-reduce along tp</b>" in texts[1]
    assert texts[-1].endswith("<b>Done.</b> On the wire in all: 24 kB from each rank")


def test_steps_follow_one_another():
    fig = vk.sharding_map(vk.Mesh(dp=2, tp=2), (8, 4), ["S(0)", "S(0)"], ["R", "S(0)"])
    shown = list(dict.fromkeys(labels(fig)))
    assert shown == [
        "before: S(0), S(0)", "all-gather along tp, round 1 of 1", "between: S(0), R",
        "all-gather along dp, round 1 of 1", "between: R, R", "after: R, S(0)",
    ]  # fmt: skip


def test_every_frame_carries_the_same_traces():
    fig = vk.sharding_map(vk.Mesh(tp=4), (8, 8), "S(0)", "R")
    assert {frame.traces for frame in fig.frames} == {tuple(range(len(fig.data)))}


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8), (2, 2, 2, 8)], ids=str)
def test_any_number_of_dims(shape: tuple[int, ...]):
    """The dims that are cut are drawn; one dim alone runs across."""
    fig = vk.sharding_map(vk.Mesh(tp=4), shape, f"S({len(shape) - 1})")
    assert f"dim {len(shape) - 1} runs across" in fig.layout.title.subtitle.text
    assert fig.data[-1].text[1].endswith(f"{', '.join([*[':'] * (len(shape) - 1), '2:4'])}]")


def test_many_ranks_are_one_heat_map():
    """4,096 ranks: a cell a rank, coloured by piece, one trace in every frame, under 500 kB."""
    mesh = vk.Mesh(pp=4, dp=8, cp=16, tp=8)
    fig = vk.sharding_map(mesh, (4096, 4096), ["R", "S(0)", "R", "S(1)"], ["R", "S(0)", "R", "R"])
    assert [trace.type for trace in fig.data] == ["heatmap"]
    assert labels(fig) == ["before: R, S(0), R, S(1)", "after: R, S(0), R, R"]
    assert np.isfinite(np.asarray(fig.data[0].z)).sum() == mesh.world_size
    assert len(fig.to_json()) < 500_000


@given(st.sampled_from(PAIRS), st.integers(1, 8), st.integers(1, 6))
def test_words_list_each_ranks_piece_and_the_bytes(pair: tuple[str, str], num_ranks: int, size: int):
    mesh = vk.Mesh(tp=num_ranks)
    words = vk.describe(vk.sharding_map(mesh, (size, 4), *pair))
    for placed in pair:
        found = pieces(mesh, (size, 4), placed)
        assert all(f"rank {rank}: {found.text(rank)}" in words for rank in range(num_ranks))
    for step in redistribution(mesh, (size, 4), *pair):
        assert f"{step.action} along tp, {step.change}." in words


def test_words_in_full():
    assert vk.describe(vk.sharding_map(vk.Mesh(tp=2), (3, 2), "S(0)", "R", backend="gloo")) == (
        "A tensor of 3 × 2, 4 B an element, on Mesh(tp=2).\n"
        "tp S(0): 2 distinct pieces, 8 B to 16 B a rank.\n"
        "  rank 0: [0:2, :]\n  rank 1: [2:3, :]\n"
        "Step 1: all-gather along tp, S(0) → R. Payload 32 B; on the wire 16 B from each rank (ring).\n"
        "tp R: 1 distinct piece, 24 B a rank.\n"
        "  rank 0: [:, :]\n  rank 1: [:, :]"
    )


def test_refuses_what_the_model_refuses():
    with pytest.raises(InvalidInputError, match=r"^before='R': has 1, and Mesh\(dp=2, tp=2\) has 2 to place"):
        vk.sharding_map(vk.Mesh(dp=2, tp=2), (4, 4), ["R"], ["R", "R"])
    with pytest.raises(InvalidInputError, match=r"^after='P\(sum\)': no collective makes it of S\(0\)"):
        vk.sharding_map(vk.Mesh(tp=2), (4, 4), "S(0)", "P")
