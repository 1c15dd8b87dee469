"""Attention over a sequence whose tokens lie on several ranks: keys and values go round the ring (Liu et al., 2023)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vizkit.errors import InvalidInputError
from vizkit.runtime.recorder import span
from vizkit.sizes import divides

CHUNKS = 2
"""Of a rank; with a causal mask an early and a late one balance the work."""

Tile = tuple[slice, slice, bool]
"""Rows of queries, columns of keys, and whether it lies on the diagonal, where the mask cuts it."""


class Deal(enum.StrEnum):
    """Which two of 2n chunks of the sequence each of n ranks has."""

    CONTIGUOUS = "contiguous"
    """2r and 2r + 1: with a causal mask the last rank does most."""
    ZIGZAG = "zigzag"
    """r and 2n − 1 − r: all do the same."""

    def chunks(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """
        >>> Deal.ZIGZAG.chunks(1, 4), Deal.CONTIGUOUS.chunks(1, 4)
        ((1, 6), (2, 3))
        """
        return (rank, 2 * num_ranks - 1 - rank) if self is Deal.ZIGZAG else (2 * rank, 2 * rank + 1)

    def places(self, seq: int, rank: int, num_ranks: int) -> torch.Tensor:
        """Where a rank's tokens stand in a sequence of `seq`: int64, for position embeddings and to cut a batch.

        Raises `InvalidInputError` where the sequence does not divide into 2 × `num_ranks` chunks.

        >>> Deal.ZIGZAG.places(8, rank=0, num_ranks=2).tolist()
        [0, 1, 6, 7]
        """
        divides("seq", seq, "2 × num_ranks", CHUNKS * num_ranks)
        chunks = torch.arange(seq).chunk(CHUNKS * num_ranks)
        return torch.cat([chunks[number] for number in self.chunks(rank, num_ranks)])


@dataclass(frozen=True)
class RingAttention:
    """Call it with this rank's queries, keys and values in place of attention: `block.attention.mix = RingAttention()`.

    Shapes are (batch, heads, tokens of this rank, head width), as many tokens on each rank of `group` (None: all
    ranks), dealt as `deal` says; keys and values may have fewer heads, of which each serves as many query heads.
    Blocks travel while a rank computes; the backward computes the scores again and sends gradients round with their
    block. Sums are float32 at least. Each tile is a span on the timeline: kind F, in the backward B.

    Messages of a rank: n − 1 blocks of keys and values forward and again backward, n of their gradients.
    Raises `InvalidInputError` for heads that do not divide, for keys of other tokens than the queries, and with a
    causal mask for an odd number of tokens.

    >>> q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    >>> RingAttention()(q, k, k).shape  # one process is a ring of one rank
    torch.Size([1, 4, 6, 8])
    """

    group: Any = None
    deal: Deal = Deal.ZIGZAG
    causal: bool = True

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        divides("query heads", q.shape[1], "key heads", k.shape[1])
        if k.shape != v.shape or q.shape[2] != k.shape[2]:
            raise InvalidInputError.because(
                "k and v",
                [tuple(k.shape), tuple(v.shape)],
                f"need the same shape, and the {q.shape[2]} tokens of q",
                "give each rank keys and values of its own tokens",
            )
        if self.causal:
            divides("tokens of this rank", q.shape[2], "chunks", CHUNKS)
        result: torch.Tensor = _Ring.apply(q, k, v, self)
        return result

    def tiles(self, owner: int, num_tokens: int) -> Iterator[Tile]:
        """What this rank's queries see of the block of rank `owner`."""
        rank, n = _place(self.group)
        if not self.causal:
            yield slice(None), slice(None), False
            return
        size, deal = num_tokens // CHUNKS, Deal(self.deal)
        for a, queries in enumerate(deal.chunks(rank, n)):
            for b, keys in enumerate(deal.chunks(owner, n)):
                if keys <= queries:
                    yield slice(a * size, (a + 1) * size), slice(b * size, (b + 1) * size), keys == queries


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: RingAttention) -> torch.Tensor:
        grouped = _by_key_head(q, k)
        precise = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(grouped, dtype=precise)
        lse = torch.full_like(grouped[..., :1], -torch.inf, dtype=precise)
        for block, (rows, columns, diagonal) in _round(torch.stack([k, v]), how, q.shape[2]):
            with span("tile", kind="F"):
                keys, values = block[..., columns, :].unsqueeze(3).to(precise)
                scores = _scores(grouped[..., rows, :].to(precise), keys, diagonal)
                total = torch.logaddexp(lse[..., rows, :], scores.logsumexp(-1, keepdim=True))
                out[..., rows, :] *= (lse[..., rows, :] - total).exp()
                out[..., rows, :] += (scores - total).exp() @ values
                lse[..., rows, :] = total
        result = out.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.how = how
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        precise, scale = lse.dtype, q.shape[-1] ** -0.5
        queries, grads = (_by_key_head(part, k).to(precise) for part in (q, grad))
        d = (grads * _by_key_head(out, k)).sum(-1, keepdim=True)
        into_q, into_block = torch.zeros_like(queries), torch.zeros_like(torch.stack([k, v]), dtype=precise)

        def send_home() -> None:
            nonlocal into_block
            into_block, wait = _pass_on(into_block, ctx.how.group)
            wait()

        for block, (rows, columns, diagonal) in _round(torch.stack([k, v]), ctx.how, q.shape[2], send_home):
            with span("tile", kind="B"):
                keys, values = block[..., columns, :].unsqueeze(3).to(precise)
                mine, outer = queries[..., rows, :], grads[..., rows, :]
                weights = (_scores(mine, keys, diagonal) - lse[..., rows, :]).exp()
                inner = weights * (outer @ values.mT - d[..., rows, :]) * scale
                into_q[..., rows, :] += inner @ keys
                into_block[0][..., columns, :] += (inner.mT @ mine).sum(2)
                into_block[1][..., columns, :] += (weights.mT @ outer).sum(2)
        into_k, into_v = into_block.to(k.dtype)
        return into_q.flatten(1, 2).to(q.dtype), into_k, into_v, None


