"""Models that are more than a chain of plain layers: each trains as in one process, under full and split backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import vizkit as vk
from tests.distributed.pipelines import WIDTH, make_batch, make_stages

MICROBATCHES = 4
Forward = Callable[..., Any]
MakeStages = Callable[[int], list[nn.Module]]
Tensors = dict[str, torch.Tensor]


class Layer(nn.Module):
    """A linear layer and a vector, put together by `forward_of(layer, *inputs)`."""

    def __init__(self, forward_of: Forward) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.forward_of = forward_of

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.forward_of(self, *inputs)


def plain(layer: Layer, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return layer.linear(x)


def of(*first: Forward, then: Forward = plain) -> MakeStages:
    """Stages with these forwards, and as many more with `then` as the schedule has."""

    def make(num_stages: int) -> list[nn.Module]:
        torch.manual_seed(3)
        return [Layer(forward_of) for forward_of in [*first, *[then] * num_stages][:num_stages]]

    return make


def frozen(stages: slice) -> MakeStages:
    def make(num_stages: int) -> list[nn.Module]:
        made = of()(num_stages)
        for stage in made[stages]:
            stage.requires_grad_(False)
        return made

    return make


def with_a_branch(layer: Layer, x: torch.Tensor) -> Any:
    """The second output comes from parameters alone, and from a weight that the first output needs too."""
    return layer.linear(x), layer.linear(layer.vector).expand_as(x)


def multiplied(layer: Layer, x: torch.Tensor, factor: torch.Tensor | float = 1.0) -> torch.Tensor:
    return layer.linear(x * factor)


def detached(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.linear(x.detach()) * layer.vector


def used_twice(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """The vector and the bias belong to one use of the weight each."""
    weight = layer.linear.weight
    return torch.addmm(layer.linear.bias, torch.addmm(layer.vector, x, weight).tanh(), weight)


def changed_in_place(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.linear(nn.functional.relu(x, inplace=True))


def with_masks(layer: Layer, x: torch.Tensor) -> Any:
    return layer.linear(x), x > 0, x.long()


def half_used(layer: Layer, x: torch.Tensor) -> Any:
    return layer.linear(x), layer.vector * x


def without_parameters(num_stages: int) -> list[nn.Module]:
    return [make_stages(1)[0], *(nn.Tanh() for _ in range(num_stages - 1))]


def one_module_at_both_ends(num_stages: int) -> list[nn.Module]:
    """Where both ends lie on one rank, as in a V."""
    made = of()(num_stages)
    return [*made[:-1], made[0]] if num_stages == 4 else made


def normalised(num_stages: int) -> list[nn.Module]:
    return [nn.Sequential(stage, nn.BatchNorm1d(WIDTH)) for stage in make_stages(num_stages)]


def in_float64(num_stages: int) -> list[nn.Module]:
    return [of(lambda layer, x: layer.linear(x).double())(1)[0], *(s.double() for s in of()(num_stages - 1))]


MODELS: dict[str, MakeStages] = {
    "the first stage is frozen": frozen(slice(1)),
    "the last stage is frozen": frozen(slice(-1, None)),
    "only the last stage is trained": frozen(slice(-1)),
    "a branch depends on no input": of(plain, with_a_branch, then=multiplied),
    "a branch of the first stage does": of(with_a_branch, then=multiplied),
    "a stage detaches its input": of(plain, detached),
    "a stage uses a weight twice": of(then=used_twice),
    "two stages are one module": one_module_at_both_ends,
    "stages change their input in place": of(plain, then=changed_in_place),
    "masks and whole numbers are handed on": of(with_masks),
    "a stage ignores what it is given": of(half_used),
    "stages have no parameters": without_parameters,
    "buffers count microbatches": normalised,
    "the dtype changes on the way": in_float64,
}


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Of each output of the last stage."""
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([nn.functional.mse_loss(tensor, target) for tensor in outputs]).sum()


def state_of(module: nn.Module) -> Tensors:
    """Gradients, zeros where there is none, and buffers."""
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters()}
    return gradients | dict(module.named_buffers())


def train_all(names: list[str], schedule: vk.Schedule) -> dict[str, dict[int, Tensors]]:
    x, y = make_batch(2 * MICROBATCHES)
    found = {}
    for name in names:
        pipe = vk.pipeline(schedule, MODELS[name](schedule.num_stages), loss_of)
        pipe.step(x, target=y)
        found[name] = {stage: state_of(pipe.module(stage)) for stage in pipe.stages}
    return found


def train_alone(make: MakeStages, num_stages: int) -> list[Tensors]:
    """One process, microbatch after microbatch, as batch norm sees them."""
    stages = make(num_stages)
    for x, y in zip(*(part.chunk(MICROBATCHES) for part in make_batch(2 * MICROBATCHES)), strict=True):
        handed_on: Any = (x,)
        for stage in stages:
            output = stage(*handed_on)
            handed_on = output if isinstance(output, tuple) else (output,)
        (loss_of(handed_on, y) / MICROBATCHES).backward()
    return [state_of(stage) for stage in stages]


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZBVZeroBubble"])
def test_every_parameter_gets_its_whole_gradient(name: str) -> None:
    """Torch's split backward alone gives none to a parameter whose path meets none from the inputs, and fails on
    a weight that is used twice; and no stage of torch's may change in place what it has received."""
    schedule = vk.schedule(name, num_ranks=2, num_microbatches=MICROBATCHES)
    run = vk.launch(train_all, list(MODELS), schedule, world_size=2)
    for model, make in MODELS.items():
        expected = train_alone(make, schedule.num_stages)
        for found in run.results:
            for stage, tensors in found[model].items():
                torch.testing.assert_close(
                    tensors, expected[stage], msg=lambda text, what=f"{model}, stage {stage}": f"{what}: {text}"
                )


