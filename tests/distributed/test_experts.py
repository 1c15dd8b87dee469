"""Mixtures of experts on real ranks: equal to one process whatever the loads, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import vizkit as vk
from vizkit.runtime.experts import (
    MixtureOfExperts,
    average_gradients,
    capacity_of,
    expert_gpt,
    expert_parameters,
    experts_of,
    mixtures,
    route,
)
from vizkit.runtime.gpt import loss

COUNT, HIDDEN, TOKENS = 12, 8, 24
LOADS = {
    "even": [1.0] * COUNT,
    "one expert gets no token": [1.0] * 5 + [-1e9] + [1.0] * 6,
    "one expert gets all": [-1e9] * 7 + [1.0] + [-1e9] * 4,
    "one rank of 2, 3 and 4 gets no token": [1.0] * 6 + [-1e9] * 6,
}
"""A weight for each expert's logit: 1 leaves the router as it is, −1e9 keeps tokens away."""


def sizes(top_k: int = 2, shared: int = 0, count: int = COUNT, num_layers: int = 1) -> vk.Transformer:
    experts = vk.Experts(count=count, top_k=top_k, ffn_hidden=6, shared=shared)
    return vk.Transformer(
        num_layers=num_layers, hidden=HIDDEN, heads=2, vocab=16, seq=8, tied_embeddings=False, experts=experts
    )


