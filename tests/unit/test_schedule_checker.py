"""What keeps a schedule from running is found, all of it, and nothing else; torch's lowering is the oracle."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vizkit.durations import Durations
from vizkit.errors import InvalidInputError
from vizkit.schedules import Action, Schedule, schedule, schedule_names
from vizkit.schedules.checker import FindingKind, check
from vizkit.simulator import simulate


def kinds(rows: list, **options: int) -> list[str]:
    return [finding.kind.value for finding in Schedule.from_rows(rows, **options).check()]


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("num_ranks, num_microbatches", [(2, 4), (4, 8)])
def test_every_named_schedule_passes(name: str, num_ranks: int, num_microbatches: int):
    """None has a finding."""
    assert check(schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)) == []


@pytest.mark.parametrize(
    "rows",
    [
        [["0F0", "0F1"], ["1F0", "1F1"]],
        [["0F0", "0B0"]],
        [["0F0", "0I0", "0W0", "0F1", "0B1"]],
        [[("0F0", "0B0")]],
        [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]],
        [["0F0", "1F0", ("0F1", "1B0"), ("1F1", "0B0"), "1B1", "0B1"]],
    ],
    ids=["inference", "one stage", "split and full", "overlapping itself", "a V", "overlaps"],
)
def test_what_can_run_passes(rows: list):
    """Schedules of one's own, as unusual as they are."""
    assert kinds(rows) == []


@pytest.mark.parametrize(
    "rows, sentences",
    [
        (
            [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]],
            [
                "rank 0, cell 1 (0B0): rank 0 cannot do 0B0 (cell 1) until rank 1 has done 1B0, which stands behind "
                "1F1; rank 1 cannot do 1F1 (cell 1) until rank 0 has done 0F1, which stands behind 0B0: a circle of "
                "waits; change the order on one of these ranks"
            ],
        ),
        (
            [["0F0", ("0F1", "0B0"), "0B1"], ["1F0", ("1F1", "1B0"), "1B1"]],
            [
                "rank 0, cell 1 (0B0): rank 0 cannot do 0B0 (cell 1) until rank 1 has done 1B0, which shares a cell "
                "with 1F1; rank 1 cannot do 1F1 (cell 1) until rank 0 has done 0F1, which shares a cell with 0B0: a "
                "circle of waits; change the order on one of these ranks"
            ],
        ),
        (
            [["0F0", "3F0", "0F1", "3F1"], ["1F1", "1F0"], ["2F0", "2F1"]],
            [
                "rank 0, cell 1 (3F0): rank 0 cannot do 3F0 (cell 1) until rank 2 has done 2F0; rank 2 cannot do 2F0 "
                "(cell 0) until rank 1 has done 1F0, which stands behind 1F1; rank 1 cannot do 1F1 (cell 0) until "
                "rank 0 has done 0F1, which stands behind 3F0: a circle of waits; change the order on one of these "
                "ranks"
            ],
        ),
        (
            [["1F0", "0F0"]],
            [
                "rank 0, cell 0 (1F0): comes before 0F0, whose output it takes, on the same rank, which then waits for "
                "itself; move it after 0F0 (cell 1)"
            ],
        ),
        (
            [["0F0", "0B0"], ["1B0", "1F0"]],
            ["rank 1, cell 0 (1B0): comes before 1F0, which it builds on; move it after 1F0 (cell 1)"],
        ),
        (
            [["0F0", "0W0", "0I0"]],
            ["rank 0, cell 1 (0W0): comes before 0I0, which it builds on; move it after 0I0 (cell 2)"],
        ),
        (
            [["0F0", "0F0"]],
            [
                "rank 0, cell 1 (0F0): is already cell 0 of rank 0; an action is done once: delete one, or correct "
                "its number"
            ],
        ),
        (
            [["0F0", "0F1"], ["1F0"]],
            ["rank 1 (1F1): is missing; every microbatch has a forward on every stage: add 1F1 to rank 1"],
        ),
        (
            [["0F0"], ["1F0", "1B0"]],
            [
                "rank 0 (0B0): is missing; a schedule that trains has a backward, B or I and W, for every microbatch "
                "on every stage: add 0B0 to rank 0"
            ],
        ),
        (
            [["0F0", "0I0"]],
            ["rank 0 (0W0): is missing; I is half of a backward and needs W, the other half: add 0W0 to rank 0"],
        ),
        (
            [["0F0", "0W0"]],
            ["rank 0 (0I0): is missing; W is half of a backward and needs I, the other half: add 0I0 to rank 0"],
        ),
        (
            [["0F0", "0B0", "0W0"]],
            ["rank 0, cell 2 (0W0): stands beside 0B0, which is the full backward already; use B alone, or I and W"],
        ),
        (
            [["0F0", "0I0", "0B0", "0W0"]],
            ["rank 0, cell 1 (0I0): stands beside 0B0, which is the full backward already; use B alone, or I and W"],
        ),
        (
            [["0F0"], ["1F0"], []],
            ["rank 2: has no action; every rank holds a stage: leave the rank out"],
        ),
        (
            [["0F0", "1F0", "0F1"], ["1F1"]],
            ["rank 1, cell 0 (1F1): stage 1 lies on rank 0, and a stage lies on one rank; move its actions to one"],
        ),
        (
            [["0F0"], ["2F0"]],
            ["stage 1 has no action; stages are numbered from 0 without a gap: renumber or add it"],
        ),
        (
            [["0F1"], ["1F1"]],
            ["microbatch 0 has no action; microbatches are numbered from 0 without a gap: renumber or add it"],
        ),
        (
            [["0F0"] * 23],
            [
                *(
                    f"rank 0, cell {cell} (0F0): is already cell 0 of rank 0; an action is done once: delete one, or "
                    "correct its number"
                    for cell in range(1, 21)
                ),
                "2 more like the 20 before",
            ],
        ),
    ],
)
def test_a_finding_says_where_what_and_how_to_mend_it(rows: list, sentences: list[str]):
    """Rank, cell, rule and remedy, in one sentence; nothing is found twice."""
    assert [str(finding) for finding in Schedule.from_rows(rows).check()] == sentences


