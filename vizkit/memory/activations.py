"""Bytes of activations that a rank keeps for its backwards."""

from __future__ import annotations

from dataclasses import dataclass

from vizkit.memory.in_flight import known_pipeline
from vizkit.sizes import number_width, yes_or_no
from vizkit.transformer import Recompute, Transformer
from vizkit.units import bytes_text

NUMBER_BYTES, MASK_BYTES, STATISTIC_BYTES = 2, 1, 4
"""Activations are 16-bit numbers, dropout keeps one byte an element, norms keep their statistics in 32 bits."""


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
            f"{self.layers:g} layer{'s' * (self.layers != 1)}, "
            f"{self.in_flight:g} microbatch{'es' * (self.in_flight != 1)} in flight"
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
    stages_per_rank: int | None = None,
    dropout: bool = True,
    number_bytes: float = NUMBER_BYTES,
    norm_statistics: bool = False,
) -> Activations:
    """Bytes of activations in the layers of the fullest pipeline rank (Korthikanti et al., 2022, arXiv:2205.05198).

    For GPT a layer keeps sbh(34 + 5as/h) bytes of one microbatch of b samples: sbh(10 + 24/t + 5as/(ht)) with tensor
    parallelism over t ranks, (34 + 5as/h)/t with sequence parallelism too, without the 5as/h where recomputation is
    selective, 2sbh where it is full. `cp` divides s (the keys stay whole). `pp` divides the layers; the `schedule` says
    how many microbatches are in flight, 1F1B min(p, m), interleaved p + (p−1)/v, in the paper a factor 1 + (p−1)/(pv).
    `number_bytes` is 4 where activations are fp32; masks keep 1. The paper leaves the norms' statistics out:
    `norm_statistics` counts them, mean and deviation in fp32. Without `dropout` its masks and its copy of the scores
    go. Not counted: embeddings and logits (`vk.memory.per_rank` has them), the router of a mixture of experts. Raises
    `InvalidInputError` for sizes that do not divide, or that the schedule does not have.

    >>> gpt_22b = Transformer(num_layers=48, hidden=6144, heads=64, vocab=51200, seq=2048)
    >>> found = activations(gpt_22b, microbatch=4, tp=8, sequence_parallel=True, recompute="selective")
    >>> found.total_bytes / 2**30
    9.5625
    """
    from vizkit.layout import Layout  # which knows the rules, and is made of this package

    layout = Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        sequence_parallel=sequence_parallel,
        microbatch=microbatch,
        num_microbatches=pp if num_microbatches is None else num_microbatches,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        recompute=recompute,
    )
    layout.check(model)
    layer = layer_bytes(
        model,
        model.seq // layout.cp * layout.microbatch,
        layout.tp,
        layout.sequence_parallel,
        Recompute.parse(recompute),
        number_width("number_bytes", number_bytes),
        yes_or_no("dropout", dropout),
        yes_or_no("norm_statistics", norm_statistics),
    )
    plan = known_pipeline(layout.schedule, layout.pp, layout.num_microbatches, layout.local_stages)
    return Activations(layer, model.num_layers / layout.pp, plan.in_flight)


def layer_bytes(
    model: Transformer,
    tokens: int,
    tp: int,
    sequence_parallel: bool,
    recompute: Recompute,
    number_bytes: float,
    dropout: bool,
    norm_statistics: bool,
) -> float:
    """Bytes of one layer for one microbatch of so many tokens on this rank; `activations` says by which formula.

    An expert's input, a copy of the token for each expert that it visits, is whole on each rank that shares the expert.
    """
    hidden, experts = model.hidden, model.experts
    whole = tp if sequence_parallel else 1  # what tensor parallelism leaves whole on each rank
    if recompute is Recompute.FULL:
        return number_bytes * tokens * hidden / whole
    masks = 2 * MASK_BYTES if dropout else 0
    statistics = 2 * norm_statistics_bytes(model) if norm_statistics else 0
    inputs = hidden * (4 * number_bytes + masks) + statistics  # of norms and blocks; 10h
    # into the activation function and out of it; gated: also the other factor, and the product
    feed_forward = (4 if model.gated else 2) * model.expert_width
    routed = 0.0
    if experts is not None:
        feed_forward *= experts.top_k + experts.shared
        routed = number_bytes * experts.top_k * hidden
    sharded = number_bytes * (2 * hidden + 2 * model.key_value_width + feed_forward)  # 24h
    if recompute is Recompute.NONE:
        # softmax over all keys, and with dropout its mask and its output; 5as
        sharded += model.heads * model.seq * (number_bytes + (MASK_BYTES + number_bytes if dropout else 0))
    return tokens * (inputs / whole + routed + sharded / tp)


def norm_statistics_bytes(model: Transformer) -> int:
    """What one norm keeps of one token: mean and reciprocal deviation, or the latter alone without a mean."""
    return STATISTIC_BYTES * (1 if model.rms_norm else 2)
