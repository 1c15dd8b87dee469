"""A transformer's sizes as data: parameters and floating-point operations from published formulas."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vizkit.errors import InvalidInputError
from vizkit.sizes import divides, is_whole, whole_number, yes_or_no


class Recompute(enum.StrEnum):
    """Which activations are computed again in the backward instead of being kept."""

    NONE = "none"
    SELECTIVE = "selective"
    """Attention scores, their softmax and dropout (Korthikanti et al., 2022)."""
    FULL = "full"
    """Everything in a layer but its input."""

    @classmethod
    def parse(cls, value: str | Recompute) -> Recompute:
        """The member with this value; raises `InvalidInputError` with the valid ones.

        >>> Recompute.parse("full")
        <Recompute.FULL: 'full'>
        """
        if isinstance(value, cls):
            return value
        for member in cls:
            if isinstance(value, str) and value == member.value:
                return member
        known = [member.value for member in cls]
        raise InvalidInputError.unknown("recompute", value, "is no way to recompute", known)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A feed-forward part of `count` experts, of which each token visits `top_k`, and all visit `shared` more.

    `ffn_hidden` is the width of one expert (default: the transformer's). Raises `InvalidInputError` where `top_k` is
    not between 1 and `count`.
    """

    count: int
    top_k: int = 1
    ffn_hidden: int | None = None
    shared: int = 0

    def __post_init__(self) -> None:
        _set(self, "count", whole_number("count", self.count))
        if self.ffn_hidden is not None:
            _set(self, "ffn_hidden", whole_number("ffn_hidden", self.ffn_hidden))
        if not is_whole(self.shared) or self.shared < 0:
            raise InvalidInputError.because("shared", self.shared, "must be a whole number, at least 0", "use shared=0")
        if not is_whole(self.top_k) or not 1 <= self.top_k <= self.count:
            raise InvalidInputError.because(
                "top_k", self.top_k, f"a token visits 1 to {self.count} of {self.count} experts", "use top_k=1"
            )
        for name in ("shared", "top_k"):
            _set(self, name, int(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder-only transformer; the defaults are GPT's: biases, learned positions, tied embeddings, width 4h.

    `kv_heads` < `heads` is grouped-query attention, `gated` a feed-forward part of three matrices (SwiGLU), `experts` a
    mixture of experts in each layer. `rms_norm` has no bias. `final_norm` counts the norm before the logits, which
    Megatron's formula leaves out. Raises `InvalidInputError` for sizes that are not positive or do not divide.

    >>> gpt = Transformer(num_layers=24, hidden=2304, heads=24, vocab=51200, seq=2048)
    >>> f"{gpt.num_params() / 1e9:.3f} billion parameters"
    '1.652 billion parameters'
    """

    num_layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    gated: bool = False
    bias: bool = True
    rms_norm: bool = False
    learned_positions: bool = True
    tied_embeddings: bool = True
    final_norm: bool = False
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "heads", "vocab", "seq"):
            _set(self, name, whole_number(name, getattr(self, name)))
        for name in ("kv_heads", "ffn_hidden"):
            if getattr(self, name) is not None:
                _set(self, name, whole_number(name, getattr(self, name)))
        for name in ("gated", "bias", "rms_norm", "learned_positions", "tied_embeddings", "final_norm"):
            _set(self, name, yes_or_no(name, getattr(self, name)))
        if not isinstance(self.experts, Experts | None):
            raise InvalidInputError.because(
                "experts", self.experts, "must be a vk.Experts, or None", "use vk.Experts(count=8, top_k=2)"
            )
        divides("hidden", self.hidden, "heads", self.heads)
        divides("heads", self.heads, "kv_heads", self.key_value_heads)

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and of values; `heads` without grouped-query attention."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def key_value_width(self) -> int:
        """Width of the keys, and of the values, of one token in one layer."""
        return self.hidden // self.heads * self.key_value_heads

    @property
    def feed_forward_width(self) -> int:
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    @property
    def expert_width(self) -> int:
        """Width of one expert, or of the feed-forward part without a mixture."""
        return (self.experts.ffn_hidden if self.experts else None) or self.feed_forward_width

    def num_params(self, active: bool = False) -> int:
        """How many parameters; with `active`, only those that one token uses (mixture of experts).

        For GPT's defaults 12 l h² (1 + 13/(12h) + (V+s)/(12 l h)) (Narayanan et al., SC'21, eq. 2).
        """
        return self.num_layers * self.layer_params(active) + self.embedding_params() + self.final_norm * self._norm()

    def embedding_params(self) -> int:
        """Parameters of the token and position embeddings, and of the matrix of the logits if it is not tied."""
        return self.hidden * (
            self.vocab * (1 if self.tied_embeddings else 2) + (self.seq if self.learned_positions else 0)
        )

    def layer_params(self, active: bool = False) -> int:
        """Parameters of one layer; with `active`, those that one token uses."""
        return self.attention_params() + self.feed_forward_params(active) + 2 * self._norm()

    def attention_params(self) -> int:
        """Parameters of queries, keys, values and the output projection of one layer."""
        h, kv = self.hidden, self.key_value_width
        return h * (2 * h + 2 * kv) + self.bias * (2 * h + 2 * kv)

    def expert_params(self) -> int:
        """Parameters of one expert, or of the feed-forward part without a mixture."""
        width, into = self.expert_width, 2 if self.gated else 1
        return (into + 1) * self.hidden * width + self.bias * (into * width + self.hidden)

    def feed_forward_params(self, active: bool = False) -> int:
        """Parameters of the feed-forward part of one layer: router, experts, shared experts."""
        if self.experts is None:
            return self.expert_params()
        visited = self.experts.top_k if active else self.experts.count
        return (visited + self.experts.shared) * self.expert_params() + self.hidden * self.experts.count

    def flops(self, batch: int, recompute: str | Recompute = Recompute.NONE) -> int:
        """Floating-point operations of one training step: a forward and a backward of twice its size.

        Multiplications and additions of all matrix products, attention over the whole sequence as in Megatron's formula
        96 B s l h² (1 + s/(6h) + V/(16 l h)) with full recomputation, 72 and V/(12 l h) without (SC'21, eq. 3); with
        selective recomputation the attention scores and what they weigh are computed twice.
        """
        again = {
            Recompute.NONE: 0,
            Recompute.SELECTIVE: self.scores_flops(),
            Recompute.FULL: self.layer_flops(),
        }[Recompute.parse(recompute)]
        logits = 2 * self.hidden * self.vocab
        tokens = whole_number("batch", batch) * self.seq
        return tokens * (self.num_layers * (3 * self.layer_flops() + again) + 3 * logits)

    def scores_flops(self) -> int:
        """Operations of one token's attention scores and of the values that they weigh, in one layer, forward."""
        return 4 * self.seq * self.hidden

    def layer_flops(self) -> int:
        """Operations of one token in one layer, forward."""
        matrices = self.hidden * (2 * self.hidden + 2 * self.key_value_width)
        experts, into = self.experts, 3 if self.gated else 2
        width = self.expert_width
        visited = experts.top_k + experts.shared if experts else 1
        matrices += visited * into * self.hidden * width + (self.hidden * experts.count if experts else 0)
        return 2 * matrices + self.scores_flops()

    def _norm(self) -> int:
        return self.hidden * (1 if self.rms_norm else 2)


_set = object.__setattr__
"""Numbers of numpy become Python's, which do not overflow; for dataclasses that are frozen."""


def check_model(model: object) -> None:
    """Raises `InvalidInputError` for anything but a `Transformer`."""
    if not isinstance(model, Transformer):
        raise InvalidInputError.because(
            "model", model, "must be a vk.Transformer", "use vk.Transformer(num_layers=24, hidden=1024, …)"
        )
