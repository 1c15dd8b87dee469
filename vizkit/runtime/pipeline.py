"""Runs a pipeline schedule for real, inside a rank: `vizkit.pipeline`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from vizkit.errors import InvalidInputError
from vizkit.runtime import pipeline_checks as checks
from vizkit.runtime.batches import Signature, join, signature_of, split
from vizkit.runtime.device import device
from vizkit.runtime.layers import split_layers
from vizkit.runtime.pipeline_runtime import ScheduleRuntime
from vizkit.runtime.pipeline_stage import LossFunction, RecordedStage
from vizkit.schedules.schedule import Schedule

Modules = nn.Sequential | Sequence[nn.Module] | Callable[[int], nn.Module]


def pipeline(
    schedule: Schedule,
    modules: Modules,
    loss_fn: LossFunction | None = None,
    *,
    loss_reduction: str | None = None,
    group: ProcessGroup | None = None,
) -> Pipeline:
    """A model in stages on the ranks of this launch, trained or run by `schedule`; call it alike on each rank.

    - `schedule`: from `vk.schedule`, CSV or rows; torch's pipeline runtime executes it.
    - `modules`: an `nn.Sequential`, which `vk.split_layers` divides; or a list with one module for each stage; or a
      function that makes the module of a stage, called for this rank's stages only, so that weights which it ties over
      ranks go unseen. A stage takes what the one before returns: a tensor or a tuple of tensors. For data parallelism
      beside it, wrap each stage in DDP (with full backwards) or `fully_shard`.
    - `loss_fn(output, target)` gives one number for each microbatch; needed where the schedule has backwards.
    - `loss_reduction`: "mean" (the loss of the batch is the mean over its microbatches, and so are the gradients)
      or "sum". Defaults to what `loss_fn` says of itself (`reduction`), else "mean". A mean over what differs from
      microbatch to microbatch, such as tokens that are not padding, is not the batch's mean: divide a sum yourself.
    - `group`: the process group whose ranks hold the stages, such as one axis of a mesh; default: all ranks.

    Raises `InvalidInputError` before anything runs: a schedule that does not fit the ranks or cannot run, a wrong
    number of modules, one parameter on stages of two ranks, DDP where it would not reduce, a missing loss.

    >>> import torch, vizkit as vk
    >>> from torch import nn
    >>> def train(x, y):
    ...     schedule = vk.schedule("1F1B", num_ranks=2, num_microbatches=4)
    ...     model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    ...     pipe = vk.pipeline(schedule, model, nn.MSELoss())
    ...     optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    ...     result = pipe.step(x, target=y)  # gradients add up, as those of loss.backward() do
    ...     optimizer.step()
    ...     return str(result)
    >>> vk.launch(train, torch.ones(8, 3), torch.ones(8, 1), world_size=2).results
    ['loss n/a (rank 1 has the last stage)', 'loss ...']
    """
    checks.check_schedule(schedule, group)
    checks.check_loss(schedule, loss_fn)
    local = schedule.stages_of(dist.get_rank(group))
    return Pipeline(
        schedule=schedule,
        modules={stage: module.to(_device()) for stage, module in _local_modules(modules, schedule, local).items()},
        loss_fn=loss_fn,
        loss_reduction=checks.reduction(loss_fn, loss_reduction),
        group=group,
    )


def _local_modules(modules: Modules, schedule: Schedule, local: Sequence[int]) -> dict[int, nn.Module]:
    if isinstance(modules, nn.Sequential):
        made: Sequence[nn.Module] = split_layers(modules, schedule.num_stages)
    elif isinstance(modules, (nn.ModuleList, list, tuple)):
        made = list(modules)
    elif callable(modules) and not isinstance(modules, nn.Module):
        return {stage: checks.check_module(stage, modules(stage), schedule) for stage in local}
    else:
        raise InvalidInputError.because(
            "modules",
            type(modules).__name__,
            "is neither an nn.Sequential, nor a list of modules, nor a function of the stage",
            "write the model as an nn.Sequential of its layers",
        )
    checks.check_modules(made, schedule)
    return {stage: made[stage] for stage in local}


@dataclass(frozen=True)
class StepResult:
    """What a step gave on this rank; all None where another rank has the last stage.

    `loss` is the batch's loss (mean or sum of `losses`, one for each microbatch), `output` the last stage's output for
    the whole batch, without gradients.

    >>> print(StepResult(2.302585, [2.3, 2.31]), StepResult(owner=3), sep="\\n")
    loss 2.3026
    loss n/a (rank 3 has the last stage)
    """

    loss: float | None = None
    losses: list[float] | None = None
    output: Any = field(default=None, repr=False)
    owner: int | None = None
    """The rank that has the last stage, where it is another."""

    def __str__(self) -> str:
        if self.loss is not None:
            return f"loss {self.loss:.5g}"
        return "loss n/a" + (f" (rank {self.owner} has the last stage)" if self.owner is not None else "")


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A model in stages, of which `modules` holds this rank's; made by `vizkit.pipeline`."""

    schedule: Schedule
    modules: Mapping[int, nn.Module]
    loss_fn: LossFunction | None
    loss_reduction: str
    group: ProcessGroup | None = None
    _runtimes: dict[Signature, ScheduleRuntime] = field(default_factory=dict, init=False, repr=False)

    @property
    def stages(self) -> list[int]:
        """The stages on this rank."""
        return list(self.modules)

    @property
    def has_first_stage(self) -> bool:
        return 0 in self.modules

    @property
    def has_last_stage(self) -> bool:
        return self.schedule.num_stages - 1 in self.modules

    def module(self, stage: int) -> nn.Module:
        """The module of a stage of this rank; raises `InvalidInputError` for a stage that lies elsewhere."""
        if stage not in self.modules:
            raise InvalidInputError.because(
                "stage", stage, "does not lie on this rank", f"use one of {self.stages}, the stages of this rank"
            )
        return self.modules[stage]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, each once; what this rank's optimizer updates."""
        return iter(dict.fromkeys(p for module in self.modules.values() for p in module.parameters()))

    def train(self, mode: bool = True) -> Pipeline:
        """Puts this rank's modules into training mode (dropout on), or into evaluation mode."""
        for module in self.modules.values():
            module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Puts this rank's modules into evaluation mode; to run without backwards, use a forward-only schedule."""
        return self.train(False)

    def step(self, *inputs: Any, target: Any = None) -> StepResult:
        """Runs the whole batch through the schedule once, and adds to the gradients where it has backwards.

        `inputs` are what the first stage takes, batch dimension first, and are given on each rank: only the first
        stage's rank uses them, the others learn the shape. `target` is needed on the last stage's rank. Tensors may
        stand in tuples and dicts. A batch of another shape than the last is fine. Raises `InvalidInputError` for a
        batch that does not divide into the schedule's microbatches, with the nearest sizes that do.
        """
        trains = self.schedule.has_backward
        if trains and not torch.is_grad_enabled():
            raise InvalidInputError.because(
                "schedule",
                self.schedule.name,
                "has backwards, and torch.no_grad() forbids them",
                'leave no_grad(), or run vk.schedule("forward-only", ...) inside it',
            )
        count = self.schedule.num_microbatches
        microbatches, batch = split("x", inputs, count)
        runtime = self._runtime(signature_of(microbatches[0]))
        targets = self._targets(target, batch) if self.has_last_stage else None
        for stage in runtime.stages:
            stage.targets = targets
        with torch.set_grad_enabled(trains):
            runtime.run([_on_device(m) for m in microbatches] if self.has_first_stage else None)
        return self._result(runtime)

    def _targets(self, target: Any, batch: int) -> list[Any] | None:
        if target is None and (self.schedule.has_backward):
            raise InvalidInputError.because(
                "target", None, "the loss of the last stage compares with it", "call step(x, target=y) on each rank"
            )
        if target is None:
            return None
        targets, size = split("target", target, self.schedule.num_microbatches)
        if size != batch:
            raise InvalidInputError.because(
                "target", size, f"has another batch size than the input, which has {batch}", "give one target a sample"
            )
        return [_on_device(t) for t in targets]

    def _runtime(self, signature: Signature) -> ScheduleRuntime:
        """The runtime for microbatches that look like this: buffers and shapes depend on it."""
        if signature not in self._runtimes:
            schedule = self.schedule
            scale = 1 / schedule.num_microbatches if self.loss_reduction == "mean" else 1.0
            make = functools.partial(
                RecordedStage,
                num_microbatches=schedule.num_microbatches,
                has_backward=schedule.has_backward,
                splits_backward=schedule.splits_backward,
                loss_fn=self.loss_fn,
                loss_scale=scale,
                signature=signature,
            )
            stages = [
                make(module, stage, schedule.num_stages, _device(), self.group)
                for stage, module in self.modules.items()
            ]
            self._runtimes[signature] = ScheduleRuntime(stages, schedule)
        return self._runtimes[signature]

    def _result(self, runtime: ScheduleRuntime) -> StepResult:
        if not self.has_last_stage:
            owner = self.schedule.stage_ranks[-1]
            return StepResult(owner=owner if self.group is None else dist.get_global_rank(self.group, owner))
        last = runtime.stages[-1]
        order = range(self.schedule.num_microbatches)
        output = join([last.outputs[microbatch] for microbatch in order])
        if not last.losses:
            return StepResult(output=output)
        losses = [last.losses[microbatch].item() for microbatch in order]
        return StepResult(sum(losses) * last.loss_scale, losses, output)


def _device() -> torch.device:
    return cast(torch.device, device())


def _on_device(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(_device()), tree)
