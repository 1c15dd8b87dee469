"""Seconds that one rank computes for one microbatch, in a layer and at the model's last end.

All sizes may be numbers or arrays of them: one prediction and a hundred thousand use the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from vizkit.hardware.device import Device
from vizkit.memory.activations import MASK_BYTES
from vizkit.transformer import Transformer

LOGIT_BYTES = 4
"""Losses are computed in 32 bits."""
_BLOCKS = 2
"""Attention and feed-forward, each with a norm before it, and dropout and a residual addition after it."""


class Passes(NamedTuple):
    """Seconds of matrix products, and of what mostly reads and writes, in a forward and in a backward."""

    matrix_forward: Any
    matrix_backward: Any
    moving_forward: Any
    moving_backward: Any

    @property
    def forward(self) -> Any:
        return self.matrix_forward + self.moving_forward

    @property
    def backward(self) -> Any:
        return self.matrix_backward + self.moving_backward

    @property
    def matrix(self) -> Any:
        return self.matrix_forward + self.matrix_backward

    @property
    def moving(self) -> Any:
        return self.moving_forward + self.moving_backward

    def times(self, count: Any) -> Passes:
        return Passes(*(count * value for value in self))

    def plus(self, other: Passes, count: Any = 1) -> Passes:
        return Passes(*(mine + count * theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Work:
    """What one rank computes of a model; `number_bytes` are those of a parameter.

    Matrix products follow `Device.matrix_efficiency`. In a backward there are two for each of the forward, of the same
    three sizes. All else moves bytes: norms, dropout, residual additions, activation functions, softmax, counted as one
    read of each input and one write of each output, of kernels fused as Megatron's are.
    """

    model: Transformer
    device: Device
    number_bytes: float
    fused_attention: bool

    def layer(
        self, microbatch: Any, tp: Any, cp: Any, ep: Any, sequence_parallel: Any, full: Any, selective: Any
    ) -> Passes:
        """One layer; `full` and `selective` are 1 where the backward makes that forward again, else 0."""
        tokens = microbatch * self.model.seq / cp
        products = self._products(tokens, tp, ep)
        attention_s, softmax, softmax_back = self.attention(microbatch, tp, cp)
        into, back = self._moved_bytes(tokens, tp, sequence_parallel)
        moving, moving_back = self.device.moving_s(into), self.device.moving_s(back)
        forward, moving = products + attention_s, moving + softmax
        again = (
            0.5 if self.fused_attention else selective
        )  # kernels that keep no scores make them again, of two products
        return Passes(
            forward,
            2 * forward + full * forward + again * attention_s,
            moving,
            moving_back + softmax_back + full * moving + selective * softmax,
        )

    def _products(self, tokens: Any, tp: Any, ep: Any) -> Any:
        """Seconds of the products with weights, forward."""
        model, h = self.model, self.model.hidden
        of = self._product_s
        attention = of(tokens, h, (h + 2 * model.key_value_width) / tp) + of(tokens, h / tp, h)
        width = model.expert_width / tp

        def feed_forward(rows: Any) -> Any:
            return (2 if model.gated else 1) * of(rows, h, width) + of(rows, width, h)

        mixture = model.experts
        if mixture is None:
            return attention + feed_forward(tokens)
        on_rank = mixture.count / ep
        visits = tokens * mixture.top_k / on_rank
        routed = on_rank * feed_forward(visits) + of(tokens, h, mixture.count)
        return attention + routed + mixture.shared * feed_forward(tokens)

    def attention(self, microbatch: Any, tp: Any, cp: Any) -> tuple[Any, Any, Any]:
        """Seconds of scores and of the values that they weigh, forward; of softmax and dropout, forward and backward.

        Fused kernels leave out later tokens' scores, half of them, and keep the rest on the chip.
        """
        model = self.model
        rows, width = model.seq / cp, model.hidden // model.heads
        blocks = microbatch * model.heads / tp * cp
        products = blocks * (self._product_s(rows, width, rows) + self._product_s(rows, rows, width))
        if self.fused_attention:
            return products / 2, 0.0, 0.0
        scores = blocks * rows * rows
        forward = scores * (4 * self.number_bytes + MASK_BYTES)
        backward = scores * (5 * self.number_bytes + MASK_BYTES)
        return products, self.device.moving_s(forward), self.device.moving_s(backward)

    def _moved_bytes(self, tokens: Any, tp: Any, sequence_parallel: Any) -> tuple[Any, Any]:
        """Bytes of norms, dropout, additions and the activation function, forward and backward."""
        model, number = self.model, self.number_bytes
        h, mixture = model.hidden, model.experts
        whole = tokens * h / (1 + sequence_parallel * (tp - 1))  # what tensor parallelism alone leaves whole
        forward = whole * _BLOCKS * (5 * number + MASK_BYTES)  # norm 2, dropout and addition 3
        backward = whole * _BLOCKS * (8 * number + MASK_BYTES)  # norm 3, dropout 2, sum of gradients 3
        visited = mixture.top_k + mixture.shared if mixture else 1
        into = 2 if model.gated else 1
        activated = tokens * visited * model.expert_width / tp * number
        if mixture is not None:  # tokens are sorted by expert, and back
            sorting = tokens * mixture.top_k * h * 4 * number
            forward, backward = forward + sorting, backward + sorting
        return forward + (into + 1) * activated, backward + (2 * into + 1) * activated

    def logits(self, microbatch: Any, tp: Any, cp: Any) -> Passes:
        """Logits and loss: cast, maximum, exponentials and their sum forward; one pass and a cast backward."""
        model = self.model
        tokens = microbatch * model.seq / cp
        vocabulary = -(-model.vocab // tp)
        product = self._product_s(tokens, model.hidden, vocabulary)
        numbers = tokens * vocabulary
        forward = numbers * (self.number_bytes + 5 * LOGIT_BYTES)
        backward = numbers * (self.number_bytes + LOGIT_BYTES)
        return Passes(product, 2 * product, self.device.moving_s(forward), self.device.moving_s(backward))

    def _product_s(self, m: Any, k: Any, n: Any) -> Any:
        return self.device.matrix_s(m, n, k, self.number_bytes)
