"""How many parameters of each part of a transformer one rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vizkit.errors import InvalidInputError
from vizkit.memory.in_flight import PipelineRank
from vizkit.transformer import Transformer

if TYPE_CHECKING:
    from vizkit.layout import Layout


class Shards(NamedTuple):
    """Parameters of one rank, whole where ZeRO would shard them among replicas.

    Tensor parallelism shards the matrices, the biases of those that are split by columns (queries, keys, values, into
    the feed-forward part), and the vocabulary, ⌈V/t⌉ tokens a rank. It leaves norms, biases after a split by rows,
    positions and the router whole on each rank: `replicated` of a layer's parameters (Shoeybi et al., 2019,
    arXiv:1909.08053). `ep` ranks share the experts, not what all tokens visit.
    """

    layer: int
    """Of one layer, but for its experts."""
    experts: int
    """Of one layer's experts on this rank."""
    replicated: int
    """Those of `layer` that tensor parallelism does not shard."""
    vocabulary: int
    """Of one matrix of tokens: embedding or logits."""
    positions: int
    final_norm: int


def check_fit(model: Transformer, layout: Layout) -> None:
    """Raises `InvalidInputError` where these ranks cannot share this model, or where either is something else."""
    check = getattr(type(layout), "check", None)
    if check is None or isinstance(layout, type):
        raise InvalidInputError.because("layout", layout, "must be a vk.Layout", "use vk.Layout(dp=2)")
    check(layout, model)


def shards(model: Transformer, tp: int, ep: int) -> Shards:
    """What one of `tp` × `ep` ranks holds; they divide what `Layout.check` says."""
    hidden, bias, mixture = model.hidden, model.bias, model.experts
    both = 2 * model.key_value_width
    into = (2 if model.gated else 1) * model.expert_width
    norm = hidden if model.rms_norm else 2 * hidden
    row_bias = hidden if bias else 0
    expert = (into + model.expert_width) * hidden // tp + (into // tp if bias else 0)  # but for its bias after the rows
    attention = hidden * (2 * hidden + both) // tp + ((hidden + both) // tp if bias else 0)
    replicated = 2 * norm + row_bias
    if mixture is None:
        replicated += row_bias
        sharded, experts = attention + expert, 0
    else:
        replicated += mixture.shared * row_bias + hidden * mixture.count
        sharded, experts = attention + mixture.shared * expert, mixture.count // ep * (expert + row_bias)
    return Shards(
        layer=sharded + replicated,
        experts=experts,
        replicated=replicated,
        vocabulary=-(-model.vocab // tp) * hidden,
        positions=model.seq * hidden if model.learned_positions else 0,
        final_norm=norm if model.final_norm else 0,
    )


def dense_params(model: Transformer, layout: Layout, part: Shards, place: PipelineRank) -> int:
    """All that one rank of a pipeline holds but experts: its layers, and the ends of the model where they are its own.

    Tied embeddings on different ranks are two copies, whose gradients those ranks add (Narayanan et al., SC'21).
    """
    held = model.num_layers // layout.num_stages * layout.local_stages * part.layer
    if place.first:
        held += part.vocabulary + part.positions
    if place.last:
        held += part.final_norm + (0 if model.tied_embeddings and place.first else part.vocabulary)
    return held