def _round(
    block: torch.Tensor, how: RingAttention, num_tokens: int, after_step: Callable[[], None] = lambda: None
) -> Iterator[tuple[torch.Tensor, Tile]]:
    """Each block that comes by with each of its tiles; a block travels on while its tiles are computed."""
    rank, n = _place(how.group)
    for step in range(n):
        arriving, wait = _pass_on(block, how.group) if step < n - 1 else (block, _nothing)
        for tile in how.tiles((rank - step) % n, num_tokens):
            yield block, tile
        wait()
        after_step()
        block = arriving


def _pass_on(block: torch.Tensor, group: Any) -> tuple[torch.Tensor, Callable[[], None]]:
    """To the next rank; the previous rank's block is there after calling what comes back second."""
    rank, n = _place(group)
    if n == 1:
        return block, _nothing
    arriving = torch.empty_like(block, memory_format=torch.contiguous_format)
    following, preceding = (_global_rank(group, (rank + step) % n) for step in (1, -1))
    sending = block.contiguous()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sending, following, group),
            dist.P2POp(dist.irecv, arriving, preceding, group),
        ]
    )

    def wait() -> None:
        for work in works:
            work.wait()

    return arriving, wait


def _nothing() -> None:
    """What there is to wait for where nothing was sent."""


def _place(group: Any) -> tuple[int, int]:
    """Rank in the group and its size; one process without a group is a ring of one."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _global_rank(group: Any, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _by_key_head(part: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(batch, key heads, query heads of each, tokens, width)"""
    return part.unflatten(1, (k.shape[1], -1))


def _scores(q: torch.Tensor, k: torch.Tensor, is_diagonal: bool) -> torch.Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf) if is_diagonal else scores
