"""Bytes on one rank of any mixture of ways to split a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vizkit.errors import InvalidInputError
from vizkit.memory.activations import MASK_BYTES, layer_bytes, norm_statistics_bytes
from vizkit.memory.in_flight import PipelineRank, known_pipeline
from vizkit.memory.shards import check_fit, dense_params, shards
from vizkit.memory.states import precision_of
from vizkit.sizes import is_whole, not_negative, number_width, yes_or_no
from vizkit.transformer import Recompute, Transformer
from vizkit.units import bytes_text

if TYPE_CHECKING:
    from vizkit.layout import Layout


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank; `stage` is its place along the pp axis, `num_params` what it holds before ZeRO shards it.

    Activations are those of the layers and those of the model's two ends, embeddings and logits.
    """

    stage: int
    num_params: int
    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    layer_activations_bytes: float
    end_activations_bytes: float

    @property
    def activations_bytes(self) -> float:
        return self.layer_activations_bytes + self.end_activations_bytes

    @property
    def states_bytes(self) -> float:
        """Parameters, gradients and optimizer state."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> float:
        return self.states_bytes + self.activations_bytes

    def __str__(self) -> str:
        parts = ("parameters", "gradients", "optimizer", "activations")
        said = ", ".join(f"{part} {bytes_text(getattr(self, f'{part}_bytes'))}" for part in parts)
        return f"{bytes_text(self.total_bytes)} at place {self.stage} of the pipeline: {said}"


def per_rank(
    model: Transformer,
    layout: Layout,
    stage: int | None = None,
    *,
    number_bytes: float | None = None,
    dropout: bool = True,
    norm_statistics: bool = False,
    logits_bytes: float = 4,
    gathered_layers: int = 0,
    working_layer: bool = False,
) -> RankMemory:
    """Bytes of parameters, gradients, optimizer and activations on the fullest rank, or on one at `stage` along pp.

    - States: ZeRO's Table 1 (Rajbhandari et al., 2020) of what is left after tp, pp and ep; dp × cp replicas share it,
      dp × cp / ep those of an expert. `gathered_layers` adds whole layers that ZeRO-3 holds at a time, of those that
      the rank has, parameters and gradients in the parameters' format: the paper counts none, DeepSpeed's estimator 1,
      FSDP with prefetch holds 2.
    - Activations of layers: Korthikanti et al., 2022, as `activations` says. A number has `number_bytes`, by default
      those of a parameter. The paper has `dropout`, and leaves out `norm_statistics` and the layer that recomputation
      is just working on (`working_layer`).
    - Activations of the ends (section 4.3): sbh of masks of the embeddings' dropout for each microbatch in flight on
      the first stage; 2sbh of the last norm, 2sbh into the logits and 4sbV/t of logits on the last, which are fp32
      (`logits_bytes`; 2 where the loss reads them as they come, 6 where both are kept). The last norm's activations
      count also where `model.final_norm` leaves its parameters out.
    - Of an interleaved first stage 2p microbatches are in flight at its peak, where the paper says p.

    Each part counts at its own peak: an upper bound, and exact in 1F1B and GPipe. Not counted: token numbers, buffers
    of communication, what the allocator loses. Raises `InvalidInputError` where layout and model do not fit, and for
    numbers that cannot be.

    >>> from vizkit.layout import Layout
    >>> gpt = Transformer(num_layers=48, hidden=6144, heads=64, vocab=51200, seq=2048)
    >>> print(per_rank(gpt, Layout(tp=8, sequence_parallel=True, recompute="selective", microbatch=4)))
    54.9 GB at place 0 of the pipeline: parameters 5.54 GB, gradients 5.54 GB, optimizer 33.3 GB, activations 10.5 GB
    """
    check_fit(model, layout)
    if number_bytes is not None:
        number_bytes = number_width("number_bytes", number_bytes)
    logits_bytes = not_negative("logits_bytes", logits_bytes, "use 4 for fp32, 0 for none")
    if not is_whole(gathered_layers) or gathered_layers < 0:
        raise InvalidInputError.because(
            "gathered_layers", gathered_layers, "must be a whole number, at least 0", "use 2 for FSDP with prefetch"
        )
    switches = {"dropout": dropout, "norm_statistics": norm_statistics, "working_layer": working_layer}
    for name, switch in switches.items():
        yes_or_no(name, switch)
    plan = known_pipeline(layout.schedule, layout.pp, layout.num_microbatches, layout.local_stages)
    per = precision_of(layout.precision)
    number = per.parameter_bytes if number_bytes is None else number_bytes
    tp, way, zero = layout.tp, Recompute.parse(layout.recompute), layout.zero_stage
    part = shards(model, tp, layout.ep)
    layers = model.num_layers // layout.num_stages
    experts = layers * layout.local_stages * part.experts
    tokens = model.seq // layout.cp * layout.microbatch
    split = (tokens, tp, layout.sequence_parallel)
    kept = layer_bytes(model, *split, way, number, dropout, norm_statistics)
    working = 0.0
    if working_layer and way is not Recompute.NONE:
        working = layer_bytes(model, *split, Recompute.NONE, number, dropout, norm_statistics) - kept
    whole_tokens = tokens / (tp if layout.sequence_parallel else 1)
    statistics = norm_statistics_bytes(model) if norm_statistics else 0
    first_bytes = whole_tokens * model.hidden * MASK_BYTES if dropout else 0.0
    last_bytes = whole_tokens * (2 * model.hidden * number + statistics) + tokens * logits_bytes * -(-model.vocab // tp)
    at_once = min(int(gathered_layers), layers * layout.local_stages)
    gathered = at_once * (part.layer + part.experts) * per.parameter_bytes if zero == 3 else 0.0
    replicas, expert_replicas = layout.replicas, layout.expert_replicas

    def on(place: PipelineRank) -> RankMemory:
        dense = dense_params(model, layout, part, place)
        num_params = dense + experts
        share = dense / replicas + experts / expert_replicas
        return RankMemory(
            place.rank,
            num_params,
            per.parameter_bytes * (share if zero >= 3 else num_params) + gathered,
            per.gradient_bytes * (share if zero >= 2 else num_params) + gathered,
            per.optimizer_bytes * (share if zero >= 1 else num_params),
            place.passes * layers * kept + working,
            place.first * first_bytes + place.last * last_bytes,
        )

    if stage is not None:
        return on(plan.at(stage))
    return max(map(on, plan.distinct), key=lambda memory: memory.total_bytes)
