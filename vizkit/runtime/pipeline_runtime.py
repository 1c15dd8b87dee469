"""Torch's pipeline runtime, run with a `Schedule` of vizkit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.pipelining.schedules import (
    OVERLAP_F_B,
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from vizkit.runtime.pipeline_stage import RecordedStage
from vizkit.schedules.actions import Cell
from vizkit.schedules.schedule import Schedule

_TORCH_LOGGER = logging.getLogger("torch.distributed.pipelining.schedules")


class ScheduleRuntime(_PipelineScheduleRuntime):
    """Runs this rank's part of a schedule that `Schedule.check` has found able to run.

    Torch places the sends and receives. The stages scale their losses themselves: torch divides gradients after each
    step, which is wrong where gradients of several steps accumulate.
    """

    def __init__(self, stages: Sequence[RecordedStage], schedule: Schedule) -> None:
        super().__init__(list(stages), schedule.num_microbatches, scale_grads=False)
        self.stages = list(stages)
        self._has_backward = schedule.has_backward
        self._place_communication(schedule)

    def run(self, microbatches: list[tuple[Any, ...]] | None) -> None:
        """One step: `microbatches` are the inputs of the first stage, None where it lies on another rank."""
        for stage in self._stages:
            stage.clear_runtime_states()
        _TORCH_LOGGER.disabled = True  # on an error it writes the whole schedule, once on each rank
        try:
            self._step_microbatches(microbatches)
        finally:
            _TORCH_LOGGER.disabled = False

    def _place_communication(self, schedule: Schedule) -> None:
        """What torch does on loading a schedule, less its own check, which knows none without backwards."""
        ranks = dict(enumerate(schedule.stage_ranks))
        self.stage_index_to_group_rank = ranks
        for stage in self._stages:
            stage.stage_index_to_group_rank = ranks
        lowered = {
            rank: _add_reduce_grad(list(_add_unshard_reshard(actions)), schedule.num_microbatches)
            for rank, actions in torch_actions(schedule).items()
        }
        self.pipeline_order_with_comms = _add_send_recv(lowered, ranks.__getitem__, schedule.num_stages)  # type: ignore[arg-type]

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to learn in advance: see `RecordedStage`."""

    def _maybe_compute_loss(self, *args: Any, **kwargs: Any) -> None:
        """The last stage has done so, within its forward."""

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> torch.Tensor | None:
        return stage.to_differentiate.pop(mb_index, None)

    def _update_losses(self, stages: Any, losses: Any) -> None:
        """The last stage keeps them."""


def torch_actions(schedule: Schedule) -> dict[int, list[_Action | None]]:
    """The schedule as torch's runtime reads it: a list of actions for each rank.

    >>> from vizkit.schedules import schedule
    >>> torch_actions(schedule("1F1B", num_ranks=2, num_microbatches=1))
    {0: [0F0, 0B0], 1: [1F0, 1B0]}
    """
    return {rank: [_torch_action(cell) for cell in row] for rank, row in enumerate(schedule.rows)}


def _torch_action(cell: Cell) -> _Action:
    parts = tuple(_Action(a.stage, _ComputationType(a.kind.value), a.microbatch) for a in cell)
    return parts[0] if len(parts) == 1 else _Action(-1, OVERLAP_F_B, None, parts)
