"""A mixture of experts over ranks: router, capacity, all-to-all dispatch and combine, balance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from vizkit.errors import InvalidInputError
from vizkit.runtime.gpt import GPT, FeedForward
from vizkit.sizes import whole_number
from vizkit.transformer import Experts, Transformer

Group = dist.ProcessGroup | None
"""A process group; None is all ranks, as in `torch.distributed`."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Where tokens go: tensors of shape (tokens, top_k), the likeliest expert of each token first.

    `experts` are numbers of experts, `weights` what their outputs are multiplied with, `kept` is false where an expert
    was full. `probabilities` has shape (tokens, experts).

    >>> routing = route(torch.tensor([[2.0, 1, 0], [2, 1, 0], [0, 0, 2]]), top_k=1, capacity=1)
    >>> routing.loads.tolist(), routing.num_dropped
    ([2, 0, 1], 1)
    """

    experts: torch.Tensor
    weights: torch.Tensor
    kept: torch.Tensor
    probabilities: torch.Tensor

    @property
    def loads(self) -> torch.Tensor:
        """How many visits each expert was asked for, dropped ones too: int64 of shape (experts,)."""
        return torch.bincount(self.experts.flatten(), minlength=self.probabilities.shape[1])

    @property
    def num_dropped(self) -> int:
        """Visits that do not take place."""
        return int((~self.kept).sum())

    def balance_loss(self) -> torch.Tensor:
        """N · Σ fᵢ Pᵢ (Fedus et al., 2021, eq. 4): 1 where N experts have equal loads, N where one has all.

        fᵢ is the part of the visits that goes to expert i, Pᵢ the mean of its probability, both over these tokens;
        only Pᵢ has a gradient.

        >>> route(torch.eye(4), top_k=1).balance_loss().item()
        1.0
        """
        fractions = self.loads / self.experts.numel()
        return len(fractions) * (fractions * self.probabilities.mean(dim=0)).sum()


def route(
    logits: torch.Tensor, top_k: int, *, bias: torch.Tensor | None = None, capacity: int | None = None
) -> Routing:
    """Sends each token to the `top_k` experts of the largest probability; `logits` has shape (tokens, experts).

    Weights are the probabilities of the chosen divided by their sum; with top_k = 1 the probability itself, since 1
    would leave the router without a gradient. `bias`, of shape (experts,), is added for the choice only (DeepSeek-V3).
    An expert takes `capacity` visits: all first choices come before all second ones, then earlier tokens before later
    ones (GShard). Raises `InvalidInputError` where `top_k` is not between 1 and the number of experts.
    """
    count = logits.shape[1]
    if whole_number("top_k", top_k) > count:
        raise InvalidInputError.because(
            "top_k", top_k, f"a token visits 1 to {count} of {count} experts", f"use top_k={count}"
        )
    probabilities = torch.softmax(logits, dim=1)
    experts = (probabilities if bias is None else probabilities + bias).topk(top_k, dim=1).indices
    weights = probabilities.gather(1, experts)
    if top_k > 1:
        weights = weights / weights.sum(dim=1, keepdim=True)
    kept = torch.ones_like(experts, dtype=torch.bool)
    if capacity is not None:
        in_order = experts.T.flatten()  # all first choices, then all second ones
        visits = nn.functional.one_hot(in_order, count).cumsum(dim=0)
        kept = (visits.gather(1, in_order[:, None]) <= capacity).view(top_k, -1).T
    return Routing(experts, weights, kept, probabilities)


def capacity_of(num_tokens: int, experts: Experts, factor: float) -> int:
    """Visits that an expert takes of a rank's `num_tokens`: factor × tokens × top_k / experts, rounded up.

    Raises `InvalidInputError` for a factor that is not positive and finite.

    >>> capacity_of(64, Experts(count=8, top_k=2), factor=1.25)
    20
    """
    if not (math.isfinite(factor) and factor > 0):
        raise InvalidInputError.because("capacity_factor", factor, "must be positive and finite", "use 1.25, or None")
    return math.ceil(factor * num_tokens * experts.top_k / experts.count)


def experts_of(count: int, num_ranks: int, rank: int) -> range:
    """The numbers of the experts that a rank of a group holds: as many as every other rank, one after the other.

    Raises `InvalidInputError` where `count` experts do not divide over the ranks.

    >>> experts_of(8, num_ranks=4, rank=1)
    range(2, 4)
    """
    if whole_number("experts", count) % whole_number("num_ranks", num_ranks):
        nearest = [n for n in (count // num_ranks * num_ranks, (count // num_ranks + 1) * num_ranks) if n]
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        ranks = {max(n for n in divisors if n <= num_ranks), min((n for n in divisors if n > num_ranks), default=count)}
        raise InvalidInputError.because(
            "experts",
            count,
            f"do not divide over {num_ranks} ranks, each of which holds as many as the others",
            f"use {' or '.join(f'experts={n}' for n in nearest)}, or {' or '.join(map(str, sorted(ranks)))} ranks",
        )
    each = count // num_ranks
    return range(rank * each, (rank + 1) * each)


class Exchange(torch.autograd.Function):
    """An all-to-all of rows; its backward is the all-to-all the other way.

    `exchange(rows, to, come, group)`: of `rows` the first `to[0]` go to rank 0 of the group and so on; `come[r]` rows
    come from rank r, and stand in the order of ranks.
    """

    @staticmethod
    def forward(ctx, rows: torch.Tensor, to: list[int], come: list[int], group: Group) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.to, ctx.come, ctx.group = to, come, group
        return _exchanged(rows, to, come, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        return _exchanged(grad, ctx.come, ctx.to, ctx.group), None, None, None


exchange = Exchange.apply


def _exchanged(rows: torch.Tensor, to: list[int], come: list[int], group: Group) -> torch.Tensor:
    out = rows.new_empty(sum(come), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), come, to, group=group)
    return out


class MixtureOfExperts(nn.Module):
    """The feed-forward part of one layer, its experts dealt out over the ranks of `group`.

    Every rank brings its own tokens, of shape (..., hidden), and gets the same shape back. The router and the shared
    experts are on each rank; `experts` holds those of this rank, under their numbers. Parameters are drawn from `seed`,
    each expert's on its own, so they do not depend on the number of ranks. `capacity_factor` None drops no visit;
    otherwise an expert takes `capacity_of(...)` visits from each rank. `routing` is that of the last forward.

    A loss that is a mean over a rank's tokens leaves gradients to average: see `average_gradients`.

    Raises `InvalidInputError` for sizes without experts or with gated ones, for experts that do not divide over the
    ranks, and for tokens of another width.
    """

    routing: Routing
    bias: torch.Tensor

    def __init__(
        self, sizes: Transformer, group: Group = None, *, capacity_factor: float | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        if sizes.experts is None or sizes.gated:
            raise InvalidInputError.because(
                "sizes", sizes, "needs experts, which are not gated", "use experts=vk.Experts(count=8), gated=False"
            )
        self.sizes, self.mixture, self.group, self.capacity_factor = sizes, sizes.experts, group, capacity_factor
        mine = experts_of(self.mixture.count, dist.get_world_size(group), dist.get_rank(group))
        count, shared = self.mixture.count, self.mixture.shared
        generator = torch.Generator().manual_seed(seed)
        seeds = torch.randint(2**31, (count + shared,), generator=generator).tolist()
        self.router = nn.Linear(sizes.hidden, count, bias=False, device="meta").to_empty(device="cpu")
        nn.init.normal_(self.router.weight, std=0.05, generator=generator)
        self.experts = nn.ModuleDict({str(number): _expert(sizes, seeds[number]) for number in mine})
        self.shared = nn.ModuleList(_expert(sizes, number) for number in seeds[count:])
        self.register_buffer("bias", torch.zeros(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.sizes.hidden:
            raise InvalidInputError.because(
                "x", tuple(x.shape), f"tokens are {self.sizes.hidden} wide", f"use shape (..., {self.sizes.hidden})"
            )
        tokens = x.flatten(0, -2)
        self.routing = routing = self._route(tokens)
        token, choice = routing.kept.nonzero(as_tuple=True)
        expert = routing.experts[token, choice]
        order = expert.argsort(stable=True)
        token, choice = token[order], choice[order]
        visits = torch.bincount(expert, minlength=self.mixture.count).view(dist.get_world_size(self.group), -1)
        outputs = self._visit(tokens[token], visits) * routing.weights[token, choice, None]
        total = torch.zeros_like(tokens).index_add(0, token, outputs)
        return sum((expert(tokens) for expert in self.shared), total).view_as(x)

    def balance(self, loads: torch.Tensor, rate: float = 1e-3) -> None:
        """One step of balancing without a loss (Wang et al., 2024): lifts the bias of experts below the mean load.

        `loads` counts the visits of a whole batch, summed over ranks: then all routers stay equal.
        """
        mean = loads.double().mean()
        self.bias += rate * torch.sign(mean - loads).to(self.bias)

    def _route(self, tokens: torch.Tensor) -> Routing:
        factor = self.capacity_factor
        capacity = None if factor is None else capacity_of(len(tokens), self.mixture, factor)
        return route(self.router(tokens), self.mixture.top_k, bias=self.bias, capacity=capacity)

    def _visit(self, rows: torch.Tensor, visits: torch.Tensor) -> torch.Tensor:
        """Rows, sorted by expert, after their experts; `visits` counts them: shape (ranks, experts of a rank)."""
        coming = torch.empty_like(visits)
        dist.all_to_all_single(coming, visits, group=self.group)
        to, come = visits.sum(dim=1).tolist(), coming.sum(dim=1).tolist()
        arrived = exchange(rows, to, come, self.group)
        which = (
            torch.arange(coming.shape[1], device=rows.device).repeat(len(coming)).repeat_interleave(coming.flatten())
        )
        order = which.argsort(stable=True)  # from (rank, expert) to (expert, rank)
        parts = arrived[order].split(coming.sum(dim=0).tolist())
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)])
        return exchange(outputs[order.argsort()], come, to, self.group)


def expert_gpt(sizes: Transformer, group: Group = None, *, capacity_factor: float | None = None, seed: int = 0) -> GPT:
    """A `GPT` whose feed-forward parts are `MixtureOfExperts` over `group`; together the ranks of a group have
    `sizes.num_params()` parameters. Raises as those two do."""
    model = GPT(replace(sizes, experts=None), seed)
    for number, layer in enumerate(model.layers):
        layer.feed_forward = MixtureOfExperts(
            sizes, group, capacity_factor=capacity_factor, seed=seed + (number + 1) * 1_000_003
        )
    return model


def mixtures(model: nn.Module) -> Iterator[MixtureOfExperts]:
    """The mixtures in a model, in the order of its modules."""
    return (module for module in model.modules() if isinstance(module, MixtureOfExperts))


def expert_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that only some ranks hold: those of the experts that are not shared."""
    return chain.from_iterable(mixture.experts.parameters() for mixture in mixtures(model))


