"""Devices in nodes, and the two levels of links between them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.hardware.device import Device
from vizkit.hardware.link import Link
from vizkit.sizes import whole_number

_PCIE, _ETHERNET = Link(10e-6, 10e9), Link(30e-6, 1.1e9)
MOST_DEVICES = 1_000_000_000
Count = int | np.ndarray
Links = tuple[np.ndarray, np.ndarray]
"""Latencies in seconds, bandwidths in bytes a second."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`num_nodes` nodes of `devices_per_node` equal devices.

    `inside` is what a device gets in a collective inside its node, one direction (nccl-tests' bus bandwidth), `between`
    what one network card gets, of which a node has `links_between` (None: one for each device), shared by its devices.

    Three lines make a cluster of one's own:

    >>> gpu = Device(name="mine", peak_flops_per_s=100e12, memory_bytes=24e9, memory_bandwidth_bytes_per_s=1e12)
    >>> pcie, ethernet = Link(10e-6, 20e9), Link(30e-6, 1.1e9)
    >>> cluster = Cluster(device=gpu, devices_per_node=4, num_nodes=2, inside=pcie, between=ethernet, links_between=1)
    >>> print(cluster)
    2 nodes × 4 mine; inside a node 10 µs + bytes / 20 GB/s, between nodes 1 × (30 µs + bytes / 1.1 GB/s)

    Raises `InvalidInputError` for what is none of these.
    """

    device: Device
    devices_per_node: int = 1
    num_nodes: int = 1
    inside: Link = _PCIE
    between: Link = _ETHERNET
    links_between: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.device, Device):
            raise InvalidInputError.because("device", self.device, "must be a vk.hardware.Device", "make one")
        for name in ("devices_per_node", "num_nodes", "links_between"):
            value = getattr(self, name)
            if not (value is None and name == "links_between"):
                object.__setattr__(self, name, whole_number(name, value))
        most = "num_nodes" if self.num_nodes > self.devices_per_node else "devices_per_node"
        for name, value in ((most, self.num_devices), ("links_between", self.links_between or 1)):
            if value > MOST_DEVICES:
                raise InvalidInputError.because(
                    name, getattr(self, name), f"a cluster has {MOST_DEVICES:,} at most, of all nodes", "use fewer"
                )
        for name in ("inside", "between"):
            if not isinstance(getattr(self, name), Link):
                raise InvalidInputError.because(
                    name, getattr(self, name), "must be a vk.Link", "use vk.Link(latency_s=5e-6)"
                )

    @cached_property
    def num_devices(self) -> int:
        return self.devices_per_node * self.num_nodes

    @property
    def share_between_bytes_per_s(self) -> float:
        """What one device has of its node's network cards when all use them at once."""
        cards = self.devices_per_node if self.links_between is None else self.links_between
        return self.between.bandwidth_bytes_per_s * cards / self.devices_per_node

    def of(self, num_devices: int) -> Cluster:
        """So many of these devices: whole nodes where there are more than one.

        Raises `InvalidInputError` where they fill no whole nodes.

        >>> from vizkit.hardware.presets import dgx_a100
        >>> dgx_a100().of(64).num_nodes, dgx_a100().of(2).devices_per_node
        (8, 2)
        """
        number, node = whole_number("num_devices", num_devices), self.devices_per_node
        if number <= node:
            cards = None if self.links_between is None else max(self.links_between * number // node, 1)
            return dataclasses.replace(self, devices_per_node=number, num_nodes=1, links_between=cards)
        if number % node:
            near = " or ".join(str(number // node * node + more) for more in (0, node))
            raise InvalidInputError.because(
                "num_devices", number, f"fill no whole nodes of {node}", f"use num_devices={near}"
            )
        return dataclasses.replace(self, num_nodes=number // node)

    def members_in_node(self, stride: Count, size: Count) -> np.ndarray:
        """How many of a group's `size` ranks, each `stride` ranks after the one before, share a node.

        Of a group that fills no whole nodes, the fewest that are together anywhere.

        >>> from vizkit.hardware.presets import dgx_a100
        >>> dgx_a100(num_nodes=4).members_in_node(1, 8), dgx_a100(num_nodes=4).members_in_node(2, 16)
        (array(8), array(4))
        """
        strides, sizes = (np.asarray(numbers, np.int64) for numbers in (stride, size))
        node, span = self.devices_per_node, strides * sizes
        if self.num_nodes == 1:
            return sizes
        is_whole = (span <= node) & (node % np.minimum(span, node) == 0)
        together = np.maximum(np.gcd(span, node) // strides, 1)
        return np.where(is_whole, sizes, np.minimum(together, np.maximum(sizes - 1, 1)))

    def link_of_group(self, stride: int, size: int) -> Link:
        """The link of each rank in a ring over this group, all such groups speaking at once.

        A ring inside a node has the link inside. One over several nodes enters and leaves each once, through the shares
        of the network cards of those of its ranks that are there, and is no faster than the link inside.

        >>> from vizkit.hardware.presets import dgx_a100
        >>> print(dgx_a100(num_nodes=4).link_of_group(stride=8, size=4))
        10 µs + bytes / 12.6 GB/s
        """
        latency, bandwidth = self.ring(stride, size)
        return Link(float(latency), float(bandwidth))

    def ring(self, stride: Count, size: Count) -> Links:
        """The same for arrays of groups: seconds of latency, bytes a second."""
        members = self.members_in_node(stride, size)
        return self._links(members >= size, members * self.share_between_bytes_per_s, members > 1)

    def exchange(self, stride: Count, size: Count) -> Links:
        """For all-to-alls, where each rank sends to the others outside its node through its own share of the cards."""
        members = self.members_in_node(stride, size)
        inside = members >= size
        outside = np.where(inside, 1, np.subtract(size, members))
        through = self.share_between_bytes_per_s * np.maximum(np.subtract(size, 1), 1) / outside
        return self._links(inside, through, members > 1)

    def neighbours(self, stride: Count, size: Count) -> Links:
        """For messages from each rank to the next, through its own share of the cards where they leave the node."""
        inside = self.members_in_node(stride, size) >= size
        return self._links(inside, np.full_like(inside, self.share_between_bytes_per_s, float), False)

    def _links(self, inside: np.ndarray, through: np.ndarray, also_inside: np.ndarray | bool) -> Links:
        within = self.inside.bandwidth_bytes_per_s
        limited = np.where(also_inside, np.minimum(through, within), through)
        return (
            np.where(inside, self.inside.latency_s, self.between.latency_s),
            np.where(inside, within, limited),
        )

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} node{'s' * (self.num_nodes > 1)} × {self.devices_per_node} {self.device.name}"
        inside = f"; inside a node {self.inside}" * (self.devices_per_node > 1)
        cards = self.devices_per_node if self.links_between is None else self.links_between
        return nodes + inside + f", between nodes {cards} × ({self.between})" * (self.num_nodes > 1)
