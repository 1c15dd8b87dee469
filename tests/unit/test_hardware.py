"""Links, devices and clusters: what each costs, by hand."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vizkit.errors import InvalidInputError
from vizkit.hardware import FREE_LINK, PRESETS, Device, Link, dgx_a100, laptop


@pytest.mark.parametrize(
    "latency_s, bandwidth, num_bytes, seconds",
    [
        (1e-3, 1e6, 2_000_000, 2.001),
        (1e-3, 1e6, 0, 1e-3),
        (0.0, 1e6, 500_000, 0.5),
        (2e-6, math.inf, 10**15, 2e-6),
    ],
)
def test_the_time_is_latency_plus_bytes_over_bandwidth(
    latency_s: float, bandwidth: float, num_bytes: int, seconds: float
):
    """α + bytes/β; an infinite β leaves α."""
    assert Link(latency_s, bandwidth).time_s(num_bytes) == pytest.approx(seconds, rel=1e-12)


@given(st.integers(0, 2**60))
def test_the_free_link_costs_nothing(num_bytes: int):
    """What remains on it is dependencies."""
    assert FREE_LINK.time_s(num_bytes) == 0.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"latency_s": -1e-6}, "latency_s=-1e-06: must be finite and not negative; use 0 for a link without latency"),
        ({"latency_s": math.nan}, "latency_s=nan: must be finite and not negative; use 0 for a link without latency"),
        ({"latency_s": math.inf}, "latency_s=inf: must be finite and not negative; use 0 for a link without latency"),
        (
            {"bandwidth_bytes_per_s": 0},
            "bandwidth_bytes_per_s=0: must be positive; use float('inf') for a link that only has latency",
        ),
        (
            {"bandwidth_bytes_per_s": math.nan},
            "bandwidth_bytes_per_s=nan: must be positive; use float('inf') for a link that only has latency",
        ),
    ],
)
def test_an_impossible_link_is_refused(arguments: dict[str, float], message: str):
    """The message says which number, the rule, and what to write instead."""
    with pytest.raises(InvalidInputError) as error:
        Link(**arguments)
    assert str(error.value) == message


DGX = dgx_a100(num_nodes=4)
MINE = {"name": "mine", "peak_flops_per_s": 100e12, "memory_bytes": 24e9, "memory_bandwidth_bytes_per_s": 1e12}


class TestDevice:
    @given(*[st.integers(1, 10**5)] * 3)
    def test_a_matrix_product_is_a_roofline(self, m: int, n: int, k: int):
        """Seconds at the ceiling, and the seconds in which memory moves its three matrices, one after the other."""
        device = Device(**MINE, matrix_ceiling=0.8)
        by_hand = 2 * m * n * k / 80e12 + 2 * (m * k + k * n + m * n) / 1e12
        assert device.matrix_s(m, n, k) == pytest.approx(by_hand, rel=1e-9)

    @given(st.permutations([100, 2000, 30000]), st.integers(2, 50))
    def test_the_curve(self, sizes: list[int], times: int):
        """One size in any order, rising with each, under the ceiling, and near it for large products."""
        curve = Device(**MINE).matrix_efficiency
        assert curve(*sizes) == pytest.approx(curve(*sorted(sizes)), rel=1e-12)
        assert curve(*sizes) < curve(times * sizes[0], *sizes[1:]) < 0.85
        assert curve(10**7, 10**7, 10**7) == pytest.approx(0.85, rel=1e-3)

    def test_the_curve_of_arrays(self):
        """Arrays in, arrays out."""
        device = Device(**MINE)
        rows = np.array([1.0, 64.0, 4096.0])
        assert device.matrix_efficiency(rows, 512, 512).tolist() == [
            device.matrix_efficiency(row, 512, 512) for row in rows
        ]

    def test_numbers_of_32_bits(self):
        """Half as fast where nothing else is said, and twice as many bytes."""
        device = Device(**MINE)
        assert (device.peak(2), device.peak(4)) == (100e12, 50e12)
        assert Device(**MINE, peak_32bit_flops_per_s=20e12).peak(4) == 20e12
        assert device.moving_s(8e11) == 1.0

    @pytest.mark.parametrize(
        "change, message",
        [
            (
                {"peak_flops_per_s": 0},
                "peak_flops_per_s=0: must be positive and finite; use the data sheet's, such as ",
            ),
            (
                {"memory_bandwidth_bytes_per_s": math.inf},
                "memory_bandwidth_bytes_per_s=inf: must be positive and finite",
            ),
            ({"memory_bytes": "80 GB"}, "memory_bytes='80 GB': must be positive and finite"),
            ({"matrix_ceiling": 1.2}, "matrix_ceiling=1.2: is a share, over 0 and at most 1; use matrix_ceiling=0.8"),
        ],
    )
    def test_an_impossible_device(self, change: dict[str, object], message: str):
        """Value, rule, remedy."""
        with pytest.raises(InvalidInputError) as error:
            Device(**{**MINE, **change})
        assert str(error.value).startswith(message)


class TestCluster:
    @pytest.mark.parametrize(
        "stride, size, members, bandwidth",
        [
            (1, 8, 8, 230e9),  # a node
            (1, 16, 8, 8 * 12.6e9),  # two nodes, through all cards
            (8, 4, 1, 12.6e9),  # one rank of each node
            (2, 4, 4, 230e9),  # every other of a node
            (2, 16, 4, 4 * 12.6e9),
            (1, 6, 2, 2 * 12.6e9),  # straddles: 6, 2 + 4, 4 + 2, 6
            (1, 1, 1, 230e9),
        ],
    )
    def test_groups(self, stride: int, size: int, members: int, bandwidth: float):
        """A ring inside a node has NVLink; one over nodes the cards of its ranks in a node."""
        assert int(DGX.members_in_node(stride, size)) == members
        assert DGX.link_of_group(stride, size).bandwidth_bytes_per_s == pytest.approx(bandwidth)

    @pytest.mark.parametrize("nodes, size", [(2, 16), (3, 24), (4, 12)])
    def test_members_by_counting(self, nodes: int, size: int):
        """The fewest of a group of neighbours in any node that it touches, of all such groups."""
        counts = [
            [sum(rank // 8 == node for rank in range(first, first + size)) for node in range(nodes)]
            for first in range(0, nodes * 8 - size + 1, size)
        ]
        fewest = min(count for group in counts for count in group if count)
        assert int(dgx_a100(nodes).members_in_node(1, size)) == min(fewest, size - 1)

    def test_cards_are_shared(self):
        """One card for four devices gives each a quarter; a ring of all four has it whole."""
        cluster = dataclasses.replace(DGX, devices_per_node=4, links_between=1)
        assert cluster.share_between_bytes_per_s == 12.6e9 / 4
        assert cluster.link_of_group(1, 8).bandwidth_bytes_per_s == pytest.approx(12.6e9)
        assert cluster.link_of_group(4, 4).bandwidth_bytes_per_s == pytest.approx(12.6e9 / 4)

    def test_all_to_all_leaves_the_node_in_part(self):
        """8 of 15 messages of each rank do, through its own card: β is 15/8 of a card's share."""
        latency, bandwidth = DGX.exchange(1, 16)
        assert (float(latency), float(bandwidth)) == (10e-6, pytest.approx(12.6e9 * 15 / 8))

    def test_neighbours_have_their_own_card(self):
        """A message to another node goes through the sender's card alone."""
        assert float(DGX.neighbours(8, 4)[1]) == 12.6e9
        assert float(DGX.neighbours(1, 8)[1]) == 230e9

    @pytest.mark.parametrize("number, nodes, per_node", [(1, 1, 1), (5, 1, 5), (8, 1, 8), (64, 8, 8)])
    def test_as_many_devices(self, number: int, nodes: int, per_node: int):
        """Part of a node, or whole nodes."""
        cluster = DGX.of(number)
        assert (cluster.num_nodes, cluster.devices_per_node, cluster.num_devices) == (nodes, per_node, number)

    def test_devices_that_fill_no_nodes(self):
        """Refused, with the nearest numbers that do."""
        with pytest.raises(InvalidInputError) as error:
            DGX.of(20)
        assert str(error.value) == "num_devices=20: fill no whole nodes of 8; use num_devices=16 or 24"

    @pytest.mark.parametrize(
        "change, message",
        [
            ({"device": "A100"}, "device='A100': must be a vk.hardware.Device; make one"),
            ({"num_nodes": 0}, "num_nodes=0: must be a whole number, at least 1; use num_nodes=1"),
            ({"inside": 230e9}, "inside=230000000000.0: must be a vk.Link; use vk.Link(latency_s=5e-6)"),
        ],
    )
    def test_an_impossible_cluster(self, change: dict[str, object], message: str):
        """Value, rule, remedy."""
        with pytest.raises(InvalidInputError) as error:
            dataclasses.replace(DGX, **change)
        assert str(error.value) == message


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_whose_figures_it_has(name: str):
    """A source with a year, or that it is an estimate; and it makes clusters of any size."""
    text = inspect.getdoc(PRESETS[name])
    assert text is not None
    assert re.search(r"\((20\d\d)", text) or "stimate" in text
    assert PRESETS[name](2).num_devices in (2, 16)
    assert PRESETS[name](2).device.name in str(PRESETS[name](2))


def test_a_laptop_is_shared_among_its_processes():
    """Four ranks have together what one has alone."""
    one, four = laptop(1), laptop(4)
    assert 4 * four.device.peak_flops_per_s == one.device.peak_flops_per_s
    assert 4 * four.device.memory_bytes == one.device.memory_bytes
    assert four.num_devices == 4
