"""Clocks of different hosts, put on one axis by what their ranks did together: the truth lies within the bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vizkit as vk
from vizkit.alignment import Bounds, align, observed, without_failed
from vizkit.record import Call, RankRecord, Wait

HOUR_NS = 3_600_000_000_000
MS = 1_000_000


@dataclass
class World:
    """Hosts with clocks of their own, and collectives whose true times are known."""

    offsets_ns: np.ndarray
    rates: np.ndarray
    bounds: Bounds
    length_ns: int

    def reads(self, host: int, true_ns: np.ndarray | float) -> np.ndarray:
        """What the host's clock shows at a true time."""
        return np.rint(self.offsets_ns[host] + np.asarray(true_ns) * (1 + self.rates[host])).astype(np.int64)

    @property
    def extents(self) -> list[list[tuple[int, int]]]:
        return [
            [(int(self.reads(host, 0)), int(self.reads(host, self.length_ns)))] for host in range(len(self.offsets_ns))
        ]

    def worst_error_s(self, found) -> float:
        """The largest true error between any two hosts, at many moments of the run."""
        times = np.linspace(0, self.length_ns, 200)
        common = np.array([found.moved(host, self.reads(host, times)) for host in range(len(self.offsets_ns))])
        return float((common.max(axis=0) - common.min(axis=0)).max()) / 1e9


def world(
    seed: int, num_hosts: int, num_collectives: int, drift: float, length_ns: int, lopsided: float = 1.0
) -> World:
    """Hosts up to an hour apart; each collective ends on each host after a delay of its own, longer on odd hosts."""
    draw = np.random.default_rng(seed)
    offsets = draw.integers(-HOUR_NS, HOUR_NS, num_hosts) + 2 * HOUR_NS
    made = World(offsets, draw.uniform(-drift / 2, drift / 2, num_hosts), Bounds.of([]), length_ns)
    rows = []
    for start in np.sort(draw.uniform(0.01, 0.9, num_collectives)) * length_ns:
        entered = start + draw.exponential(0.01 * length_ns / num_collectives, num_hosts)
        delay = draw.exponential(200_000, num_hosts) * np.where(np.arange(num_hosts) % 2, lopsided, 1.0)
        ended = np.minimum(entered.max() + 20_000 + delay, length_ns)
        rows += [
            (here, int(made.reads(here, ended[here])), there, int(made.reads(there, entered[there])))
            for here in range(num_hosts)
            for there in range(num_hosts)
            if here != there
        ]
    made.bounds = Bounds.of(rows)
    return made


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    num_hosts=st.integers(2, 5),
    num_collectives=st.integers(1, 40),
    drift=st.sampled_from([0.0, 5e-6, 100e-6, 500e-6]),
    length_s=st.sampled_from([0.01, 1, 60, 1800]),
    lopsided=st.sampled_from([1.0, 50.0]),
)
def test_the_truth_is_within_the_bound(seed, num_hosts, num_collectives, drift, length_s, lopsided):
    """Clocks hours apart, running at different rates, delays twenty times longer one way than the other."""
    made = world(seed, num_hosts, num_collectives, drift, int(length_s * 1e9), lopsided)
    found = align(made.bounds, made.extents, [0] * num_hosts)
    assert found.drift == 500e-6
    assert made.worst_error_s(found) <= found.error_s + 5e-9  # clocks are read in whole nanoseconds
    assert np.isfinite(found.error_s)


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), num_hosts=st.integers(2, 4))
def test_no_collective_is_over_before_its_last_member_came(seed: int, num_hosts: int):
    """On the common clock cause stands before effect, within the bound that is shown."""
    made = world(seed, num_hosts, 20, 100e-6, 10**10)
    found = align(made.bounds, made.extents, [0] * num_hosts)
    b = made.bounds
    ended = [int(found.moved(host, [ns])[0]) for host, ns in zip(b.ended_on.tolist(), b.ended_ns, strict=True)]
    entered = [int(found.moved(host, [ns])[0]) for host, ns in zip(b.entered_on.tolist(), b.entered_ns, strict=True)]
    assert min(np.array(ended) - np.array(entered)) >= -found.error_s * 1e9 - 2


def test_frequent_collectives_narrow_the_bound_below_the_mean_delay():
    """Of hundreds of exchanges the quickest tells most, though each end comes 220 µs late in the mean."""
    made = world(7, 2, 400, 50e-6, 10**9)
    found = align(made.bounds, made.extents, [0, 0])
    assert made.worst_error_s(found) <= found.error_s < 150e-6


