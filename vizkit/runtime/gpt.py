"""A tiny GPT whose parts can be split over ranks; every strategy's lesson trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from vizkit.errors import InvalidInputError
from vizkit.runtime.text import ASCII
from vizkit.transformer import Transformer

TINY = Transformer(num_layers=4, hidden=64, heads=8, vocab=ASCII, seq=64, tied_embeddings=False, final_norm=True)
"""What the notebooks train: 220,544 parameters, whose sizes divide by 2, 4 and 8."""

_OTHERS = {"gated": False, "rms_norm": False, "learned_positions": True, "experts": None}


@dataclass
class KeyValueCache:
    """Keys and values of the tokens so far: two tensors a layer, of shape (batch, heads here, tokens, head width).

    >>> cache = KeyValueCache()
    >>> _ = GPT(TINY)(torch.zeros(1, 5, dtype=torch.int64), cache)
    >>> cache.num_tokens, cache.num_bytes == 4 * 2 * 5 * 64 * 4  # layers, keys and values, tokens, width, bytes
    (5, True)
    """

    layers: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return next((keys.shape[2] for keys, _ in self.layers.values()), 0)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for parts in self.layers.values() for part in parts)

    def extend(self, layer: nn.Module, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends to what `layer` has, and gives all of it back."""
        if layer in self.layers:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(self.layers[layer], (keys, values), strict=True))
        self.layers[layer] = keys, values
        return keys, values


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each query sees the keys up to its own place; shapes (batch, heads, tokens, head width), the last queries' last.

    Scores and their softmax are written out, so that they can be seen in memory.
    """
    hidden = torch.full((q.shape[2], k.shape[2]), -torch.inf, device=q.device).triu(1 + k.shape[2] - q.shape[2])
    return torch.softmax(q @ k.transpose(2, 3) * q.shape[3] ** -0.5 + hidden, dim=3) @ v


class Attention(nn.Module):
    """Queries, keys, values and the output projection; works on whatever heads the projections give.

    `mix(q, k, v)` weighs the values; put another function there to split the sequence over ranks.
    """

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.head_width = sizes.hidden // sizes.heads
        self.queries_per_key = sizes.heads // sizes.key_value_heads
        self.q = nn.Linear(sizes.hidden, sizes.hidden, bias=sizes.bias)
        self.k = nn.Linear(sizes.hidden, sizes.key_value_width, bias=sizes.bias)
        self.v = nn.Linear(sizes.hidden, sizes.key_value_width, bias=sizes.bias)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=sizes.bias)
        self.mix: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = causal_attention

    def forward(self, x: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if cache is not None:
            k, v = cache.extend(self, k, v)
        if self.queries_per_key > 1:
            k, v = (part.repeat_interleave(self.queries_per_key, dim=1) for part in (k, v))
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.hidden, sizes.feed_forward_width, bias=sizes.bias)
        self.down = nn.Linear(sizes.feed_forward_width, sizes.hidden, bias=sizes.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """One layer: attention and feed-forward, each on a normed copy of what it adds to."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.hidden)
        self.attention = Attention(sizes)
        self.feed_forward_norm = nn.LayerNorm(sizes.hidden)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Embedding(nn.Module):
    """Token numbers of shape (batch, seq) become vectors; `start` is the place of the first in the whole sequence."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.positions = nn.Embedding(sizes.seq, sizes.hidden)

    def forward(self, ids: torch.Tensor, start: int = 0, places: torch.Tensor | None = None) -> torch.Tensor:
        if places is None:
            places = torch.arange(start, start + ids.shape[1], device=ids.device)
        return self.tokens(ids) + self.positions(places)


class Head(nn.Module):
    """The last norm, and logits over the vocabulary."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.hidden) if sizes.final_norm else nn.Identity()
        self.logits = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x))


class GPT(nn.Module):
    """A decoder-only transformer of just `sizes.num_params()` parameters, drawn from `seed`: equal on every rank.

    `embed`, `layers` and `head` are its parts; `sequence()` has them in a row, for pipelines. Raises
    `InvalidInputError` for what it does not have: gated or expert feed-forwards, RMS norm, other positions.

    >>> sum(p.numel() for p in GPT(TINY).parameters()) == TINY.num_params()
    True
    """

    def __init__(self, sizes: Transformer = TINY, seed: int = 0) -> None:
        super().__init__()
        for name, only in _OTHERS.items():
            if getattr(sizes, name) != only:
                raise InvalidInputError.because(name, getattr(sizes, name), f"this model has {name}={only}", "leave it")
        self.sizes = sizes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = Embedding(sizes)
            self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
            self.head = Head(sizes)
            for module in self.modules():
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    nn.init.normal_(module.weight, std=0.05)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        if sizes.tied_embeddings:
            self.head.logits.weight = self.embed.tokens.weight

    def forward(self, ids: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """Logits of shape (batch, seq, vocab); with a cache, `ids` continue what the cache holds."""
        x = self.embed(ids, start=cache.num_tokens if cache else 0)
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(x)

    def sequence(self) -> nn.Sequential:
        """The same modules one after the other: embedding, layers, head."""
        return nn.Sequential(self.embed, *self.layers, self.head)


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, in nats; ln(vocab) where the model knows nothing."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def generate(model: nn.Module, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The likeliest next token, `num_tokens` times, with a cache: ids of shape (batch, seq + `num_tokens`).

    >>> generate(GPT(TINY), torch.zeros(2, 3, dtype=torch.int64), 4).shape
    torch.Size([2, 7])
    """
    cache, new = KeyValueCache(), ids
    for _ in range(num_tokens):
        new = model(new, cache)[:, -1:].argmax(dim=-1)
        ids = torch.cat([ids, new], dim=1)
    return ids
