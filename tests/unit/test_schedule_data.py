"""A schedule is data: it is written as rows, is compared, travels, and stays as it is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest

import vizkit as vk
from vizkit.schedules import Schedule
from vizkit.trace import SpanKind

COLUMNS = ("offsets", "kind", "stage", "microbatch", "joined")
ONE_RANK = {"num_microbatches": 2, "stage_ranks": [0], "offsets": [0, 2], "stage": [0, 0], "microbatch": [0, 1]}


@pytest.mark.parametrize("name", vk.schedule_names())
def test_what_a_schedule_prints_can_be_read_back(name: str):
    """A line for each rank, a word for each cell, `+` between two that overlap."""
    schedule = vk.schedule(name, num_ranks=4, num_microbatches=8)
    rows = [line.split() for line in str(schedule).splitlines()]
    assert Schedule.from_rows(rows, num_pipelines=schedule.num_pipelines) == schedule


def test_a_row_is_any_iterable_of_cells_and_a_cell_text_or_actions():
    forward, backward = vk.Action(0, SpanKind.FORWARD, 0), vk.Action(0, "B", 0)
    expected = Schedule.from_rows([["0F0", "0B0"]])
    for rows in (
        [[forward, backward]],
        [(" 0F0", None, "", ("0B0",))],
        np.array([["0F0", "0B0"]]),
        iter([["0F0", "0B0"]]),
    ):
        assert Schedule.from_rows(rows) == expected


NOT_ROWS = [
    (None, "rows=None: are a list of lists; write [['0F0', '0B0']] for one rank"),
    ("0F0 0B0", "rows='0F0 0B0': are a list of lists; write [['0F0', '0B0']] for one rank"),
    ({0: ["0F0"]}, "rows={0: ['0F0']}: are a list of lists; write [['0F0', '0B0']] for one rank"),
    (["0F0 0B0"], "rows[0]='0F0 0B0': a row is a list of cells; write ['0F0', '0B0'], or '0F0 0B0'.split()"),
    ([["0F0"], None], "rows[1]=None: a row is a list of cells; write ['0F0', '0B0'], or '0F0 0B0'.split()"),
    ([[], []], "rows=[[], []]: a schedule has one action or more; write cells like 0F0"),
    ([[5]], "action=5: is not stage, letter (F, B, I or W), microbatch; write it like 2F0"),
    ([["0F"]], "action='0F': is not stage, letter (F, B, I or W), microbatch; write it like 2F0"),
    ([["0f0"]], "action='0f0': is not stage, letter (F, B, I or W), microbatch; write it like 2F0"),
    ([["-1F0"]], "action='-1F0': is not stage, letter (F, B, I or W), microbatch; write it like 2F0"),
    (
        [[vk.Action(-1, SpanKind.FORWARD, 0)]],
        "action='-1F0': is not stage, letter (F, B, I or W), microbatch; write it like 2F0",
    ),
    (
        [[vk.Action(0, SpanKind.SEND, 0)]],
        "action='0send0': is not stage, letter (F, B, I or W), microbatch; write it like 2F0",
    ),
    (
        [["0F0", "0F9999"]],
        "action='0F9999': stages and microbatches are numbered from 0 without a gap; renumber them",
    ),
    (
        [["0F0", "0B0+0F1"]],
        "cell='0B0+0F1': only a forward and a backward overlap, in this order; "
        "write a tuple of two, such as ('0F7', '7B3')",
    ),
]


@pytest.mark.parametrize(("rows", "message"), NOT_ROWS, ids=[str(rows) for rows, _ in NOT_ROWS])
def test_what_is_no_schedule_is_refused_with_the_cell_at_fault(rows: Any, message: str):
    with pytest.raises(vk.InvalidInputError) as error:
        Schedule.from_rows(rows)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": [0, 3]}, "offsets=[0, 3]: do not divide 2 actions among ranks; go from 0 to the last action"),
        (
            {"offsets": [0, 2, 1, 2]},
            "offsets=[0, 2, 1, 2]: do not divide 2 actions among ranks; go from 0 to the last action",
        ),
        ({"stage": [0]}, "stage=(1,): there are 2 actions; give one entry for each"),
        ({"joined": [False]}, "joined=(1,): there are 2 actions; give one entry for each"),
        ({"kind": [0, 200]}, "kind=200: there are 19 kinds; give codes, such as SpanKind('F').code"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(vk.InvalidInputError) as error:
        Schedule.from_columns("columns", **{**ONE_RANK, "kind": [0, 0], **changes})
    assert str(error.value) == message


@pytest.mark.parametrize(
    "travel",
    [
        copy.copy,
        copy.deepcopy,
        lambda s: pickle.loads(pickle.dumps(s)),
        lambda s: cloudpickle.loads(cloudpickle.dumps(s)),
    ],
)
def test_a_copy_that_travelled_is_equal_and_as_read_only(travel):
    """Schedules go to the ranks that run them."""
    schedule = vk.schedule("DualPipe", num_ranks=2, num_microbatches=4)
    ranks = schedule.rank.tolist()
    copied = travel(schedule)
    assert (copied, copied.name, copied.num_pipelines, copied.rank.tolist()) == (schedule, "DualPipe", 2, ranks)
    for column in COLUMNS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(copied, column)[0] = 0


def test_schedules_are_equal_if_they_do_the_same():
    """Names do not count; order, ranks and overlap do."""
    apart = Schedule.from_rows([["0F0", "0F1", "0B0", "0B1"]])
    assert apart == Schedule.from_rows([["0F0", "0F1", "0B0", "0B1"]], name="another")
    assert apart != Schedule.from_rows([["0F0", ("0F1", "0B0"), "0B1"]])
    assert apart != Schedule.from_rows([["0F1", "0F0", "0B0", "0B1"]])
    assert apart != Schedule.from_rows([[], ["0F0", "0F1", "0B0", "0B1"]])
    assert apart != apart.rows


def test_a_large_schedule_is_shown_in_one_line():
    assert repr(vk.schedule("GPipe", num_ranks=64, num_microbatches=4096)) == (
        "Schedule('GPipe', 64 ranks, 64 stages, 4096 microbatches, 524,288 actions)"
    )
