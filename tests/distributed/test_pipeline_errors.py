"""What a pipeline refuses: before anything runs where that can be known, and never by hanging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vizkit as vk
from tests.distributed.pipelines import WIDTH, make_batch, make_stages


def schedule_of(name: str = "1F1B", num_ranks: int = 2, num_microbatches: int = 2) -> vk.Schedule:
    return vk.schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)


def make_pipeline(**changes: Any) -> vk.Pipeline:
    """A pipeline that works but for `changes`."""
    arguments = {"schedule": schedule_of(), "modules": make_stages(2), "loss_fn": nn.MSELoss()} | changes
    return vk.pipeline(**arguments)


def tied() -> list[nn.Module]:
    first, last = make_stages(2)
    last[0].weight = first[0].weight  # type: ignore[index]
    return [first, last]


# Each of these runs on both ranks; its error has to say all of the text.
def wrong_number_of_ranks() -> Any:
    return make_pipeline(schedule=schedule_of(num_ranks=4))


def bidirectional() -> Any:
    return make_pipeline(schedule=schedule_of("DualPipe", num_microbatches=4))


def cannot_run() -> Any:
    return make_pipeline(schedule=vk.Schedule.from_rows([["0F0", "0B0"], ["1B0", "1F0"]]))


def not_a_schedule() -> Any:
    return make_pipeline(schedule="1F1B")


def too_few_modules() -> Any:
    return make_pipeline(modules=make_stages(1))


def more_stages_than_layers() -> Any:
    return make_pipeline(modules=nn.Sequential(nn.Linear(WIDTH, WIDTH)))


def one_module_that_is_not_sequential() -> Any:
    return make_pipeline(modules=nn.Linear(WIDTH, WIDTH))


def a_stage_that_is_no_module() -> Any:
    return make_pipeline(modules=[nn.Tanh(), torch.tanh])


def tied_weights() -> Any:
    return make_pipeline(modules=tied())


def no_loss() -> Any:
    return make_pipeline(loss_fn=None)


def loss_without_parentheses() -> Any:
    return make_pipeline(loss_fn=nn.MSELoss)


def unknown_reduction() -> Any:
    return make_pipeline(loss_fn=nn.MSELoss(reduction="none"))


def elsewhere() -> Any:
    return make_pipeline().module(2)


def idle_rank() -> Any:
    return make_pipeline(schedule=vk.Schedule.from_rows([["0F0", "0B0"], []]), modules=make_stages(1))


REFUSED_BEFORE: list[tuple[Callable[[], Any], str]] = [
    (
        wrong_number_of_ranks,
        "schedule.num_ranks=4: 1F1B was built for 4 ranks, and here are 2 (world_size=2); use num_ranks=2, or a "
        "process group of 4 ranks as group=",
    ),
    (
        bidirectional,
        "schedule='DualPipe': sends microbatches through 2 pipelines at once, which torch's runtime cannot",
    ),
    (cannot_run, "schedule='custom': "),
    (not_a_schedule, "schedule='1F1B': is not a schedule; make one, such as vk.schedule("),
    (too_few_modules, "modules=1: 1F1B has 2 stages, and each needs one module; give 2 modules, or an nn.Sequential"),
    (more_stages_than_layers, "num_stages=2: there are only 1 layers, and each stage needs one; use num_stages=1"),
    (one_module_that_is_not_sequential, "modules='Linear': is neither an nn.Sequential, nor a list of modules"),
    (a_stage_that_is_no_module, "module of stage 1='builtin_function_or_method': is not an nn.Module"),
    (
        tied_weights,
        "modules='0.weight': stage 1 on rank 1 shares this parameter with stage 0 (0.weight) on rank 0: each rank "
        "would train a copy of its own; put both on one rank",
    ),
    (no_loss, "loss_fn=None: 1F1B has backwards, which start at a loss; pass loss_fn="),
    (
        loss_without_parentheses,
        "loss_fn=<class 'torch.nn.modules.loss.MSELoss'>: is not a function of output and target",
    ),
    (
        unknown_reduction,
        "loss_fn.reduction='none': is not how microbatches' losses become one; "
        'make the loss function with "mean" or "sum"',
    ),
    (elsewhere, "stage=2: does not lie on this rank; use one of [0], the stages of this rank"),
    (idle_rank, "schedule='custom': rank 1 has no stage; give each rank a stage, or launch fewer ranks"),
]


def collect(cases: list[Callable[[], Any]]) -> list[str]:
    """On each rank: what each case raises."""
    errors = []
    for case in cases:
        try:
            case()
            errors.append("nothing")
        except vk.InvalidInputError as error:
            errors.append(str(error))
    return errors


def test_what_cannot_work_is_refused_before_anything_runs() -> None:
    """Value, rule and remedy, on every rank alike, and no message has been sent."""
    run = vk.launch(collect, [case for case, _ in REFUSED_BEFORE], world_size=2)
    for rank, errors in enumerate(run.results):
        for (case, expected), found in zip(REFUSED_BEFORE, errors, strict=True):
            if case is elsewhere and rank == 1:
                expected = expected.replace("[0]", "[1]")
            assert found.startswith(expected), case.__name__
    assert not any(list(rank.calls) for rank in run.record.ranks)


def batch_of(size: int) -> Callable[[], Any]:
    def step() -> Any:
        x, y = make_batch(size)
        return make_pipeline(schedule=schedule_of(num_microbatches=4)).step(x, target=y)

    return step


def without_gradients() -> Any:
    x, y = make_batch(2)
    with torch.no_grad():
        make_pipeline().step(x, target=y)


def without_input() -> Any:
    make_pipeline().step()


def with_an_array() -> Any:
    make_pipeline().step(np.zeros((4, WIDTH)))


def with_a_scalar() -> Any:
    make_pipeline().step(torch.zeros(4, WIDTH), torch.tensor(0.5))


def of_two_sizes() -> Any:
    make_pipeline().step(torch.zeros(4, WIDTH), torch.zeros(2, WIDTH))


REFUSED_STEPS: list[tuple[Callable[[], Any], str]] = [
    (
        batch_of(10),
        "batch size of x=10: does not divide into 4 microbatches of equal size; use a batch of 8 or 12, or another "
        "num_microbatches",
    ),
    (batch_of(3), "batch size of x=3: does not divide into 4 microbatches of equal size; use a batch of 4, or another"),
    (batch_of(0), "batch size of x=0: has no sample; use a batch of 4, or another num_microbatches"),
    (without_gradients, "schedule='1F1B': has backwards, and torch.no_grad() forbids them; leave no_grad(), or run"),
    (without_input, "x='nothing': has no tensor; give each rank the whole batch as tensors"),
    (with_an_array, "x='ndarray': has no tensor; give each rank the whole batch as tensors, such as torch.as_tensor("),
    (
        with_a_scalar,
        "x=0.5: is a tensor without a batch dimension, and cannot be cut into microbatches; give a plain number, which "
        "every microbatch gets, or a tensor with one value for each sample",
    ),
    (of_two_sizes, "x=[2, 4]: its tensors differ in batch size, the first dimension; give tensors of one batch"),
]


def test_a_batch_that_does_not_fit_is_refused_on_every_rank() -> None:
    """All ranks see the same batch, so all refuse it and none waits for another."""
    run = vk.launch(collect, [case for case, _ in REFUSED_STEPS], world_size=2)
    for errors in run.results:
        for (_, expected), found in zip(REFUSED_STEPS, errors, strict=True):
            assert found.startswith(expected)


# ---- what only shows when it runs: the rank that finds it says so, and the launch ends ------------------------------


def step(modules: list[nn.Module], batch: int = 4, with_target: bool = True, **changes: Any) -> Any:
    x, y = make_batch(batch)
    return make_pipeline(modules=modules, **changes).step(x, target=y if with_target else None)


class Skips(nn.Module):
    """Wants what the first stage had, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + skip