def test_clocks_of_an_hour_apart_come_together():
    """One barrier is enough: the middle of what is possible, and half the width as the error."""
    bounds = Bounds.of([(1, HOUR_NS + 3 * MS, 0, 0), (0, 2 * MS, 1, HOUR_NS)])
    found = align(bounds, [[(0, 2 * MS)], [(HOUR_NS, HOUR_NS + 3 * MS)]], [0, 0], drift=0.0)
    assert found.moved(1, [HOUR_NS]).tolist() == [-MS // 2]
    assert found.error_s == 2.5e-3


def test_one_host_has_one_clock():
    """Nothing to align, no error."""
    found = align(Bounds.of([]), [[(5, 9)]], [0])
    assert (found.error_s, found.moved(0, [5, 9]).tolist()) == (0.0, [5, 9])


def test_hosts_that_never_met_go_by_their_wall_clocks():
    """Nothing bounds the error, and it is said so: infinity."""
    found = align(Bounds.of([]), [[(0, 10)], [(1_000, 1_010)]], [5_000, 4_100])
    assert found.moved(1, [1_000]).tolist() == [100]
    assert found.error_s == np.inf


def test_a_message_bounds_one_side_only():
    """The receive cannot end before the send began: a wall clock that says so is corrected, and no more."""
    bounds = Bounds.of([(1, 1_000, 0, 500)])
    found = align(bounds, [[(0, 2_000)], [(0, 2_000)]], [0, -900], drift=0.0)
    assert found.moved(1, [1_000]).tolist() == [500]
    assert found.error_s == np.inf


def test_a_faster_clock_than_assumed_is_found_out():
    """What no drift of 500 ppm explains is explained by a larger one, which the result names."""
    made = world(3, 2, 60, 0.02, 10**10)
    found = align(made.bounds, made.extents, [0, 0])
    assert found.drift > 500e-6
    assert made.worst_error_s(found) <= found.error_s


def test_records_that_contradict_each_other_are_refused():
    """Each was over long before the other began: these are no records of one run."""
    bounds = Bounds.of([(0, 0, 1, 10 * MS), (1, 0, 0, 10 * MS)])
    with pytest.raises(vk.InvalidInputError, match=r"over before it began.*give the files of one run only"):
        align(bounds, [[(0, MS)], [(0, MS)]], [0, 0])


def a_rank(
    rank: int, kind: str, peer: int = -1, payload_bytes: int = 8, split_bytes: tuple[int, ...] = ()
) -> RankRecord:
    """A rank of three that entered one communication at 10 + rank and saw its end at 20 + rank."""
    begin, end = 10 + rank, 20 + rank
    members = (0, 1, 2)
    call = Call(
        call=0, kind=vk.SpanKind(kind), group="0", members=members, payload_bytes=payload_bytes, peer=peer,
        split_bytes=split_bytes, done_wall_ns=end, before_ns=0, after_ns=0, start_wall_ns=begin, end_wall_ns=begin,
    )  # fmt: skip
    wait = Wait(calls=(0,), before_ns=0, after_ns=0, start_wall_ns=begin, end_wall_ns=end)
    return RankRecord(rank=rank, events=(call, wait), start_ns=0, end_ns=0, start_wall_ns=0, end_wall_ns=30)


EVERY_PAIR = {(here, there) for here in range(3) for there in range(3) if here != there}


@pytest.mark.parametrize(
    ("kind", "peer", "pairs"),
    [
        *((kind, -1, EVERY_PAIR) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")),
        *((kind, 1, {(0, 1), (2, 1)}) for kind in ("broadcast", "scatter")),
        *((kind, 1, {(1, 0), (1, 2)}) for kind in ("reduce", "gather")),
    ],
)
def test_who_waits_for_whom_depends_on_the_collective(kind: str, peer: int, pairs: set[tuple[int, int]]):
    """Pairs (who ended, who had entered): a broadcast's root waits for nobody, nobody waits for a gather's root."""
    found = observed([[a_rank(rank, kind, peer) for rank in range(3)]], [[0, 1, 2]])
    rows = list(zip(*(column.tolist() for column in vars(found).values()), strict=True))
    assert {(ended_on, entered_on) for ended_on, _, entered_on, _ in rows} == pairs
    assert all(ended == 20 + ended_on and entered == 10 + entered_on for ended_on, ended, entered_on, entered in rows)


def test_a_message_tells_one_way():
    """The receive was over after the send was posted; the send may be over before."""
    found = observed([[a_rank(0, "send", peer=1), a_rank(1, "receive", peer=0)]], [[0, 1]])
    assert [column.tolist() for column in vars(found).values()] == [[1], [21], [0], [10]]


def test_ranks_of_one_host_speak_for_it_together():
    """The last of them to enter, the first to see the end."""
    found = observed([[a_rank(rank, "all_reduce") for rank in range(3)]], [[0, 0, 1]])
    rows = sorted(zip(*(column.tolist() for column in vars(found).values()), strict=True))
    assert rows == [(0, 20, 1, 12), (1, 22, 0, 11)]


@pytest.mark.parametrize("empty", [{"payload_bytes": 0}, {"split_bytes": (0, 4, 4)}])
def test_what_carries_nothing_synchronises_nobody(empty: dict):
    """An empty tensor, or an all-to-all in which some rank sends nothing to another."""
    found = observed([[a_rank(rank, "all_to_all", **empty) for rank in range(3)]], [[0, 1, 2]])
    assert len(found) == 0


def test_of_a_failed_rank_the_last_wait_proves_nothing():
    """It ended because a peer died, not because all had come."""
    failed, whole = without_failed(a_rank(0, "all_reduce")), a_rank(1, "all_reduce")
    found = observed([[failed, whole]], [[0, 1]])
    assert [column.tolist() for column in vars(found).values()] == [[1], [21], [0], [10]]
