"""Drawing a large mesh, against Plotly's own image of as many cells."""

from __future__ import annotations

import numpy as np
import plotly.express as px

import vizkit as vk
from tests.benchmarks.conftest import Compare, Row
from tests.benchmarks.test_figure_speed import timed

MESH = vk.Mesh(pp=4, dp=8, cp=16, tp=8)
REPEATS = 9
"""A first call imports, and one in a few meets a full garbage collection of the test process, which takes four times
as long as the call: of three repeats the median is one of those."""


def plotlys_own() -> str:
    """One picture of 64 × 64 cells with the rank in each: no groups, no axes to choose from."""
    ranks = np.arange(MESH.world_size).reshape(64, 64)
    return px.imshow(ranks % 7, text_auto=False, color_continuous_scale="Viridis").to_json()


def test_mesh_map_of_4096_ranks(compare: Compare) -> None:
    """Four axes with groups, hover and captions take at most three times one bare picture of as many cells."""
    ours_s, _ = timed(lambda: vk.mesh_map(MESH).to_json(), REPEATS)
    peer_s, _ = timed(plotlys_own, REPEATS)
    compare(Row("mesh map of 4,096 ranks, built and serialised", ours_s, peer_s, "plotly.express.imshow", "s", 3.0))


def test_sharding_map_of_4096_ranks(compare: Compare) -> None:
    """Two moments of an all-gather take at most five times one bare picture, with every rank's slices to hover over."""
    before, after = ["R", "S(0)", "R", "S(1)"], ["R", "S(0)", "R", "R"]
    ours_s, _ = timed(lambda: vk.sharding_map(MESH, (4096, 4096), before, after).to_json(), REPEATS)
    peer_s, _ = timed(plotlys_own, REPEATS)
    compare(Row("sharding map of 4,096 ranks, built and serialised", ours_s, peer_s, "plotly.express.imshow", "s", 5.0))
