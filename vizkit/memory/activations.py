"""Bytes of activations that a rank keeps for its backwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vizkit.errors import InvalidInputError
from vizkit.sizes import divides, whole_number
from vizkit.transformer import Recompute, Transformer
from vizkit.units import bytes_text

NUMBER_BYTES, MASK_BYTES = 2, 1
"""Activations are 16-bit numbers, dropout keeps one byte an element."""

IN_FLIGHT: dict[str, Callable[[int, int, int], float]] = {
    "GPipe": lambda p, m, v: m,
    "1F1B": lambda p, m, v: min(p, m),
    "Interleaved1F1B": lambda p, m, v: min(p + (p - 1) / v, m),
    "ZB-H1": lambda p, m, v: min(p, m),
    "ZB-H2": lambda p, m, v: min(2 * p - 1, m),
    "ZBVZeroBubble": lambda p, m, v: min(p, m),
}
"""Microbatches of one rank's layers that the fullest rank holds, for p ranks, m microbatches, v stages a rank."""


@dataclass(frozen=True)
class Activations:
    """`layer_bytes` for one microbatch in one layer, kept on the fullest rank for `layers` × `in_flight`."""

    layer_bytes: float
    layers: float
    in_flight: float

    @property
    def total_bytes(self) -> float:
        return self.layer_bytes * self.layers * self.in_flight

    def __str__(self) -> str:
        return (
            f"{bytes_text(self.total_bytes)}: {bytes_text(self.layer_bytes)} for a microbatch in a layer, "
            f"{self.layers:g} layers, {self.in_flight:g} microbatches in flight"
        )


def activations(
    model: Transformer,
    *,
    microbatch: int = 1,
    tp: int = 1,
    sequence_parallel: bool = False,
    cp: int = 1,
    recompute: str | Recompute = Recompute.NONE,
    pp: int = 1,
    schedule: str = "1F1B",
    num_microbatches: int | None = None,
    stages_per_rank: int = 1,
    dropout: bool = True,
) -> Activations:
    """Bytes of activations in the layers of the fullest pipeline rank (Korthikanti et al., 2022, arXiv:2205.05198).

    For GPT a layer keeps sbh(34 + 5as/h) bytes of one microbatch of b samples: sbh(10 + 24/t + 5as/(ht)) with tensor
    parallelism over t ranks, (34 + 5as/h)/t with sequence parallelism too, without the 5as/h where recomputation is
    selective, 2sbh where it is full. `cp` divides s (the keys stay whole). `pp` divides the layers; the `schedule` says
    how many microbatches are in flight, 1F1B min(p, m), interleaved p + (p−1)/v, in the paper a factor 1 + (p−1)/(pv).
    Not counted: embeddings, logits, the router of a mixture of experts. Without `dropout` its masks and its copy of the
    scores go. Raises `InvalidInputError` for sizes that do not divide.

    >>> gpt_22b = Transformer(num_layers=48, hidden=6144, heads=64, vocab=51200, seq=2048)
    >>> found = activations(gpt_22b, microbatch=4, tp=8, sequence_parallel=True, recompute="selective")
    >>> found.total_bytes / 2**30
    9.5625
    """
    for name, value in (
        ("microbatch", microbatch),
        ("tp", tp),
        ("cp", cp),
        ("pp", pp),
        ("stages_per_rank", stages_per_rank),
    ):
        whole_number(name, value)
    divides("heads", model.heads, "tp", tp)
    divides("seq", model.seq, "cp", cp)
    divides("num_layers", model.num_layers, "pp", pp)
    if schedule not in IN_FLIGHT:
        raise InvalidInputError.because(
            "schedule", schedule, "has no formula here", f"use one of {', '.join(IN_FLIGHT)}, or simulate it"
        )
    way = Recompute.parse(recompute)
    whole = tp if sequence_parallel else 1  # what tensor parallelism leaves whole on each rank
    tokens = model.seq // cp * microbatch
    if way is Recompute.FULL:
        layer = NUMBER_BYTES * tokens * model.hidden / whole
    else:
        scores = 0.0 if way is Recompute.SELECTIVE else _scores(model, dropout) * tokens
        layer = tokens * (_whole(model, dropout) / whole + _sharded(model) / tp) + scores / tp
    microbatches = whole_number("num_microbatches", pp if num_microbatches is None else num_microbatches)
    in_flight = IN_FLIGHT[schedule](pp, microbatches, stages_per_rank)
    return Activations(layer, model.num_layers / pp, in_flight)


def _whole(model: Transformer, dropout: bool) -> int:
    """Bytes a token in a layer that tensor parallelism alone does not shard: norms' and blocks' inputs, masks; 10h."""
    return model.hidden * (4 * NUMBER_BYTES + 2 * MASK_BYTES * dropout)


def _sharded(model: Transformer) -> int:
    """Bytes a token in a layer that tensor parallelism shards: queries, keys, values, context, feed-forward; 24h."""
    attention = 2 * model.hidden + 2 * model.key_value_width
    experts = model.experts
    width = model.expert_width
    kept = (
        4 if model.gated else 2
    ) * width  # into and out of the activation; gated: also the other factor, and the product
    visited = experts.top_k + experts.shared if experts else 1
    routed = experts.top_k * model.hidden if experts else 0  # a copy of the token for each expert that it visits
    return NUMBER_BYTES * (attention + visited * kept + routed)


def _scores(model: Transformer, dropout: bool) -> int:
    """Bytes a query token in a layer: softmax over all keys, and with dropout its mask and its output; 5as."""
    return model.heads * model.seq * (NUMBER_BYTES + (MASK_BYTES + NUMBER_BYTES) * dropout)
