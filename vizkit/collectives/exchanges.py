"""What exchanging gradients or parameters puts on the wire, all ranks together: a formula for each way.

Each is for ranks in nodes of `ranks_per_node`, rank by rank, and rings in the order of ranks, as gloo runs them. Chunks
are counted as even, which they are where the ranks divide the elements; else a call's chunks differ by a byte or so, of
which `crossing_bytes` may miss a few; `total_bytes` is exact either way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vizkit.collectives.backends import algorithm_for
from vizkit.collectives.movements import Algorithm
from vizkit.sizes import divides, not_negative, whole_number
from vizkit.trace import SpanKind

SCALE_BYTES = 4
"""A block's scale is fp32."""
FP32_BYTES = 4


@dataclass(frozen=True)
class Moved:
    """Bytes that all ranks send: `total_bytes`, and of those `crossing_bytes` from node to node.

    >>> 2 * Moved(600, 200) + Moved(8, 0)
    Moved(total_bytes=1208, crossing_bytes=400)
    """

    total_bytes: float = 0
    crossing_bytes: float = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.total_bytes + other.total_bytes, self.crossing_bytes + other.crossing_bytes)

    def __mul__(self, times: float) -> Moved:
        return Moved(self.total_bytes * times, self.crossing_bytes * times)

    __rmul__ = __mul__


@dataclass(frozen=True)
class Nodes:
    """`world_size` ranks in nodes of `ranks_per_node`; raises `InvalidInputError` where some node would be smaller.

    >>> Nodes(8, 4).count
    2
    """

    world_size: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        whole_number("world_size", self.world_size)
        whole_number("ranks_per_node", self.ranks_per_node)
        divides("world_size", self.world_size, "ranks_per_node", self.ranks_per_node)

    @property
    def count(self) -> int:
        return self.world_size // self.ranks_per_node

    def ring(self, bytes_per_edge: float) -> Moved:
        """A ring over all ranks, whose edges carry that much each: one of a node's edges leaves it."""
        edges = self.world_size if self.world_size > 1 else 0
        return Moved(edges * bytes_per_edge, self.count * bytes_per_edge if self.count > 1 else 0)

    def all_to_all(self, bytes_per_pair: float) -> Moved:
        n, g = self.world_size, self.ranks_per_node
        return Moved(n * (n - 1) * bytes_per_pair, n * (n - g) * bytes_per_pair)


def all_reduce(nodes: Nodes, payload_bytes: float) -> Moved:
    """A ring all-reduce: each edge carries 2(n−1)/n of the payload, so all ranks together send 2(n−1) payloads.

    >>> all_reduce(Nodes(4, 2), 1000)
    Moved(total_bytes=6000.0, crossing_bytes=3000.0)
    """
    n = nodes.world_size
    return nodes.ring(2 * (n - 1) * not_negative("payload_bytes", payload_bytes, "give a tensor's bytes") / n)


def reduce_scatter(nodes: Nodes, payload_bytes: float, backend: str = "gloo") -> Moved:
    """(n−1)/n of the payload on each edge of the ring; with gloo, which runs it as an all-reduce, twice that."""
    whole = all_reduce(nodes, payload_bytes)
    if algorithm_for(SpanKind.REDUCE_SCATTER, backend) is Algorithm.VIA_ALL_REDUCE:
        return whole
    return 0.5 * whole


def all_gather(nodes: Nodes, part_bytes: float) -> Moved:
    """Each edge of the ring carries n−1 parts, one of each rank but the receiver's own."""
    return nodes.ring((nodes.world_size - 1) * not_negative("part_bytes", part_bytes, "give a part's bytes"))


def hierarchical_all_reduce(
    nodes: Nodes, num_elements: int, element_bytes: int = FP32_BYTES, backend: str = "gloo"
) -> Moved:
    """Reduce-scatter inside each node, all-reduce of each part between nodes, all-gather inside.

    Between m nodes of g ranks each rank sends 2(m−1)/m of its part, 1/g of the payload S: 2(m−1)·S cross in all, where
    one ring over all n ranks has 2m(n−1)/n·S. The payload is filled up to a multiple of g elements.

    >>> hierarchical_all_reduce(Nodes(4, 2), 250, backend="nccl")
    Moved(total_bytes=6000.0, crossing_bytes=2000.0)
    >>> hierarchical_all_reduce(Nodes(4, 2), 250)     # gloo's reduce-scatter is an all-reduce
    Moved(total_bytes=8000.0, crossing_bytes=2000.0)
    """
    m, g = nodes.count, nodes.ranks_per_node
    inside = Nodes(g, g)
    part_bytes = math.ceil(num_elements / g) * element_bytes
    in_node = reduce_scatter(inside, part_bytes * g, backend) + all_gather(inside, part_bytes)
    return m * in_node + g * all_reduce(Nodes(m, 1), part_bytes)


def packed_bytes(num_elements: int, block: int) -> int:
    """Elements in int8, in whole blocks of `block`, each with an fp32 scale.

    >>> packed_bytes(1000, 256) / (1000 * 4)
    0.26
    """
    whole_number("block", block)
    return math.ceil(num_elements / block) * (block + SCALE_BYTES)


def quantised_all_gather(nodes: Nodes, num_elements: int, block: int) -> Moved:
    """An all-gather of `num_elements` of each rank, packed."""
    return all_gather(nodes, packed_bytes(num_elements, block))


def quantised_all_reduce(nodes: Nodes, num_elements: int, block: int) -> Moved:
    """An all-to-all of packed shares, which each rank adds up, and an all-gather of the packed sums.

    A rank's share has ⌈E/(nB)⌉ blocks of E elements: 2n(n−1) such shares are sent in all, a quarter of the bytes of an
    fp32 all-reduce, plus scales and what fills the last blocks.

    >>> quantised_all_reduce(Nodes(4, 2), 4096, 256).total_bytes / all_reduce(Nodes(4, 2), 4 * 4096).total_bytes
    0.25390625
    """
    share = packed_bytes(math.ceil(num_elements / nodes.world_size), block)
    return nodes.all_to_all(share) + all_gather(nodes, share)


def power_sgd_elements(shapes: Iterable[Sequence[int]], rank: int, min_compression_rate: float = 2) -> int:
    """How many elements PowerSGD all-reduces for tensors of these shapes (Vogels et al., 2019, arXiv:1905.13727).

    A tensor is a matrix of its first dim by all others, a × b, and becomes r(a + b) elements, with r at most a and b,
    where that is fewer than ab by more than `min_compression_rate`, as in `torch.distributed`'s hook. Raises
    `InvalidInputError` for a rank below 1.

    >>> power_sgd_elements([(64, 512), (64,), (10, 64)], rank=2)
    1364
    """
    whole_number("rank", rank)
    return sum(_power_sgd(shape, rank, min_compression_rate) for shape in shapes)


def _power_sgd(shape: Sequence[int], rank: int, min_compression_rate: float) -> int:
    rows, all_elements = (shape[0] if shape else 1), math.prod(shape)
    columns = all_elements // rows if rows else 0
    compressed = min(rows, columns, rank) * (rows + columns)
    return compressed if compressed * min_compression_rate < all_elements else all_elements