class Returns(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.linear(x))


def in_a_dict(x: torch.Tensor) -> Any:
    return {"x": x}


def as_long_as_positive(x: torch.Tensor) -> torch.Tensor:
    as_long_as_positive.calls += 1  # type: ignore[attr-defined]
    return x[: as_long_as_positive.calls]  # type: ignore[attr-defined]


as_long_as_positive.calls = 0  # type: ignore[attr-defined]


def a_loss_that_fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise LookupError("no such class")


def a_loss_per_sample(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).sum(1)


@pytest.mark.parametrize(
    ("modules", "changes", "rank", "expected"),
    [
        (
            [nn.Linear(WIDTH, WIDTH), Skips()],
            {},
            1,
            "inputs of stage 1='float32[2, 6]': stage 0 returns 1 tensor, and the module of stage 1 cannot be called "
            "with that: missing a required argument: 'skip'; have stage 0 return what stage 1 takes; a tensor that "
            "skips a stage has to be handed through it, as one more output",
        ),
        (
            [Returns(in_a_dict), nn.Linear(WIDTH, WIDTH)],
            {},
            0,
            "output of stage 0='dict': a stage hands a tensor or a tuple of tensors to the next",
        ),
        (
            [Returns(as_long_as_positive), nn.Linear(WIDTH, WIDTH)],
            {},
            0,
            "output of stage 0='float32[2, 6]': the first microbatch gave float32[1, 6], and all microbatches of a "
            "pipeline have one shape",
        ),
        (
            [nn.Linear(WIDTH, 5), nn.Linear(WIDTH, WIDTH)],
            {},
            1,
            "in the forward of stage 1, which got float32[2, 5] from stage 0",
        ),
        (
            make_stages(2),
            {"with_target": False},
            1,
            "target=None: the loss of the last stage compares with it; call step(x, target=y) on each rank",
        ),
        (
            make_stages(2),
            {"loss_fn": a_loss_per_sample},
            1,
            "loss_fn='float32[2]': must return a tensor with one number; use a loss with reduction=",
        ),
        (
            make_stages(2),
            {"loss_fn": a_loss_that_fails},
            1,
            "LookupError: no such class\nin loss_fn, which got float32[2, 6], float32[2, 6] on stage 1",
        ),
    ],
    ids=["skip", "dict", "ragged", "width", "target", "loss", "failing loss"],
)
def test_what_shows_when_it_runs_names_the_stage(
    modules: list[nn.Module], changes: dict[str, Any], rank: int, expected: str
) -> None:
    """The rank at fault leads the report; the others stop instead of waiting for it."""
    with pytest.raises(vk.RankFailedError) as caught:
        vk.launch(step, modules, world_size=2, **changes)
    assert caught.value.rank == rank
    assert expected in str(caught.value)


