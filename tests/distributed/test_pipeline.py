"""Pipelines on real ranks: the numbers of one process, and the times of the simulator."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vizkit as vk
from tests.distributed.pipelines import (
    WIDTH,
    assert_equals_one_process,
    gradients,
    make_batch,
    make_stages,
    one_process,
    run_steps,
)
from tests.distributed.readings import table
from vizkit.schedules import recipe
from vizkit.trace import SpanKind

FLOAT_BYTES = 4
RUNNABLE = [name for name in vk.schedule_names() if recipe(name).torch_runs]


def smallest(name: str, num_ranks: int, at_least: int) -> vk.Schedule:
    """The schedule with the fewest microbatches, at least so many, that it has."""
    for num_microbatches in itertools.count(at_least):
        try:
            return vk.schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        except vk.InvalidInputError:
            assert num_microbatches < 64
    raise AssertionError


def uneven_widths(num_stages: int) -> list[int]:
    return [WIDTH, *(4 + stage % 3 for stage in range(num_stages - 1)), WIDTH]


def make_uneven(num_stages: int) -> list[nn.Module]:
    """Stages that hand on tensors of different sizes."""
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(uneven_widths(num_stages))]


def drawn_durations(draw: random.Random, num_stages: int) -> vk.Durations:
    """Whole and half seconds, other ones for each stage."""
    per_stage = {kind: [draw.randint(1, 8) / 2 for _ in range(num_stages)] for kind in ("F", "I", "W")}
    return vk.Durations(**per_stage)


@pytest.mark.parametrize(("num_ranks", "at_least"), [(2, 5), (4, 3)])
@pytest.mark.parametrize("name", RUNNABLE)
def test_a_real_run_equals_one_process_and_the_simulator(name: str, num_ranks: int, at_least: int) -> None:
    """For every schedule torch can run: losses, outputs and gradients are those of one process, each action of the
    schedule is a span, and the replay with given durations has the simulator's cells, whatever durations and link."""
    schedule = smallest(name, num_ranks, at_least)
    run = vk.launch(run_steps, schedule, make_uneven, world_size=num_ranks)
    assert_equals_one_process(run, schedule, make=make_uneven)

    samples = 2
    payloads = [samples * width * FLOAT_BYTES for width in uneven_widths(schedule.num_stages)[1:]]
    draw = random.Random(f"{name} {num_ranks} {at_least}")
    links = [None, vk.Link(0.5, float("inf")), vk.Link(0.0, 64.0), vk.Link(0.25, 32.0)]
    unit = vk.Durations(F=1, I=1, W=1)
    for link, durations in [(None, unit), *((link, drawn_durations(draw, schedule.num_stages)) for link in links)]:
        real = run.replay(link=link, durations=durations)
        ideal = vk.simulate(schedule, durations, link, payload_bytes=payloads)
        assert vk.as_grid(real) == vk.as_grid(ideal), (link, durations)
        assert messages(real) == messages(ideal)
    for rank in range(num_ranks):
        done = [span for span in sorted(real.filter(rank=rank), key=lambda span: span.start_ns) if span.microbatch >= 0]
        assert [f"{span.stage}{span.kind.value}{span.microbatch}" for span in done if span.kind.value in "FBIW"] == [
            str(action) for cell in schedule.rows[rank] for action in cell
        ]


