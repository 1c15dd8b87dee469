"""Links of two levels: fast ones inside a node, slower ones between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.hardware import Link
from vizkit.sizes import is_whole, whole_number


@dataclass(frozen=True)
class Links:
    """`inside` joins ranks of one node, `between` those of different nodes; ranks 0 to `ranks_per_node` − 1 are node 0.

    Every pair of ranks has a link of its own, as where each device has its own network card; where a node's ranks share
    one card, `crossing_bytes` says what it has to carry. Raises `InvalidInputError` for what are no links, for ranks
    below 1, and where `inside` is slower than `between`.

    >>> links = Links(inside=Link(1e-6, 1e11), between=Link(20e-6, 1e9), ranks_per_node=4)
    >>> str(links.joining([0, 3])), str(links.joining([3, 4]))
    ('1 µs + bytes / 100 GB/s', '20 µs + bytes / 1 GB/s')
    """

    inside: Link
    between: Link
    ranks_per_node: int

    def __post_init__(self) -> None:
        for name in ("inside", "between"):
            if not isinstance(link := getattr(self, name), Link):
                raise InvalidInputError.because(name, link, "must be a vk.Link", "use vk.Link(20e-6, 10e9)")
        object.__setattr__(self, "ranks_per_node", whole_number("ranks_per_node", self.ranks_per_node))
        fast, slow = self.inside, self.between
        if fast.latency_s > slow.latency_s or fast.bandwidth_bytes_per_s < slow.bandwidth_bytes_per_s:
            raise InvalidInputError.because(
                "inside", str(fast), f"is slower than between, {slow}", "give the faster link to the ranks of a node"
            )

    def joining(self, ranks: Sequence[int]) -> Link:
        """The slowest link among these ranks.

        In each step of a ring some message takes that link, so that a ring's time by it is exact; for a tree, which
        takes it in some steps only, it is a bound from above.
        """
        whole = isinstance(ranks, (Sequence, np.ndarray)) and all(is_whole(rank) and rank >= 0 for rank in ranks)
        if not whole:
            raise InvalidInputError.because("ranks", ranks, "must be numbers of ranks, from 0 on", "use ranks=[0, 1]")
        return self.inside if len({rank // self.ranks_per_node for rank in ranks}) <= 1 else self.between

    def crossing_bytes(self, wire_bytes: np.ndarray) -> int:
        """What goes from node to node, of bytes from rank to rank (`vk.metrics.traffic(trace).wire_bytes`).

        >>> Links(Link(), Link(), ranks_per_node=2).crossing_bytes(np.ones((4, 4), int))
        8
        """
        numbers = np.asarray(wire_bytes)
        if numbers.ndim != 2 or len(set(numbers.shape)) != 1 or numbers.dtype.kind not in "iuf":
            raise InvalidInputError.because(
                "wire_bytes",
                wire_bytes,
                "must have a row and a column of bytes for each rank",
                "use vk.metrics.traffic(trace).wire_bytes",
            )
        if not (np.isfinite(numbers) & (numbers >= 0)).all():
            raise InvalidInputError.because(
                "wire_bytes", numbers.min(), "must be finite and not negative", "use bytes from 0 on"
            )
        node = np.arange(len(numbers)) // self.ranks_per_node
        return int(numbers[node[:, None] != node[None, :]].sum())

    def __str__(self) -> str:
        return f"{self.inside} inside nodes of {self.ranks_per_node}, {self.between} between them"