@pytest.mark.parametrize(
    "rows, sentence",
    [
        (
            [["0F0", "3F1"], ["1F0", "2F0"]],
            "rank 1, cell 1 (2F0): microbatch 0 passes through the other pipeline's stages; each of the 2 pipelines "
            "has its own share of the microbatches: change stage or microbatch",
        ),
        (
            [["0F0", "1F0", "2F1"]],
            "3 stages cannot be 2 pipelines of equal length; use num_pipelines=1, or add stages",
        ),
    ],
)
def test_two_pipelines_have_rules_of_their_own(rows: list, sentence: str):
    """Stages in two equal chains, microbatches in two halves."""
    assert str(Schedule.from_rows(rows, num_pipelines=2).check()[0]) == sentence


def test_causes_come_before_their_consequences():
    """A stage on two ranks, then what is missing, twice there, out of order; a deadlock last."""
    rows = [["0B0", "0F0", "0F0", "0F1"], ["1F1", "1F0"], ["0B1"]]
    assert kinds(rows) == ["misplaced", "missing", "missing", "duplicate", "order"]
    assert list(FindingKind)[-1] is FindingKind.DEADLOCK


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"num_microbatches": 10**12}, "1,000,000,000,000 microbatches on 2 stages need a forward each, and there are"),
        ({"num_microbatches": 1}, "rank 0 (0F1): is not F, B, I or W with a stage below 2 and a microbatch below 1"),
        ({"stage_ranks": (0,)}, "rank 1 (1F0): is not F, B, I or W with a stage below 1 and a microbatch below 2"),
        ({"num_pipelines": 0}, "2 stages cannot be 0 pipelines of equal length; use num_pipelines=1, or add stages"),
        ({"stage": np.array([0, -1, 1, 1], np.int32)}, "rank 0 (-1F1): is not F, B, I or W with a stage below 2"),
    ],
)
def test_columns_that_contradict_each_other_are_found_without_a_table(change: dict, sentence: str):
    """What no table can hold is said first, and alone."""
    broken = dataclasses.replace(Schedule.from_rows([["0F0", "0F1"], ["1F0", "1F1"]]), **change)
    assert str(broken.check()[0]).startswith(sentence)


