"""Torch's own pipeline schedules are the oracle: the same actions in the same order on every rank."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _add_send_recv,
    _ComputationType,
    _merge_bw,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

import vizkit as vk
from vizkit.schedules import Schedule

RANKS = range(1, 9)
MICROBATCHES = [*range(1, 11), 12, 13, 16, 20]
LOOPED = [1, 2, 3, 4]
STAGES_PER_RANK = {
    "GPipe": [1],
    "Interleaved1F1B": LOOPED,
    "LoopedBFS": LOOPED,
    "InterleavedZeroBubble": LOOPED,
    "ZBVZeroBubble": [2],
    "DualPipeV": [2],
}
KINDS = (torch_schedules.F, torch_schedules.B, torch_schedules.I, torch_schedules.W)
"""Torch's kinds, in the order of vizkit's codes."""
Row = list[tuple[int, _ComputationType, int, bool]]
"""A rank's actions: stage, kind, microbatch, and whether it overlaps with the one before."""


@pytest.mark.parametrize("name", STAGES_PER_RANK)
def test_every_rank_does_what_torch_has_it_do(name):
    """Action for action equal for 1 to 8 ranks, up to 20 microbatches."""
    compared = 0
    for sizes in itertools.product(RANKS, MICROBATCHES, STAGES_PER_RANK[name]):
        theirs, ours = torch_rows(name, *sizes), our_schedule(name, *sizes)
        assert (ours is None) == (theirs is None), sizes
        if ours is not None:
            assert rows_of(ours) == theirs, sizes
            compared += 1
    assert compared >= 50


def test_1f1b_does_what_torch_does():
    """1F1B is what torch's own loop runs, for every m, and what torch lists where torch's list is right.

    The list (`_get_pipeline_order`) counts the last rank's forwards from 1. For m < p torch's constructor refuses, and
    its loop works.
    """
    for p, m in itertools.product(RANKS, MICROBATCHES):
        ours = rows_of(vk.schedule("1F1B", num_ranks=p, num_microbatches=m))
        assert ours == [run_1f1b(p, m, rank) for rank in range(p)], (p, m)
        theirs = torch_rows("1F1B", p, m, 1)
        assert (theirs is None) == (m < p)
        assert theirs is None or ours[:-1] == theirs[:-1], (p, m)


@pytest.mark.parametrize("name", [*STAGES_PER_RANK, "1F1B"])
def test_torch_finds_no_deadlock(name):
    """Torch's own lowering places every send and receive of what vizkit builds."""
    for p, m in [(2, 4), (3, 6), (3, 7), (4, 8), (4, 14)]:
        ours = our_schedule(name, p, m, STAGES_PER_RANK.get(name, [1])[-1])
        if ours is not None:
            actions = {rank: _merge_bw(torch_actions(row)) for rank, row in enumerate(rows_of(ours))}
            lowered = _add_send_recv(actions, ours.stage_ranks.__getitem__, ours.num_stages)
            assert sum(map(len, lowered.values())) > sum(map(len, actions.values()))


def our_schedule(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule | None:
    """What vizkit builds, or None where it refuses the sizes."""
    try:
        return vk.schedule(
            name, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
        )
    except vk.InvalidInputError:
        return None


def torch_rows(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[Row] | None:
    """Each rank's actions as torch's class has them, idle cells left out; None where its constructor refuses."""
    stages = [
        SimpleNamespace(
            group_size=num_ranks, num_stages=num_ranks * stages_per_rank, group_rank=0, submod=torch.nn.Identity()
        )
        for _ in range(stages_per_rank)
    ]
    kind = get_schedule_class(name)
    single = issubclass(kind, PipelineScheduleSingle)
    try:
        with mock.patch.object(_PipelineScheduleRuntime, "_prepare_schedule_with_comms"):
            schedule = kind(stages[0] if single else stages, num_microbatches)
    except ValueError:
        return None
    rows = schedule._get_pipeline_order() if single else schedule.pipeline_order
    return [[part for action in rows[rank] for part in parts_of(action)] for rank in range(num_ranks)]


def parts_of(action: _Action | None) -> Row:
    """An action of torch's, two where two overlap; none for an idle cell and for what reduces gradients."""
    if action is None or action.computation_type is torch_schedules.REDUCE_GRAD:
        return []
    if action.sub_actions:
        return [(*part[:3], position > 0) for position, part in enumerate(action.sub_actions)]
    return [(*action[:3], False)]


def rows_of(schedule: Schedule) -> list[Row]:
    """Each rank's actions of a schedule of vizkit's."""
    kinds = [KINDS[code] for code in schedule.kind.tolist()]
    columns = (schedule.stage.tolist(), kinds, schedule.microbatch.tolist(), schedule.joined.tolist())
    actions = list(zip(*columns, strict=True))
    return [actions[start:end] for start, end in itertools.pairwise(schedule.offsets.tolist())]


def torch_actions(row: Row) -> list[_Action]:
    """A rank's actions as torch writes them."""
    actions: list[_Action] = []
    for *parts, joined in row:
        action = _Action(*parts)
        if joined:
            action = _Action(-1, torch_schedules.OVERLAP_F_B, None, (actions.pop(), action))
        actions.append(action)
    return actions


def run_1f1b(num_ranks: int, num_microbatches: int, rank: int) -> Row:
    """The passes that torch's own loop runs on a stage that only notes them."""
    done: Row = []
    stage = SimpleNamespace(
        stage_index=rank,
        get_fwd_recv_ops=lambda _: [],
        get_fwd_send_ops=lambda _: [],
        get_bwd_recv_ops=lambda _: [],
        get_bwd_send_ops=lambda _: [],
        forward_one_chunk=lambda microbatch, *_, **__: done.append((rank, torch_schedules.F, microbatch, False)),
        backward_one_chunk=lambda microbatch, **_: done.append((rank, torch_schedules.B, microbatch, False)),
        perform_reduce_grad=lambda _: None,
    )
    schedule = object.__new__(torch_schedules.Schedule1F1B)
    schedule._stage, schedule._num_stages, schedule._n_microbatches = stage, num_ranks, num_microbatches
    schedule.scale_grads = False
    schedule._check_inputs = lambda *_: ([()] * num_microbatches, [{}] * num_microbatches)
    schedule._initialize_stage = schedule._maybe_compute_loss = schedule._update_losses = lambda *_: None
    schedule._maybe_get_loss = lambda *_: None
    schedule._step_microbatches()
    return done
