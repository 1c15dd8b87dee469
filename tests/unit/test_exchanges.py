"""Bytes of each way to exchange: formulas against what the algorithms' messages add up to, rank by rank."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from vizkit import InvalidInputError, Link
from vizkit.collectives import algorithm_for, wire_bytes
from vizkit.collectives.exchanges import (
    Moved,
    Nodes,
    all_gather,
    all_reduce,
    hierarchical_all_reduce,
    packed_bytes,
    power_sgd_elements,
    quantised_all_gather,
    quantised_all_reduce,
    reduce_scatter,
)
from vizkit.links import Links

SHAPES = [(1, 1), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (16, 8)]
"""World size and ranks in a node."""


class Wire:
    """Bytes from rank to rank, added up call by call from the algorithms' own messages."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.matrix = np.zeros((nodes.world_size, nodes.world_size), np.int64)

    def call(self, kind: str, payload_bytes: int, backend: str, *groups: range) -> None:
        for group in groups or (range(self.nodes.world_size),):
            sent = wire_bytes(kind, algorithm_for(kind, backend), len(group), payload_bytes)
            self.matrix[np.ix_(group, group)] += sent

    @property
    def moved(self) -> Moved:
        crossing = Links(Link(), Link(), self.nodes.ranks_per_node).crossing_bytes(self.matrix)
        return Moved(int(self.matrix.sum()), crossing)


def groups_inside(nodes: Nodes) -> list[range]:
    g = nodes.ranks_per_node
    return [range(first, first + g) for first in range(0, nodes.world_size, g)]


def groups_between(nodes: Nodes) -> list[range]:
    return [range(place, nodes.world_size, nodes.ranks_per_node) for place in range(nodes.ranks_per_node)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_rings_by_formula_and_by_messages(shape: tuple[int, int], backend: str) -> None:
    """All-reduce, reduce-scatter and all-gather, in all and from node to node; ranks divide the payload."""
    nodes, payload = Nodes(*shape), 48 * 16
    for kind, formula in {
        "all_reduce": all_reduce(nodes, payload),
        "reduce_scatter": reduce_scatter(nodes, payload, backend),
        "all_gather": all_gather(nodes, payload // nodes.world_size),
    }.items():
        wire = Wire(nodes)
        wire.call(kind, payload, backend)
        assert wire.moved == formula, kind


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("num_elements", [0, 1, 5, 48 * 16])
def test_a_hierarchical_all_reduce_is_its_three_steps(shape: tuple[int, int], backend: str, num_elements: int) -> None:
    """Total to the byte for any length; what crosses too where the ranks divide the elements."""
    nodes, wire = Nodes(*shape), Wire(Nodes(*shape))
    part_bytes = math.ceil(num_elements / nodes.ranks_per_node) * 4
    wire.call("reduce_scatter", part_bytes * nodes.ranks_per_node, backend, *groups_inside(nodes))
    wire.call("all_reduce", part_bytes, backend, *groups_between(nodes))
    wire.call("all_gather", part_bytes * nodes.ranks_per_node, backend, *groups_inside(nodes))
    formula = hierarchical_all_reduce(nodes, num_elements, 4, backend)
    assert wire.moved == Moved(round(formula.total_bytes), round(formula.crossing_bytes))


@pytest.mark.parametrize("m, g", [(2, 2), (2, 8), (4, 4), (16, 8)])
def test_hierarchy_saves_what_the_formulas_say_between_nodes(m: int, g: int) -> None:
    """2(m−1)·S cross in place of 2m(n−1)/n·S."""
    nodes, payload = Nodes(m * g, g), 4 * 1024 * m * g
    n = m * g
    assert hierarchical_all_reduce(nodes, payload // 4).crossing_bytes == 2 * (m - 1) * payload
    assert all_reduce(nodes, payload).crossing_bytes == 2 * m * (n - 1) / n * payload


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_elements, block", [(1, 4), (4096, 256), (1000, 7)])
def test_a_quantised_all_reduce_is_its_two_steps(shape: tuple[int, int], num_elements: int, block: int) -> None:
    nodes, wire = Nodes(*shape), Wire(Nodes(*shape))
    share = packed_bytes(math.ceil(num_elements / nodes.world_size), block)
    wire.call("all_to_all", share * nodes.world_size, "gloo")
    wire.call("all_gather", share * nodes.world_size, "gloo")
    assert quantised_all_reduce(nodes, num_elements, block) == wire.moved
    gathered = Wire(nodes)
    gathered.call("all_gather", packed_bytes(num_elements, block) * nodes.world_size, "gloo")
    assert quantised_all_gather(nodes, num_elements, block) == gathered.moved


@pytest.mark.parametrize(
    "num_elements, block, expected", [(0, 256, 0), (1, 256, 260), (256, 256, 260), (257, 256, 520), (10, 1, 50)]
)
def test_packed_bytes_are_whole_blocks_and_their_scales(num_elements: int, block: int, expected: int) -> None:
    assert packed_bytes(num_elements, block) == expected


@pytest.mark.parametrize("rank", [1, 2, 8, 100])
@pytest.mark.parametrize("shape", [(64, 512), (32, 16, 3, 3), (16, 1, 3, 3), (10,), (10, 64), (3, 3), (1, 500)])
def test_what_power_sgd_compresses_is_what_torch_does(shape: tuple[int, ...], rank: int) -> None:
    """Against torch's own decision for the matrix that its hook makes of a tensor."""
    rows, columns = torch.empty(shape).view(shape[0], -1).shape
    low = min(rows, columns, rank)
    compressed, before, after = powerSGD_hook._should_compress(rows, columns, low, 2)
    assert power_sgd_elements([shape], rank) == (after if compressed else before)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: Nodes(6, 4),
            "ranks_per_node=4: does not divide world_size=6; use ranks_per_node=3 or ranks_per_node=6",
        ),
        (lambda: Nodes(0, 1), "world_size=0: must be a whole number, at least 1; use world_size=1"),
        (lambda: packed_bytes(8, 0), "block=0: must be a whole number, at least 1; use block=1"),
        (lambda: power_sgd_elements([(2, 2)], 0), "rank=0: must be a whole number, at least 1; use rank=1"),
        (
            lambda: all_reduce(Nodes(2, 1), -1),
            "payload_bytes=-1: must be finite and not negative; give a tensor's bytes",
        ),
    ],
)
def test_what_is_refused(call, message: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        call()
    assert str(refusal.value) == message