def test_simulate_refuses_with_the_first_finding():
    """A schedule that cannot run has no times."""
    stuck = Schedule.from_rows([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    with pytest.raises(InvalidInputError, match=r"rank 0 cannot do 0B0 \(cell 1\) until rank 1 has done 1B0"):
        simulate(stuck, Durations(F=1, B=2))


def test_the_shortest_circle_is_shown():
    """Four ranks hang; two of them would hang alone, and only these are named."""
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"], ["2F0", "2B0", "2F1", "2B1"]]
    rows.append(["3F0", "3F1", "3B0", "3B1"])
    (finding,) = Schedule.from_rows(rows).check()
    assert finding.kind is FindingKind.DEADLOCK
    assert [f"rank {rank} cannot" in finding.reason for rank in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("number", [1 << 20, -1, 10**12])
def test_absurd_numbers_are_refused_before_anything_is_allocated(number: int):
    """A stage or microbatch that so few actions cannot have."""
    for action in (Action(number, schedule("GPipe", num_ranks=1, num_microbatches=1)[0].kind, 0), f"0F{number}"):
        with pytest.raises(InvalidInputError):
            Schedule.from_rows([["0F0", action]])


def actions(kinds: str) -> st.SearchStrategy[str]:
    return st.builds("{}{}{}".format, st.integers(0, 5), st.sampled_from(kinds), st.integers(0, 3))


WEIRD_CELL = st.one_of(actions("FBIW"), st.tuples(actions("F"), actions("BIW")))
WEIRD_ROWS = st.lists(st.lists(WEIRD_CELL, max_size=8), min_size=1, max_size=5)


@given(WEIRD_ROWS.filter(any), st.integers(1, 2))
def test_any_rows_can_be_checked_and_what_passes_can_be_simulated(rows: list, num_pipelines: int):
    """The checker never raises, its sentences can be read, and it agrees with the simulator."""
    weird = Schedule.from_rows(rows, num_pipelines=num_pipelines)
    findings = weird.check()
    assert all(str(finding) for finding in findings)
    if not findings:
        assert len(simulate(weird, Durations(F=1, B=2))) == len(weird)


@given(
    st.sampled_from(schedule_names()),
    st.sampled_from([(2, 4), (2, 8), (4, 8)]),
    st.integers(0, 6),
    st.randoms(use_true_random=False),
)
def test_a_deadlock_is_found_exactly_where_torch_cannot_lower(
    name: str, size: tuple[int, int], swaps: int, choice: random.Random
):
    """In valid schedules, some cells swapped: torch's `_add_send_recv` gets stuck or does not; overlapped cells too."""
    valid = schedule(name, num_ranks=size[0], num_microbatches=size[1])
    rows = valid.rows
    for _ in range(swaps):
        row = choice.choice(rows)
        i = choice.randrange(len(row))
        j = min(len(row) - 1, i + choice.choice([1, 1, 2, 5]))
        row[i], row[j] = row[j], row[i]
    changed = Schedule.from_rows(rows, num_pipelines=valid.num_pipelines)
    found = {finding.kind for finding in changed.check()}
    assert found <= {FindingKind.ORDER, FindingKind.DEADLOCK}
    if valid.num_pipelines == 1:
        assert (FindingKind.DEADLOCK in found) == (not _torch_can_lower(changed))
    if not found:
        simulate(changed, Durations(F=1, B=2))
    else:
        with pytest.raises(InvalidInputError):
            simulate(changed, Durations(F=1, B=2))


def _torch_can_lower(changed: Schedule) -> bool:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = {
        rank: [
            schedules._Action.from_str(str(cell[0]) if len(cell) == 1 else f"({cell[0]};{cell[1]})OVERLAP_F_B")
            for cell in row
        ]
        for rank, row in enumerate(changed.rows)
    }
    try:
        schedules._add_send_recv(theirs, lambda stage: changed.stage_ranks[stage], changed.num_stages)
    except AssertionError:  # "Malformed compute schedule, can't schedule sends/recvs"
        return False
    return True
