"""Links of two levels: what they join, what they refuse, and what a replay makes of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.handmade import record
from vizkit import InvalidInputError, Link
from vizkit.collectives import time_s
from vizkit.links import Links
from vizkit.replay import replay
from vizkit.trace import NS_PER_S

FAST, SLOW = Link(1e-6, 1e9), Link(1e-3, 1e6)


@pytest.mark.parametrize("ranks, expected", [([0], FAST), ([0, 1], FAST), ([2, 3], FAST), ([1, 2], SLOW), ([], FAST)])
def test_ranks_of_one_node_have_the_fast_link(ranks: list[int], expected: Link) -> None:
    """Nodes of two: ranks 0 and 1, ranks 2 and 3."""
    assert Links(FAST, SLOW, 2).joining(ranks) is expected


@pytest.mark.parametrize("members, link", [((0, 1), FAST), ((0, 2), SLOW), ((0, 1, 2, 3), SLOW)])
def test_a_collective_takes_the_slowest_link_among_its_members(members: tuple[int, ...], link: Link) -> None:
    """By the formula of its algorithm, for one node, across nodes, and for all."""
    post = ("post", "sum", "all_reduce", {"payload_bytes": 4000, "algorithm": "ring", "members": members, "group": "g"})
    programs = [[post, ("wait", "sum")] if rank in members else [] for rank in range(4)]
    trace = replay(record(*programs), Links(FAST, SLOW, 2), {})
    assert trace.duration_ns == round(time_s("all_reduce", "ring", len(members), 4000, link) * NS_PER_S)


@pytest.mark.parametrize("receiver, link", [(1, FAST), (2, SLOW)])
def test_a_message_takes_the_link_between_its_ends(receiver: int, link: Link) -> None:
    """α + bytes/β of that link, from posting to arrival."""
    programs: list[list] = [[("post", "x", "send", {"peer": receiver, "payload_bytes": 500})], [], []]
    programs[receiver] = [("post", "x", "receive", {"peer": 0, "payload_bytes": 500}), ("wait", "x")]
    trace = replay(record(*programs), Links(FAST, SLOW, 2), {})
    assert trace.duration_ns == round(link.time_s(500) * NS_PER_S)
    assert trace.notes["link"] == "1 µs + bytes / 1 GB/s inside nodes of 2, 1 ms + bytes / 1 MB/s between them"


def test_equal_links_are_one_link() -> None:
    """Two levels of the same link give the trace of that link, whatever the nodes."""
    post = ("post", "sum", "all_reduce", {"payload_bytes": 4000, "algorithm": "ring"})
    made = record(*[[("work", 10 * rank), post, ("wait", "sum")] for rank in range(3)])
    spans = [
        [(s.rank, s.kind, s.start_ns, s.end_ns) for s in replay(made, link)] for link in (FAST, Links(FAST, FAST, 2))
    ]
    assert spans[0] == spans[1]


def test_crossing_bytes_are_those_off_the_diagonal_of_nodes() -> None:
    """Whole nodes of any size, the last one smaller."""
    wire = np.arange(25).reshape(5, 5)
    by_hand = sum(int(wire[i, j]) for i in range(5) for j in range(5) if i // 2 != j // 2)
    assert Links(FAST, SLOW, 2).crossing_bytes(wire) == by_hand
    assert Links(FAST, SLOW, 5).crossing_bytes(wire) == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((FAST, SLOW, 0), "ranks_per_node=0: must be a whole number, at least 1; use ranks_per_node=1"),
        ((FAST, 1e9, 2), "between=1000000000.0: must be a vk.Link; use vk.Link(20e-6, 10e9)"),
        (
            (SLOW, FAST, 2),
            "inside='1 ms + bytes / 1 MB/s': is slower than between, 1 µs + bytes / 1 GB/s; "
            "give the faster link to the ranks of a node",
        ),
        (
            (Link(0, 1e6), Link(1, math.inf), 2),
            "inside='0 s + bytes / 1 MB/s': is slower than between, 1 s; give the faster link to the ranks of a node",
        ),
    ],
)
def test_what_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        Links(*arguments)
    assert str(refusal.value) == message
