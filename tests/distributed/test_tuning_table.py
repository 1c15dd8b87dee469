"""The table of tunings: recorded bytes are the formulas', times are the link's, and all learn from the same samples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import vizkit as vk
from vizkit.links import Links
from vizkit.runtime import digits
from vizkit.runtime import tuning as vt

PAYLOAD = sum(p.nbytes for p in digits.network().parameters())
FAST, SLOW = vk.Link(5e-6, 10e9), vk.Link(50e-6, 125e6)


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Noise in the shape of the digits: what is learned is no matter here, and scikit-learn takes long to import."""
    drawn = torch.Generator().manual_seed(0)
    return torch.rand(1797, 1, 8, 8, generator=drawn), torch.randint(10, (1797,), generator=drawn)


@pytest.fixture(scope="module")
def table(data: tuple[torch.Tensor, torch.Tensor]) -> vt.Comparison:
    return vt.compare(data=data, num_batches=12, global_batch=16)


def test_recorded_bytes_are_the_formulas(table: vt.Comparison) -> None:
    """Every tuning, in all and between nodes: 4 ranks in nodes of 2."""
    assert [row.name for row in table.rows if not row.matches_formula] == []
    assert len(table.rows) == len(vt.TUNINGS)
    assert table.row("one bucket").wire_bytes == 4 * 2 * 3 * PAYLOAD  # 4 batches, 2(n−1) payloads