class Keeps(nn.Module):
    """Returns its buffer, which the next microbatch overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept.copy_(x)


def infer(schedule: vk.Schedule) -> torch.Tensor | None:
    return vk.pipeline(schedule, [Keeps(), Keeps()]).step(make_batch(2 * MICROBATCHES)[0]).output


def test_what_lies_in_a_buffer_is_sent_as_it_was() -> None:
    """On its way to the next stage, and as the pipeline's output, until the step ends."""
    schedule = vk.schedule("forward-only", num_ranks=2, num_microbatches=MICROBATCHES)
    run = vk.launch(infer, schedule, world_size=2)
    torch.testing.assert_close(run.results[1], make_batch(2 * MICROBATCHES)[0])


def unfreeze(schedule: vk.Schedule) -> None:
    x, y = make_batch(2 * MICROBATCHES)
    stages = frozen(slice(1))(2)
    pipe = vk.pipeline(schedule, stages, nn.MSELoss())
    pipe.step(x, target=y)
    stages[0].requires_grad_(True)
    pipe.step(x, target=y)


def test_a_stage_that_is_unfrozen_later_needs_a_new_pipeline() -> None:
    """The next stage sends no gradients back to it, and would go on so."""
    schedule = vk.schedule("1F1B", num_ranks=2, num_microbatches=MICROBATCHES)
    with pytest.raises(vk.RankFailedError) as caught:
        vk.launch(unfreeze, schedule, world_size=2)
    assert caught.value.rank == 0
    assert (
        "output of stage 0='float32[2, 6]': needs gradients and did not in the first step, when the next stage was "
        "told that it sends none back; make a new vk.pipeline on each rank after unfreezing parameters"
    ) in str(caught.value)


# ---- data parallelism beside it ------------------------------------------------------------------------------------


def with_ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group())


def with_ddp_inside(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.Sequential(with_ddp(module, mesh))


def with_fsdp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh)


WRAPPED = [(with_ddp, "1F1B"), (with_fsdp, "1F1B"), (with_fsdp, "ZBVZeroBubble")]
REFUSED = [
    (
        with_ddp,
        "ZB-H1",
        "='DistributedDataParallel': reduces gradients in hooks of the full backward, and ZB-H1 splits it into I and W",
    ),
    (
        with_ddp_inside,
        "1F1B",
        "='0': is wrapped in DDP inside the stage, where the pipeline cannot tell it which backward is the last; wrap "
        "the module of the whole stage",
    ),
]


def data_parallel() -> tuple[list[list[list[torch.Tensor]]], list[str]]:
    """Two pipelines of two ranks, each with its half of the batch: gradients after two steps, and what is refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    x, y = (part.chunk(2)[mesh.get_local_rank("dp")] for part in make_batch(4 * MICROBATCHES))

    def make(wrap: Callable[[nn.Module, DeviceMesh], nn.Module], name: str) -> vk.Pipeline:
        schedule = vk.schedule(name, num_ranks=2, num_microbatches=MICROBATCHES)
        stages = make_stages(schedule.num_stages)
        return vk.pipeline(
            schedule, lambda stage: wrap(stages[stage], mesh["dp"]), nn.MSELoss(), group=mesh.get_group("pp")
        )

    found, messages = [], []
    for wrap, name in WRAPPED:
        pipe = make(wrap, name)
        for _ in range(2):
            pipe.step(x, target=y)
        grads = ([p.grad for p in pipe.module(stage).parameters()] for stage in pipe.stages)
        found.append([[g.full_tensor() if hasattr(g, "full_tensor") else g for g in of_stage] for of_stage in grads])
    for wrap, name, _ in REFUSED:
        with pytest.raises(vk.InvalidInputError) as caught:
            make(wrap, name)
        messages.append(str(caught.value))
    return found, messages


def test_stages_in_ddp_or_sharded_are_reduced_or_refused() -> None:
    """Gradients are those of the whole batch on each rank, added up over two steps."""
    run = vk.launch(data_parallel, world_size=4)
    x, y = make_batch(4 * MICROBATCHES)
    for rank, (found, messages) in enumerate(run.results):
        for (_, name), by_stage in zip(WRAPPED, found, strict=True):
            schedule = vk.schedule(name, num_ranks=2, num_microbatches=MICROBATCHES)
            stages = make_stages(schedule.num_stages)
            for _ in range(2):
                nn.functional.mse_loss(nn.Sequential(*stages)(x), y).backward()
            expected = [[p.grad for p in stages[s].parameters()] for s in schedule.stages_of(rank // 2)]
            torch.testing.assert_close(by_stage, expected, msg=lambda text, n=name: f"{n}: {text}")
        for message, (_, _, expected_text) in zip(messages, REFUSED, strict=True):
            assert expected_text in message