def one_step(sizes: vk.Transformer, away: list[float], group_size: int | None = None) -> dict[str, Any]:
    """One layer on this rank's share of the tokens: loss, gradients of the mean loss, and of the input."""
    rank, n = dist.get_rank(), dist.get_world_size()
    group = replicas = None
    if group_size is not None:
        mesh = dist.init_device_mesh("cpu", (n // group_size, group_size), mesh_dim_names=("dp", "ep"))
        group, replicas = mesh.get_group("ep"), mesh.get_group("dp")
    layer = MixtureOfExperts(sizes, group, seed=3)
    layer.bias += torch.tensor(away).clamp(max=0)  # moves the choice, not the weights
    whole = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    x = whole.chunk(n)[rank].clone().requires_grad_()
    value = layer(x).square().sum() / (TOKENS // n)
    value.backward()
    average_gradients(layer, replicas=replicas)
    mean = value.detach().clone()
    dist.all_reduce(mean)
    grad = [torch.zeros_like(x) for _ in range(n)]
    dist.all_gather(grad, x.grad / n)
    return {
        "loss": mean / n,
        "input": torch.cat(grad),
        "gradients": {name: p.grad for name, p in layer.named_parameters()},
    }


CASES = {
    f"top-{top_k}, {name}": (sizes(top_k, shared=1), away)
    for name, away in LOADS.items()
    for top_k in (1, 2, COUNT)
    if top_k <= sum(weight > 0 for weight in away)
}


def all_cases() -> dict[str, Any]:
    return {name: one_step(*case) for name, case in CASES.items()}


def test_equals_one_process() -> None:
    """On 2, 3 and 4 ranks, for top-1 to all experts, even where experts or whole ranks get nothing."""
    reference = vk.launch(all_cases, world_size=1, device="cpu")
    for world_size in (2, 3, 4):
        found = vk.parity(vk.launch(all_cases, world_size=world_size, device="cpu"), reference)
        assert found, f"{world_size} ranks: {found}"


MESHES = (1, 2, 4)


def all_meshes() -> dict[str, Any]:
    case = sizes(), LOADS["one expert gets no token"]
    return {f"ep {size}": one_step(*case, min(size, dist.get_world_size())) for size in MESHES}


def test_replicas_of_experts_equal_one_process() -> None:
    """A mesh of data and experts: 4 × 1, 2 × 2 and 1 × 4."""
    reference = vk.launch(all_meshes, world_size=1, device="cpu")
    found = vk.parity(vk.launch(all_meshes, world_size=4, device="cpu"), reference)
    assert found, str(found)


def gpt_step(sizes: vk.Transformer) -> dict[str, Any]:
    rank, n = dist.get_rank(), dist.get_world_size()
    model = expert_gpt(sizes)
    ids = torch.randint(sizes.vocab, (12, sizes.seq + 1), generator=torch.Generator().manual_seed(0))
    mine = ids.chunk(n)[rank]
    value = loss(model(mine[:, :-1]), mine[:, 1:])
    value.backward()
    average_gradients(model)
    mean = value.detach().clone()
    dist.all_reduce(mean)
    count = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in expert_parameters(model))
    return {"loss": mean / n, "gradients": {name: p.grad for name, p in model.named_parameters()}}, count


def test_a_gpt_of_experts_equals_one_process_and_has_the_formulas_parameters() -> None:
    """Loss and every gradient on 1, 2, 3 and 4 ranks, and together `num_params()` parameters."""
    case = sizes(num_layers=2, shared=1)
    reference = vk.launch(gpt_step, case, world_size=1, device="cpu").results[0][0]
    for n in (1, 2, 3, 4):
        values, counts = zip(*vk.launch(gpt_step, case, world_size=n, device="cpu").results, strict=True)
        assert vk.parity(values, reference)
        whole = {total - of_experts for total, of_experts in counts}
        assert len(whole) == 1
        assert whole.pop() + sum(of_experts for _, of_experts in counts) == case.num_params()


def forward_and_backward(capacity_factor: float | None = None) -> tuple[int, list[int]]:
    layer = MixtureOfExperts(sizes(), capacity_factor=capacity_factor)
    layer(torch.randn(TOKENS, HIDDEN).requires_grad_()).sum().backward()
    return layer.routing.num_dropped, layer.routing.loads.tolist()


def test_moves_just_the_rows_that_leave() -> None:
    """Two all-to-alls forward and two backward, each of tokens × top_k rows, beside the counts; dropped rows stay."""
    run = vk.launch(forward_and_backward, world_size=2, device="cpu")
    payloads = [[call.payload_bytes for call in rank.calls] for rank in run.record.ranks]
    visits = 2 * TOKENS * HIDDEN * 4
    for sent in payloads:
        assert sent[:2] == [COUNT * 8, visits]
        assert sent[2:] == [sent[2], visits, sent[2]]  # back; then the gradients of what came back, and of what went
    assert sum(sent[2] for sent in payloads) == 2 * visits
    dropping = vk.launch(forward_and_backward, 0.5, world_size=2, device="cpu")
    for rank, (dropped, _) in zip(dropping.record.ranks, dropping.results, strict=True):
        assert [call.payload_bytes for call in rank.calls][1] == visits - dropped * HIDDEN * 4
        assert dropped >= TOKENS  # half of the visits at least


@given(st.integers(1, 30), st.integers(1, 6), st.data())
@settings(max_examples=40, deadline=None)
def test_capacity_keeps_first_choices_and_early_tokens(num_tokens: int, count: int, data: st.DataObject) -> None:
    """No expert takes more than its capacity, none refuses while it has room, and who comes later is dropped."""
    top_k, capacity = data.draw(st.integers(1, count)), data.draw(st.integers(1, 8))
    logits = torch.randn(num_tokens, count, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    routing = route(logits, top_k, capacity=capacity)
    for expert in range(count):
        asked = (expert == routing.experts.T).flatten()
        kept = routing.kept.T.flatten()[asked].tolist()
        assert kept == [place < capacity for place in range(len(kept))]
    assert routing.num_dropped == int((routing.loads - capacity).clamp(min=0).sum())


def test_weights_are_a_softmax_over_the_chosen() -> None:
    """With top_k > 1 they add up to 1; with 1 they are the probability; a bias moves the choice and no weight."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    torch.testing.assert_close(route(logits, 2).weights, torch.softmax(logits[:, :2], dim=1))
    torch.testing.assert_close(route(logits, 1).weights, torch.softmax(logits, dim=1)[:, :1])
    moved = route(logits, 1, bias=torch.tensor([0.0, 0.0, 1.0]))
    assert moved.experts.item() == 2
    assert moved.weights.item() == pytest.approx(math.exp(0) / (math.exp(2) + math.exp(1) + 1))


def test_the_balance_loss_is_the_papers() -> None:
    """1 for equal loads, the number of experts where one has all, and a gradient that lowers the busiest expert."""
    assert route(20 * torch.eye(4), 1).balance_loss().item() == pytest.approx(1)
    assert route(20 * torch.eye(4)[[0, 0, 0, 0]], 1).balance_loss().item() == pytest.approx(4, rel=1e-6)
    logits = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 1.0]], requires_grad=True)
    route(logits, 1).balance_loss().backward()
    assert logits.grad is not None
    assert (logits.grad[:, 0] > 0).all()


def test_balancing_lifts_the_bias_below_the_mean_load() -> None:
    """One rate up or down, and nothing where the load is the mean."""
    assert vk.launch(biases, world_size=1, device="cpu").results == [[-0.5] + [0.5] + [0.0] * (COUNT - 2)]


def biases() -> list[float]:
    layer = MixtureOfExperts(sizes())
    layer.balance(torch.tensor([3, 1] + [2] * (COUNT - 2)), rate=0.5)
    return layer.bias.tolist()


def all_seeds() -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(5)
    model = expert_gpt(sizes(num_layers=2))
    return [p.detach() for m in mixtures(model) for p in m.experts.parameters() if p.dim() == 2], torch.rand(3)


def test_each_expert_of_each_layer_is_drawn_on_its_own() -> None:
    """No two matrices begin alike, and the caller's random numbers stay as they were."""
    (matrices, after), *_ = vk.launch(all_seeds, world_size=1, device="cpu").results
    assert len({matrix.flatten()[0].item() for matrix in matrices}) == len(matrices) == 2 * COUNT * 2
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


REFUSED = [
    (lambda: route(torch.zeros(4, 3), 5), "top_k=5: a token visits 1 to 3 of 3 experts; use top_k=3"),
    (lambda: route(torch.zeros(4, 3), 0), "top_k=0: must be a whole number, at least 1; use top_k=1"),
    (
        lambda: experts_of(8, 3, 0),
        "experts=8: do not divide over 3 ranks, each of which holds as many as the others; "
        "use experts=6 or experts=9, or 2 or 4 ranks",
    ),
    (
        lambda: experts_of(2, 4, 0),
        "experts=2: do not divide over 4 ranks, each of which holds as many as the others; use experts=4, or 2 ranks",
    ),
    (
        lambda: capacity_of(4, vk.Experts(count=2), 0),
        "capacity_factor=0: must be positive and finite; use 1.25, or None",
    ),
]


@pytest.mark.parametrize("attempt, message", REFUSED, ids=[message[:16] for _, message in REFUSED])
def test_refuses_with_the_rule_and_the_nearest(attempt: Any, message: str) -> None:
    """What was given, the rule, and what would do."""
    with pytest.raises(vk.InvalidInputError) as caught:
        attempt()
    assert str(caught.value) == message


def refused_layer(change: str) -> str:
    try:
        if change == "width":
            MixtureOfExperts(sizes())(torch.zeros(3, HIDDEN + 1))
        elif change == "dense":
            MixtureOfExperts(vk.Transformer(num_layers=1, hidden=8, heads=2, vocab=16, seq=8))
        else:
            MixtureOfExperts(sizes(count=5))
    except vk.InvalidInputError as error:
        return str(error).replace("\n", " ")
    return "accepted"


def test_a_layer_refuses_what_does_not_fit() -> None:
    """Another width, a model without experts, and experts that do not divide over the ranks."""
    said = {c: vk.launch(refused_layer, c, world_size=2, device="cpu").results[1] for c in ("width", "dense", "five")}
    assert said["width"] == "x=(3, 9): tokens are 8 wide; use shape (..., 8)"
    assert said["dense"].endswith("needs experts, which are not gated; use experts=vk.Experts(count=8), gated=False")
    assert said["five"].endswith("use experts=4 or experts=6, or 1 or 5 ranks")