def messages(trace: vk.Trace) -> list[tuple[int, int, int, int, int]]:
    """Sender, receiver, bytes, when they set off and when they have left; nothing where messages cost nothing."""
    return sorted(
        (span.rank, span.peer, span.payload_bytes, span.start_ns, span.end_ns)
        for span in trace.filter(kind=SpanKind.SEND)
        if span.end_ns > span.start_ns
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_gradients_accumulate_over_steps(name: str, reduction: str) -> None:
    """Three steps without zero_grad add up as three backwards do; a sum is not divided by anything.

    Torch's own schedules divide what is in `.grad` after each step: what the first step left is divided three times.
    """
    schedule = smallest(name, 2, 4)
    loss_fn = nn.MSELoss(reduction=reduction)
    run = vk.launch(run_steps, schedule, steps=3, loss_fn=loss_fn, world_size=2)
    assert_equals_one_process(run, schedule, steps=3, loss_fn=loss_fn)


def test_a_loss_function_that_does_not_say_how_it_reduces_is_told_by_loss_reduction() -> None:
    """A plain function counts as a mean; `loss_reduction="sum"` makes it a sum, in losses and in gradients."""
    schedule = vk.schedule("1F1B", num_ranks=2, num_microbatches=4)
    run = vk.launch(sum_by_hand, schedule, "sum", world_size=2)
    losses, expected, _ = one_process(schedule, loss_fn=squared_error)
    assert run.results[1][0] == pytest.approx(losses[0])
    for rank in range(2):
        torch.testing.assert_close(run.results[rank][1][rank], expected[rank])


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def sum_by_hand(schedule: vk.Schedule, reduction: str) -> Any:
    x, y = make_batch(8)
    pipe = vk.pipeline(schedule, make_stages(2), squared_error, loss_reduction=reduction)
    return pipe.step(x, target=y).loss, gradients(pipe)


def test_training_converges_to_what_one_process_reaches() -> None:
    """Three optimizer steps on each rank's own parameters give the model of one process."""
    schedule = vk.schedule("1F1B", num_ranks=2, num_microbatches=4)
    run = vk.launch(train_with_adam, schedule, world_size=2)
    stages = make_stages(2)
    model = nn.Sequential(*stages)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    x, y = make_batch(8)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for rank, state in enumerate(run.results):
        torch.testing.assert_close(state, dict(stages[rank].state_dict()))


def train_with_adam(schedule: vk.Schedule) -> dict[str, torch.Tensor]:
    x, y = make_batch(8)
    pipe = vk.pipeline(schedule, make_stages(2), nn.MSELoss())
    optimizer = torch.optim.Adam(pipe.parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        pipe.step(x, target=y)
        optimizer.step()
    return dict(pipe.module(pipe.stages[0]).state_dict())


def test_a_sequential_is_divided_and_a_function_is_asked_for_local_stages() -> None:
    """Layers in an `nn.Sequential` become stages; a function makes the modules of this rank's stages and no others."""
    schedule = vk.schedule("Interleaved1F1B", num_ranks=2, num_microbatches=2)
    run = vk.launch(both_ways, schedule, world_size=2)
    assert run.results == [([0, 2], True), ([1, 3], True)]


def both_ways(schedule: vk.Schedule) -> tuple[list[int], bool]:
    x, y = make_batch(4)
    stages = make_stages(4)
    asked: list[int] = []

    def make(stage: int) -> nn.Module:
        asked.append(stage)
        return stages[stage]

    layers = [layer for stage in make_stages(4) for layer in stage]
    found = []
    for modules in (nn.Sequential(*layers), make):
        pipe = vk.pipeline(schedule, modules, nn.MSELoss())
        pipe.step(x, target=y)
        found.append(gradients(pipe))
    same = all(torch.equal(a, b) for stage in found[0] for a, b in zip(found[0][stage], found[1][stage], strict=True))
    return asked, same


def test_shapes_are_learned_without_a_second_run_and_without_a_trace_in_the_record() -> None:
    """Modules run once for each microbatch, batch norm counts each; only activations and gradients are sent."""
    schedule = vk.schedule("1F1B", num_ranks=2, num_microbatches=3)
    run = vk.launch(count_forwards, schedule, world_size=2)
    assert run.results == [(3, 3), (3, 3)]
    tensor = 2 * WIDTH * FLOAT_BYTES
    assert sorted(table(run)) == [("send", [0, 1], tensor, 3), ("send", [1, 0], tensor, 3)]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return self.norm(x)


def count_forwards(schedule: vk.Schedule) -> tuple[int, int]:
    x, y = make_batch(6)
    pipe = vk.pipeline(schedule, [Counting(), Counting()], nn.MSELoss())
    pipe.step(x, target=y)
    (module,) = pipe.modules.values()
    return module.forwards, int(module.norm.num_batches_tracked)


def test_dropout_is_the_same_in_every_run() -> None:
    """Ranks draw from the launch's seed and from nothing else, so that two runs have the same losses."""
    schedule = vk.schedule("1F1B", num_ranks=2, num_microbatches=2)
    first, second = (vk.launch(run_steps, schedule, with_dropout, world_size=2).results[1][0] for _ in range(2))
    assert first == second


def with_dropout(num_stages: int) -> list[nn.Module]:
    return [nn.Sequential(stage, nn.Dropout(0.5)) for stage in make_stages(num_stages)]


def test_inference_keeps_no_graph_and_sends_nothing_back() -> None:
    """A schedule without backwards gives the outputs of the whole batch, and a loss where there is one to compute."""
    schedule = vk.schedule("ForwardOnly", num_ranks=2, num_microbatches=4)
    run = vk.launch(infer, schedule, world_size=2)
    x, y = make_batch(8)
    expected = nn.Sequential(*with_dropout(2)).eval()(x)
    outputs, losses, requires_grad = run.results[1]
    for output in outputs:
        torch.testing.assert_close(output, expected.detach())
    assert losses[0] is None
    assert losses[1] == pytest.approx(nn.functional.mse_loss(expected, y).item())
    assert not requires_grad
    assert all(edge == [0, 1] for _, edge, _, _ in table(run))


def infer(schedule: vk.Schedule) -> Any:
    x, y = make_batch(8)
    without, with_loss = (vk.pipeline(schedule, with_dropout(2), loss).eval() for loss in (None, nn.MSELoss()))
    results = [without.step(x), with_loss.step(x, target=y)]
    outputs = [result.output for result in results]
    return outputs, [result.loss for result in results], outputs[0] is not None and outputs[0].requires_grad


def test_token_ids_enter_tuples_pass_and_only_what_is_differentiable_comes_back() -> None:
    """Whole numbers as input, a tuple with a mask between stages, two inputs: gradients as in one process."""
    for name in ("1F1B", "ZB-H1", "ZBVZeroBubble"):
        schedule = smallest(name, 2, 4)
        run = vk.launch(language_model, schedule, world_size=2)
        expected = language_model_alone(schedule.num_stages, 2 * schedule.num_microbatches)
        for found in run.results:
            for stage, tensors in found.items():
                torch.testing.assert_close(tensors, expected[stage])


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table(tokens), mask


class Block(nn.Module):
    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_last = is_last

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        x = self.linear(x).transpose(1, 2) * mask[:, None, :]
        return {"logits": x.transpose(1, 2)} if self.is_last else (x.transpose(1, 2), mask)


def language_stages(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [Embed(), *(Block(stage == num_stages - 1) for stage in range(1, num_stages))]


def language_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(size * 3).reshape(size, 3) % 11
    return tokens, tokens % 2 == 0


def language_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten() % WIDTH)


def language_model(schedule: vk.Schedule) -> Any:
    tokens, mask = language_batch(2 * schedule.num_microbatches)
    pipe = vk.pipeline(schedule, language_stages(schedule.num_stages), language_loss)
    result = pipe.step(tokens, mask, target=tokens)
    assert (result.output is None) != pipe.has_last_stage
    if result.output is not None:
        assert result.output["logits"].shape == (*tokens.shape, WIDTH)
    return gradients(pipe)


def language_model_alone(num_stages: int, size: int) -> list[list[torch.Tensor | None]]:
    tokens, mask = language_batch(size)
    stages = language_stages(num_stages)
    state: Any = (tokens, mask)
    for stage in stages:
        state = stage(*state)
    language_loss(state, tokens).backward()
    return [[p.grad for p in stage.parameters()] for stage in stages]


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_stages_may_pass_on_views_their_input_or_what_lies_in_another_order(name: str) -> None:
    """A stage that only reshapes, one that does nothing, one that transposes: torch alone refuses each of them."""
    schedule = vk.schedule(name, num_ranks=4, num_microbatches=4)
    run = vk.launch(run_steps, schedule, odd_stages, world_size=4)
    assert_equals_one_process(run, schedule, make=odd_stages)


class Turn(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (2, -1)).transpose(1, 2)


def odd_stages(num_stages: int) -> list[nn.Module]:
    first, second = make_stages(2)
    return [nn.Sequential(first, Turn()), nn.Identity(), nn.Flatten(), second]


def test_a_frozen_first_stage_gets_no_gradients() -> None:
    """Nothing upstream needs a gradient: none is sent to it, and the other stage's are right."""
    schedule = vk.schedule("1F1B", num_ranks=2, num_microbatches=2)
    run = vk.launch(run_steps, schedule, half_frozen, world_size=2)
    assert_equals_one_process(run, schedule, make=half_frozen)
    assert [edge for _, edge, _, _ in table(run)] == [[0, 1]]


def half_frozen(num_stages: int) -> list[nn.Module]:
    first, *rest = make_stages(num_stages)
    return [first.requires_grad_(False), *rest]


def test_batches_of_several_shapes_are_each_right() -> None:
    """A smaller last batch, and the full one again: shapes are learned once for each."""
    schedule = vk.schedule("1F1B", num_ranks=2, num_microbatches=2)
    run = vk.launch(several_shapes, schedule, (8, 4, 8), world_size=2)
    for size, loss in zip((8, 4, 8), run.results[1], strict=True):
        assert loss == pytest.approx(one_process(schedule, batch=size)[0][0])


def several_shapes(schedule: vk.Schedule, sizes: tuple[int, ...]) -> list[float | None]:
    pipe = vk.pipeline(schedule, make_stages(2), nn.MSELoss())
    losses = []
    for size in sizes:
        x, y = make_batch(size)
        losses.append(pipe.step(x, target=y).loss)
    return losses


def test_weights_tied_on_one_rank_are_trained_as_one() -> None:
    """One parameter in two stages of one rank gets both gradients."""
    schedule = smallest("ZBVZeroBubble", 2, 4)
    run = vk.launch(run_steps, schedule, tied_ends, world_size=2)
    assert_equals_one_process(run, schedule, make=tied_ends)


def tied_ends(num_stages: int) -> list[nn.Module]:
    stages = make_stages(num_stages)
    stages[-1][0].weight = stages[0][0].weight  # type: ignore[index]
    return stages


def test_pipelines_in_groups_stand_beside_each_other() -> None:
    """Two pipelines of two ranks, each in its own process group, on one half of the batch."""
    run = vk.launch(two_pipelines, world_size=4)
    schedule = vk.schedule("1F1B", num_ranks=2, num_microbatches=2)
    losses = [loss for loss, _ in run.results]
    assert losses[0] is losses[1] is None
    assert [losses[2], losses[3]] == pytest.approx([one_process(schedule, batch=size)[0][0] for size in (4, 8)])
    assert run.results[0][1] == "loss n/a (rank 2 has the last stage)"


def two_pipelines() -> tuple[float | None, str]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    schedule = vk.schedule("1F1B", num_ranks=2, num_microbatches=2)
    pipe = vk.pipeline(schedule, make_stages(2), nn.MSELoss(), group=mesh["pp"].get_group())
    x, y = make_batch((4, 8)[dist.get_rank() % 2])
    result = pipe.step(x, target=y)
    return result.loss, str(result)


def test_a_schedule_of_ones_own_may_take_microbatches_in_any_order() -> None:
    """Losses and outputs are kept by microbatch, not in the order in which the last stage happens to do them."""
    schedule = vk.Schedule.from_rows(
        [["0F1", "0F0", "0B1", "0B0"], [("1F1"), "1F0", "1B1", "1B0"]],
    )
    run = vk.launch(run_steps, schedule, world_size=2)
    assert_equals_one_process(run, schedule)


def test_uneven_stages_on_one_rank_and_three_on_two() -> None:
    """Three stages on two ranks: nothing needs the same number on each rank."""
    schedule = vk.Schedule.from_rows(
        [["0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    )
    run = vk.launch(run_steps, schedule, world_size=2)
    assert_equals_one_process(run, schedule)


def test_one_rank_is_a_pipeline_too() -> None:
    schedule = vk.schedule("1F1B", num_ranks=1, num_microbatches=3)
    run = vk.launch(run_steps, schedule, world_size=1)
    assert_equals_one_process(run, schedule)


def test_activations_are_computed_again_inside_the_backward() -> None:
    """`torch.utils.checkpoint` in a stage changes no number; the second forward is part of B."""
    schedule = vk.schedule("1F1B", num_ranks=2, num_microbatches=2)
    run = vk.launch(run_steps, schedule, checkpointed, world_size=2)
    assert_equals_one_process(run, schedule)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.inner, x, use_reentrant=False)


def checkpointed(num_stages: int) -> list[nn.Module]:
    return [Checkpointed(stage) for stage in make_stages(num_stages)]


def test_partial_and_module_losses_say_how_they_reduce() -> None:
    """`functools.partial(..., reduction="sum")` is understood as `nn.MSELoss(reduction="sum")` is."""
    schedule = vk.schedule("GPipe", num_ranks=2, num_microbatches=2)
    loss_fn = functools.partial(nn.functional.mse_loss, reduction="sum")
    run = vk.launch(run_steps, schedule, loss_fn=loss_fn, world_size=2)
    assert_equals_one_process(run, schedule, loss_fn=loss_fn)


def work_then_step(schedule: vk.Schedule) -> None:
    """Two steps of stages so heavy that compute takes the time, not Python, on a busy machine too."""
    width, samples = 512, 64
    torch.manual_seed(0)
    modules = [nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))) for depth in (16, 4)]
    pipe = vk.pipeline(schedule, modules, nn.MSELoss())
    optimizer = torch.optim.SGD(pipe.parameters(), 0.01)
    x = torch.randn(samples * schedule.num_microbatches, width)
    for _ in range(2):
        pipe.step(x, target=x)
        optimizer.step()


def test_fitted_durations_predict_other_sizes_and_schedules() -> None:
    """Stage 0 has four times the layers, and the fit sees it. From 4 microbatches of 1F1B, what 8 take under GPipe.

    Compared is the second step on the virtual clock, with a wide margin: ranks share a noisy machine.
    """
    fit = vk.fit_durations(
        vk.launch(work_then_step, vk.schedule("1F1B", num_ranks=2, num_microbatches=4), world_size=2)
    )
    assert 1.3 < fit.of_ns("F", 0) / fit.of_ns("F", 1) < 8
    assert fit.link is not None
    other = vk.schedule("GPipe", num_ranks=2, num_microbatches=8)
    run = vk.launch(work_then_step, other, world_size=2)
    compute = run.replay(link=None).filter(kind=["F", "B"])
    starts = [sorted(span.start_ns for span in compute.filter(rank=rank)) for rank in range(2)]
    measured = compute.extent_ns[1] - min(of_rank[len(of_rank) // 2] for of_rank in starts)
    predicted = vk.simulate(other, fit).extent_ns[1]
    assert 0.5 < predicted / measured < 2


def test_an_optimizer_step_does_not_change_the_cells() -> None:
    """Work that belongs to no stage does not make a rank hold several stages."""
    schedule = vk.schedule("1F1B", num_ranks=2, num_microbatches=2)
    run = vk.launch(step_with_optimizer, schedule, world_size=2)
    durations = vk.Durations(F=1, B=2)
    assert vk.as_grid(run.replay(link=None, durations=durations)) == vk.as_grid(vk.simulate(schedule, durations))


def step_with_optimizer(schedule: vk.Schedule) -> None:
    x, y = make_batch(4)
    pipe = vk.pipeline(schedule, make_stages(2), nn.MSELoss())
    pipe.step(x, target=y)
    torch.optim.SGD(pipe.parameters(), 0.1).step()
