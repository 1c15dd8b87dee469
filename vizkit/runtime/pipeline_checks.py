"""What keeps a pipeline from running, found before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from vizkit.errors import InvalidInputError
from vizkit.schedules.schedule import Schedule

REDUCTIONS = {"mean": "mean", "batchmean": "mean", "sum": "sum"}
"""How losses of equal microbatches become the batch's, by what a loss function calls its own reduction."""


def check_schedule(schedule: Schedule, group: ProcessGroup | None) -> None:
    """Raises `InvalidInputError` for a schedule that torch's runtime cannot run on the ranks of this group."""
    if not isinstance(schedule, Schedule):
        raise InvalidInputError.because(
            "schedule", schedule, "is not a schedule", 'make one, such as vk.schedule("1F1B", ...)'
        )
    if not dist.is_initialized():
        raise InvalidInputError.because(
            "pipeline",
            schedule.name,
            "runs inside ranks, and this process is none",
            "call it in a function given to vk.launch",
        )
    if schedule.num_pipelines > 1:
        raise InvalidInputError.because(
            "schedule",
            schedule.name,
            f"sends microbatches through {schedule.num_pipelines} pipelines at once, which torch's runtime cannot",
            "simulate it with vk.simulate, or run DualPipeV",
        )
    size = dist.get_world_size(group)
    if schedule.num_ranks != size:
        where = "world_size" if group is None else "size of group"
        raise InvalidInputError.because(
            "schedule.num_ranks",
            schedule.num_ranks,
            f"{schedule.name} was built for {schedule.num_ranks} ranks, and here are {size} ({where}={size})",
            f"use num_ranks={size}, or a process group of {schedule.num_ranks} ranks as group=",
        )
    idle = [rank for rank in range(size) if not schedule.stages_of(rank)]
    if idle:
        raise InvalidInputError.because(
            "schedule", schedule.name, f"rank {idle[0]} has no stage", "give each rank a stage, or launch fewer ranks"
        )
    if findings := schedule.check():
        raise InvalidInputError.because(
            "schedule", schedule.name, str(findings[0]), "see all findings with schedule.check()"
        )


def check_modules(modules: Sequence[nn.Module], schedule: Schedule) -> None:
    """Raises `InvalidInputError` for a wrong number of modules and for a parameter that two ranks would hold."""
    if len(modules) != schedule.num_stages:
        raise InvalidInputError.because(
            "modules",
            len(modules),
            f"{schedule.name} has {schedule.num_stages} stages, and each needs one module",
            f"give {schedule.num_stages} modules, or an nn.Sequential, which is divided for you",
        )
    owners: dict[nn.Parameter, tuple[int, str]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in check_module(stage, module, schedule).named_parameters():
            first, first_name = owners.setdefault(parameter, (stage, name))
            ranks = schedule.stage_ranks[first], schedule.stage_ranks[stage]
            if ranks[0] != ranks[1]:
                raise InvalidInputError.because(
                    "modules",
                    name,
                    f"stage {stage} on rank {ranks[1]} shares this parameter with stage {first} ({first_name}) on rank "
                    f"{ranks[0]}: each rank would train a copy of its own",
                    "put both on one rank, or use two parameters and all-reduce their gradients after each step",
                )


def check_module(stage: int, module: Any, schedule: Schedule) -> nn.Module:
    """The module of a stage, if torch's runtime trains it right: DDP only around a whole stage with full backwards."""
    if not isinstance(module, nn.Module):
        raise InvalidInputError.because(
            f"module of stage {stage}", type(module).__name__, "is not an nn.Module", "wrap it in a class of nn.Module"
        )
    wrapped = [name for name, part in module.named_modules() if isinstance(part, DistributedDataParallel)]
    if any(wrapped):  # the module itself has no name
        raise InvalidInputError.because(
            f"module of stage {stage}",
            wrapped[-1],
            "is wrapped in DDP inside the stage, where the pipeline cannot tell it which backward is the last",
            "wrap the module of the whole stage",
        )
    if wrapped and schedule.splits_backward:
        raise InvalidInputError.because(
            f"module of stage {stage}",
            "DistributedDataParallel",
            f"reduces gradients in hooks of the full backward, and {schedule.name} splits it into I and W",
            "shard the module with fully_shard, all-reduce the gradients after each step, or take a schedule with B",
        )
    return module


def reduction(loss_fn: Any, asked_for: str | None) -> str:
    """How losses of microbatches become the batch's: as asked for, or as the loss function says of itself.

    >>> reduction(nn.MSELoss(reduction="sum"), None), reduction(nn.functional.mse_loss, None)
    ('sum', 'mean')
    >>> reduction(nn.KLDivLoss(reduction="batchmean"), None)
    'mean'
    >>> reduction(functools.partial(nn.functional.mse_loss, reduction="sum"), None)
    'sum'
    """
    keywords = loss_fn.keywords if isinstance(loss_fn, functools.partial) else {}
    found = asked_for or getattr(loss_fn, "reduction", None) or keywords.get("reduction") or "mean"
    if found not in REDUCTIONS:
        name, remedy = ("loss_reduction", "use") if asked_for else ("loss_fn.reduction", "make the loss function with")
        raise InvalidInputError.because(
            name, found, "is not how microbatches' losses become one", f'{remedy} "mean" or "sum"'
        )
    return REDUCTIONS[found]


def check_loss(schedule: Schedule, loss_fn: Any) -> None:
    """Raises `InvalidInputError` for a loss function that is none, and where backwards have none to start at."""
    if loss_fn is None and schedule.has_backward:
        raise InvalidInputError.because(
            "loss_fn",
            None,
            f"{schedule.name} has backwards, which start at a loss",
            "pass loss_fn=nn.MSELoss() or such",
        )
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, type)):
        raise InvalidInputError.because(
            "loss_fn", loss_fn, "is not a function of output and target", "pass loss_fn=nn.MSELoss() or such"
        )