def test_bytes_are_the_formulas_for_other_sizes(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    """3 ranks, a node each: nothing divides the 38,282 parameters; blocks of 7."""
    tunings = [replace(t, block=7) for t in vt.TUNINGS if t.name in ("int8", "hierarchical", "local SGD, every 4")]
    compared = vt.compare(tunings, data=data, world_size=3, links=Links(FAST, SLOW, 1), num_batches=12, global_batch=6)
    for row in compared.rows:
        assert row.wire_bytes == pytest.approx(row.expected.total_bytes, abs=1e-6)
        assert row.matches_formula
        assert row.wire_bytes == row.crossing_bytes


def test_what_is_exact_learns_the_same(table: vt.Comparison) -> None:
    """Bucket size, hierarchy and where the forward stands change no gradient; all replicas end alike."""
    for names in (("one bucket", "buckets of 0.05 MiB", "hierarchical"), ("accumulate 4", "no_sync wrong")):
        losses = [table.row(name).test_loss for name in names]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    assert [row.replicas_differ_by for row in table.rows] == [0.0] * len(table.rows)


def test_times_follow_from_the_links(table: vt.Comparison) -> None:
    """One bucket: compute, then a ring over slow links; hierarchical: its three collectives; local SGD: a quarter."""
    compute = 3e-3
    ring = vk.collectives.time_s("all_reduce", "ring", 4, PAYLOAD, SLOW)
    part = PAYLOAD // 2
    levels = [("all_reduce", PAYLOAD, FAST), ("all_reduce", part, SLOW), ("all_gather", PAYLOAD, FAST)]
    hierarchical = sum(vk.collectives.time_s(kind, "ring", 2, size, link) for kind, size, link in levels)
    for name, expected in {
        "one bucket": compute + ring,
        "accumulate 4": compute + ring / 4,
        "no_sync wrong": compute + ring,
        "hierarchical": compute + hierarchical,
        "local SGD, every 4": compute + ring / 4,
    }.items():
        row = table.row(name)
        assert row.batch_s == pytest.approx(expected, rel=1e-5), name
        assert row.exposed_s == pytest.approx(expected - compute, rel=1e-4), name
    assert table.row("buckets of 0.05 MiB").exposed_s < 0.9 * ring


def test_other_links_need_no_other_run(table: vt.Comparison) -> None:
    """The same bytes and losses; on equal links the hierarchy's extra steps cost more than they save."""
    again = table.replayed()
    assert [row.batch_s for row in again.rows] == [row.batch_s for row in table.rows]
    flat = table.replayed(links=Links(SLOW, SLOW, 2), durations={"F": 2e-3, "compute": 1e-3})
    assert flat.row("hierarchical").exposed_s > flat.row("one bucket").exposed_s
    assert flat.row("int8").batch_s == pytest.approx(3e-3 + flat.row("int8").exposed_s)
    assert [row.wire_bytes for row in flat.rows] == [row.wire_bytes for row in table.rows]
    assert flat.runs is table.runs


def test_two_tables_are_one_if_they_were_replayed_alike(table: vt.Comparison) -> None:
    """Rows and runs of both, in order."""
    both = table + table.replayed()
    assert [row.name for row in both.rows] == 2 * [row.name for row in table.rows]
    assert both.runs == table.runs + table.runs
    with pytest.raises(vk.InvalidInputError, match="replay one like the other"):
        table + table.replayed(links=Links(FAST, FAST, 2))


def test_the_table_reads_as_text_and_as_a_frame(table: vt.Comparison) -> None:
    """A line a tuning, bytes of one batch, and whether they are the formula's."""
    lines = str(table).splitlines()
    assert lines[0].startswith("5 µs + bytes / 10 GB/s inside nodes of 2, 50 µs + bytes / 125 MB/s between them")
    assert lines[2].split()[:5] == ["one", "bucket", "918,768", "459,384", "equal"]
    assert len(lines) == 2 + len(vt.TUNINGS)
    frame = table.to_frame()
    assert frame.loc["fp16", "wire_bytes"] == frame.loc["fp16", "expected_wire_bytes"] == 459_384
    assert math.isclose(frame.loc["one bucket", "batch_s"], table.rows[0].batch_s)
    for num_batches, expected in ((None, 4), (1, 1)):
        trace = table.trace("one bucket", num_batches)
        assert len(trace.filter(kind="F", rank=0)) == expected
        assert trace.extent_ns[0] == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_batches": 8}, "num_batches=8: the first 8 warm up and are not measured; use num_batches=80"),
        (
            {"num_batches": 18},
            "cycle of 'accumulate 4'=4: does not divide num_batches=18; "
            "use cycle of 'accumulate 4'=3 or cycle of 'accumulate 4'=6",
        ),
        (
            {"world_size": 3},
            "ranks_per_node=2: does not divide world_size=3; use ranks_per_node=1 or ranks_per_node=3",
        ),
        ({"global_batch": 10}, "world_size=4: does not divide global_batch=10; use world_size=2 or world_size=5"),
        ({"global_batch": 0}, "global_batch=0: must be a whole number, at least 1; use global_batch=1"),
        ({"global_batch": 2000}, "global_batch=2000: there are 1536 digits to train on; use 1536 or fewer"),
        (
            {"durations": {"B": 1}},
            "durations=Durations(B=1, I=0.5, W=0.5): a forward has to take time, as batches are told apart by it; "
            'use {"F": 1e-3}',
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    data: tuple[torch.Tensor, torch.Tensor], arguments: dict, message: str
) -> None:
    """Before anything runs."""
    tunings = [vt.Tuning("plain"), vt.Tuning("accumulate 4", accumulate=4)]
    with pytest.raises(vk.InvalidInputError) as refusal:
        vt.compare(tunings, data=data, **arguments)
    assert str(refusal.value) == message


def test_what_a_table_has_not_is_refused(table: vt.Comparison) -> None:
    """A tuning of another name, more batches than there are, nodes of another size."""
    with pytest.raises(vk.InvalidInputError) as refusal:
        table.trace("fp16", 5)
    assert str(refusal.value) == "num_batches=5: 4 were measured; use num_batches=4"
    with pytest.raises(vk.InvalidInputError, match="name='fp17': is no tuning here; did you mean fp16"):
        table.row("fp17")
    with pytest.raises(vk.InvalidInputError) as refusal:
        table.replayed(links=Links(FAST, SLOW, 4))
    assert str(refusal.value) == "ranks_per_node=4: the ranks ran in nodes of 2; keep it, or compare again"