def test_the_error_of_a_module_is_the_first_thing_said() -> None:
    """Not torch's wrapper around it: the learner's line, with the stage that ran it."""
    with pytest.raises(vk.RankFailedError) as caught:
        vk.launch(step, [nn.Linear(WIDTH, WIDTH), Returns(divide)], world_size=2)
    assert str(caught.value).startswith("rank 1 raised ZeroDivisionError: ")
    assert "in divide" in caught.value.remote_traceback
    assert "in the forward of stage 1, which got float32[2, 6] from stage 0" in caught.value.remote_traceback
    assert "exception" not in caught.value.remote_traceback  # one story: torch wraps the error in one of its own
    assert not any("Full Schedule" in log for log in caught.value.logs)


class Unkind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise KeyError("no gradient today")


@pytest.mark.parametrize(("name", "action"), [("1F1B", "backward"), ("ZB-H1", "backward for inputs")])
def test_the_error_of_a_backward_names_its_stage(name: str, action: str) -> None:
    """In a full and in a split backward."""
    with pytest.raises(vk.RankFailedError) as caught:
        vk.launch(
            step,
            [nn.Linear(WIDTH, WIDTH), Returns(Unkind.apply)],
            batch=6,
            schedule=schedule_of(name, 2, 3),
            world_size=2,
        )
    assert "no gradient today" in str(caught.value)
    assert f"in the {action} of stage 1" in caught.value.remote_traceback


def divide(x: torch.Tensor) -> torch.Tensor:
    return x * (1 // 0)


def only_one_steps() -> None:
    x, y = make_batch(4)
    pipe = make_pipeline()
    if pipe.has_last_stage:
        pipe.step(x, target=y)


def test_a_rank_that_does_not_step_is_named_at_once() -> None:
    """The ranks that wait for it are seen to wait for ever, long before a timeout."""
    with pytest.raises(vk.RanksStuckError, match="rank 0") as caught:
        vk.launch(only_one_steps, world_size=2, timeout_s=60)
    assert "returned" in str(caught.value)


def batches_of_two_sizes(sizes: list[tuple[int, int]]) -> None:
    import torch.distributed as dist

    pipe = make_pipeline()
    for pair in sizes:
        x, y = make_batch(pair[dist.get_rank()])
        pipe.step(x, target=y)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            [(4, 8)],
            "microbatch of x='float32[4, 6]': on the rank of stage 0 it is float32[2, 6]; give every rank",
        ),
        ([(4, 4), (8, 4)], "ranks 0 and 1 do not fit together"),
        ([(4, 4), (4, 8)], "ranks 0 and 1 do not fit together"),
    ],
    ids=["first", "sender", "receiver"],
)
def test_ranks_with_batches_of_different_sizes_do_not_hang(sizes: list[tuple[int, int]], expected: str) -> None:
    """Every rank is given the same batch; where they differ, the run ends with an error, in whichever step."""
    with pytest.raises(vk.RankFailedError) as caught:
        vk.launch(batches_of_two_sizes, sizes, world_size=2)
    assert expected in str(caught.value)


def test_outside_ranks_there_is_no_pipeline() -> None:
    with pytest.raises(vk.InvalidInputError) as caught:
        make_pipeline()
    assert str(caught.value) == (
        "pipeline='1F1B': runs inside ranks, and this process is none; call it in a function given to vk.launch"
    )
