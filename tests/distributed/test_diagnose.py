"""Faults planted in real runs are found, and nothing else is; a rank's fingerprints reach the diagnosis."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import vizkit as vk
from tests.distributed.faults import (
    DURATIONS,
    LATE,
    PLANTED,
    PLANTS,
    Plant,
    data_parallel,
    diagnose_all,
    fault_matrix,
)
from tests.renumbered import renumbered
from vizkit.errors import RankFailedError
from vizkit.findings import RULES, Diagnosis, FindingKind, diagnose
from vizkit.fingerprints import fingerprints_of
from vizkit.runtime.fingerprints import fingerprint
from vizkit.runtime.run import Run


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {}


@pytest.fixture(scope="module")
def found(runs: dict[str, Run]) -> dict[str, Diagnosis]:
    return diagnose_all(runs)


def plant(name: str) -> Plant:
    return next(plant for plant in PLANTS if plant.name == name)


def test_all_faults_and_no_others_are_found(found: dict[str, Diagnosis]) -> None:
    """Each rule against each run: the matrix has neither MISSED nor FALSE."""
    matrix = fault_matrix(found, PLANTED)
    print(matrix)
    wrong = {name: diagnosis.kinds for name, diagnosis in found.items() if set(diagnosis.kinds) != set(PLANTED[name])}
    assert wrong == {}, matrix


@pytest.mark.parametrize("kind", list(FindingKind))
def test_each_rule_has_a_run_with_its_fault_and_one_without(kind: FindingKind) -> None:
    faults = [kind in plant.faults for plant in PLANTS]
    assert kind in RULES
    assert any(faults)
    assert not all(faults)


COSTS = {
    # rank 2 does 2 ms more in each of 6 steps; the three others wait for it
    ("a slow rank", FindingKind.STRAGGLER): (6 * 2e-3 * 3 / 4, (2,)),
    # 0, 1, 2 and 3 ms more: the largest less the mean
    ("uneven shares", FindingKind.IMBALANCE): (6 * (3 - 1.5) * 1e-3, (3,)),
    # each step another rank of 4 does 2 ms more, in 8 steps
    ("uneven sequences", FindingKind.IMBALANCE): (8 * 2e-3 * 3 / 4, ()),
    # (p - 1)(F + B)
    ("pipeline, 4 microbatches", FindingKind.BUBBLE): (2 * 3e-3, (0, 1, 2)),
    # 64 microbatches of 3, 3 and 4.5 ms: the longest less the mean
    ("pipeline, unequal stages", FindingKind.IMBALANCE): (64 * 1e-3, (2,)),
    # two of three ranks stand by at any time, in 3 steps of 3 stages of 3 ms
    ("layer-wise", FindingKind.SERIAL_TRANSFER): (3 * 3 * 3e-3 * 2 / 3, (0, 1, 2)),
    ("a slow loader", FindingKind.STARVED_LOADER): (6 * 2e-3, (0, 1, 2, 3)),
    # 4 hashes where there should be 4 different ones: 3 of 4 batches are another rank's
    ("all read the same", FindingKind.REPEATED_DATA): (6 * 3.3e-3 * 3 / 4, (0, 1, 2, 3)),
    # the last three of six steps
    ("a replica drifts", FindingKind.DRIFTED_REPLICA): (3 * 3.3e-3, (1,)),
}


@pytest.mark.parametrize(("name", "kind"), COSTS)
def test_costs_are_those_worked_out_by_hand(found: dict[str, Diagnosis], name: str, kind: FindingKind) -> None:
    (finding,) = found[name].of(kind)
    cost_s, ranks = COSTS[name, kind]
    assert finding.cost_s == pytest.approx(cost_s, rel=0.01)
    assert finding.ranks == ranks
    assert finding.clock is vk.Clock.VIRTUAL


def test_the_bucket_that_it_names_halves_the_time(found: dict[str, Diagnosis]) -> None:
    """32 buckets of 125 B on a link of 100 µs: 16 of 250 B take half, as the remedy says; so the ranks do that."""
    (finding,) = found["32 buckets"].of(FindingKind.SMALL_BUCKETS)
    assert "125 B on the mean; each takes 600 µs of latency" in finding.evidence
    assert "32 a step" in finding.evidence
    assert finding.remedy.startswith("buckets of 250 B ")
    halved = vk.launch(data_parallel, num_buckets=16, world_size=4)
    (other,) = diagnose(halved, link=LATE, durations=DURATIONS).of(FindingKind.SMALL_BUCKETS)
    seconds = 6 * 32 * 6 * 100e-6
    exposed = [one.cost_s + 6 * 2e-3 for one in (finding, other)]  # the first hides behind the backward's 2 ms
    assert exposed[1] / exposed[0] == pytest.approx(0.5, rel=0.1)
    assert exposed[0] == pytest.approx(seconds, rel=0.1)


def test_findings_stand_in_order_of_cost(found: dict[str, Diagnosis]) -> None:
    for diagnosis in found.values():
        costs = [finding.cost_s for finding in diagnosis]
        assert costs == sorted(costs, reverse=True)


def test_the_drift_is_told_with_step_and_rank(found: dict[str, Diagnosis]) -> None:
    (finding,) = found["a replica drifts"]
    assert finding.what == "parameters of rank 1 differ from the others' from step 3 on"
    assert finding.evidence == (
        "parameters had one hash on all 4 ranks up to step 2; at step 3 they have 2: ranks 0, 2 and 3; rank 1"
    )


@pytest.mark.parametrize("name", [plant.name for plant in PLANTS if plant.judged.get("durations", 0) is not None])
def test_ranks_may_be_numbered_in_any_order(runs: dict[str, Run], found: dict[str, Diagnosis], name: str) -> None:
    """Renumbering the ranks renumbers the findings, and changes neither kinds nor costs."""
    one = plant(name)
    given = {"link": vk.Link(1e-6, 100e9), "durations": DURATIONS} | dict(one.judged)
    limit = given.pop("memory_limit_bytes", None)
    trace = runs[one.key].replay(**given)
    new = np.roll(np.arange(trace.world_size), 1)
    before = diagnose(trace, memory_limit_bytes=limit)
    after = diagnose(renumbered(trace, new), memory_limit_bytes=limit)
    assert [f.kind for f in before] == [f.kind for f in found[name]], "the trace alone tells as much as the run"
    assert [f.kind for f in after] == [f.kind for f in before]
    assert [f.cost_s for f in after] == pytest.approx([f.cost_s for f in before])
    assert [f.ranks for f in after] == [tuple(sorted(new[list(f.ranks)].tolist())) for f in before]


def hashes() -> list[int | None]:
    x = torch.arange(6.0)
    flipped = x.clone()
    flipped.view(torch.int32)[3] ^= 1
    model = nn.Linear(2, 3)
    return [
        fingerprint(x),
        fingerprint(x.clone()),
        fingerprint(torch.stack([x, x], 1)[:, 0]),
        fingerprint(flipped),
        fingerprint(x.reshape(2, 3)),
        fingerprint(x.view(torch.int32)),
        fingerprint({"x": x}),
        fingerprint({"y": x}),
        fingerprint([x, "a", 1]),
        fingerprint(x.bfloat16()),
        fingerprint(torch.tensor(1.5)),
        fingerprint(torch.empty(0)),
        fingerprint(model),
        fingerprint(dict(model.named_parameters())),
        fingerprint(np.arange(6, dtype=np.float32)),
    ]


def test_a_hash_tells_one_bit_and_not_where_the_bytes_lie() -> None:
    """Copies, strided views and arrays of equal content hash alike; bits, shape, dtype and keys tell them apart."""
    (results,) = vk.launch(hashes, world_size=1).results
    same, copy, view, flipped, shape, dtype, key, other_key, *rest = results
    *different, model, named, array = rest
    assert same == copy == view == array
    assert model == named
    assert len({same, flipped, shape, dtype, key, other_key, *different, model}) == 7 + len(different)
    assert all(isinstance(value, int) and -(2**63) <= value < 2**63 for value in [same, *rest])


def test_outside_ranks_it_does_nothing() -> None:
    assert fingerprint(torch.ones(2)) is None


def in_groups() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    fingerprint(torch.tensor(rank // 2), group=pairs[rank // 2])
    fingerprint(torch.tensor(rank % 2), "shard", group=pairs[rank // 2])
    fingerprint(torch.tensor(rank // 2), "data", same=False, group=pairs[rank // 2])


def test_only_members_of_a_group_are_compared() -> None:
    """Pairs of replicas: parameters agree in each pair, shards do not, and each pair reads the same data."""
    diagnosis = diagnose(vk.launch(in_groups, world_size=4), durations={})
    told = sorted((finding.kind.value, finding.ranks) for finding in diagnosis)
    assert told == [
        ("drifted replica", (0, 1)),
        ("drifted replica", (2, 3)),
        ("repeated data", (0, 1)),
        ("repeated data", (2, 3)),
    ]
    assert all("shard" in finding.what for finding in diagnosis.of("drifted replica"))


def large() -> None:
    with vk.span("forward", kind="F"):
        torch.ones(1)
    fingerprint(torch.ones(4_000_000))
    fingerprint(torch.ones(1), step=7)


def test_hashing_is_no_work_of_the_program() -> None:
    """16 MB take about 20 ms of CPU time; the virtual clock does not move, the wall clock shows a wait."""
    run = vk.launch(large, world_size=1)
    noted = list(fingerprints_of(run.replay(durations={"F": 1e-3})))
    assert [(one.time_ns, one.fingerprint.step) for one in noted] == [(1_000_000, 0), (1_000_000, 7)]
    wait = max((span for span in run.trace if span.name == "fingerprint"), key=lambda span: span.duration_ns)
    assert wait.duration_ns > 2_000_000, "16 MB in under 2 ms would be 8 GB/s"
    assert run.replay().duration_ns < wait.duration_ns


def unhashable() -> None:
    fingerprint(object(), "thing")


def sparse() -> None:
    fingerprint(torch.eye(2).to_sparse())


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (unhashable, "thing='object': is no tensor, number or text; give a module, a tensor, or lists of tensors"),
        (sparse, "parameters='torch.sparse_coo': has no bytes in a row; give a dense tensor that holds numbers"),
    ],
)
def test_what_has_no_bytes_is_refused(program, message: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        vk.launch(program, world_size=1)
    assert message in caught.value.remote_traceback


def test_fingerprints_survive_a_file(tmp_path) -> None:
    """All 64 bits of the hashes come back from a Chrome trace."""
    run = vk.launch(in_groups, world_size=4)
    trace = run.replay(durations={})
    again = vk.read_trace(vk.write_chrome_trace(trace, tmp_path / "run.json.gz"))
    assert list(fingerprints_of(again)) == list(fingerprints_of(trace))
    assert max(math.log2(abs(one.fingerprint.value)) for one in fingerprints_of(trace)) > 55
    assert str(diagnose(again)) == str(diagnose(trace))