def average_gradients(model: nn.Module, data: Group = None, replicas: Group | None = None) -> None:
    """Makes gradients those of the mean loss over the ranks of `data`, each of which has its own tokens.

    An expert already has the sum over its own group, because the tokens came from there: what is left is to sum over
    `replicas`, the ranks that hold the same experts (None: nobody else does). Everything else is summed over `data`.
    Both are divided by the number of ranks in `data`. Ranks bring equally many tokens.
    """
    experts = {id(p): p for p in expert_parameters(model)}
    others = [p for p in model.parameters() if id(p) not in experts]
    num_ranks = dist.get_world_size(data)
    _scale(others, data, num_ranks)
    if replicas is None:
        for p in experts.values():
            p.grad = None if p.grad is None else p.grad / num_ranks
    else:
        _scale(experts.values(), replicas, num_ranks)


def _scale(params: Iterable[nn.Parameter], group: Group, divisor: int) -> None:
    """The sum over a group, divided, in one all-reduce."""
    used = [p for p in params if p.grad is not None]
    if not used:
        return
    flat = torch.cat([p.grad.flatten() for p in used if p.grad is not None])
    dist.all_reduce(flat, group=group)
    for p, part in zip(used, (flat / divisor).split([p.numel() for p in used]), strict=True):
        p.grad = part.view_as(p)


def _expert(sizes: Transformer, seed: int) -> FeedForward:
    """Drawn from `seed`; the caller's random numbers stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        expert = FeedForward(replace(sizes, ffn_hidden=sizes.expert_width, experts=None))
        for linear in (expert.up, expert.down):
            nn.init.normal_(linear.weight, std=0.05)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
    return expert
