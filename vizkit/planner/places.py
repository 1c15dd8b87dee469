"""What the first rank of each pipeline holds, the last, and one in between: as arrays, equal to `vk.memory`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from vizkit.memory.activations import MASK_BYTES
from vizkit.memory.shards import Shards, shards
from vizkit.memory.states import precision_of
from vizkit.planner.columns import Columns
from vizkit.planner.prediction import GATHERED_LAYERS
from vizkit.transformer import Transformer

LOGIT_BYTES = 4


@dataclass(frozen=True)
class Place:
    """Masks and counts for one place along pp: whether a layout has it, and whether a chain starts or ends there."""

    exists: np.ndarray
    first: np.ndarray
    last: np.ndarray
    passes: np.ndarray
    """Microbatches on stages that wait for their backward."""
    first_passes: np.ndarray
    last_passes: np.ndarray


def places(rows: Columns) -> Iterator[Place]:
    """The first rank, the second where it is neither end, and the last where it is another."""
    p = rows.pp
    for rank, exists in ((np.zeros_like(p), p > 0), (np.ones_like(p), p > 2), (p - 1, p > 1)):
        first, last = rank == 0, rank == p - 1
        passes, first_passes, last_passes = _held(rows, rank)
        yield Place(exists, first, last, passes, first_passes * first, last_passes * last)


def _held(rows: Columns, rank: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`vk.memory.pipeline`'s counts by formula, interleaved for p | m; ZB-H1 holds everywhere what 1F1B does first."""
    p, m, v = rows.pp, rows.num_microbatches, rows.stages_per_rank
    once, few = np.ones_like(p), np.minimum(p, m)
    counts = {
        "GPipe": (m, m, m),
        "1F1B": (np.minimum(p - rank, m), few, once),
        "Interleaved1F1B": (np.minimum(2 * (p - rank - 1) + (v - 1) * p + 1, m * v), np.minimum(2 * p, m), once),
        "ZB-H1": (few, few, few),
    }
    masks = [rows.is_schedule(name) for name in counts]
    passes, first, last = (np.select(masks, list(columns)) for columns in zip(*counts.values(), strict=True))
    return passes, first, last


def part_of(model: Transformer, rows: Columns) -> Shards:
    """`vk.memory`'s formulas of arrays of whole numbers."""
    tp, ep = (cast(Any, column.astype(np.int64)) for column in (rows.tp, rows.ep))
    return shards(model, tp, ep)


def dense_params(model: Transformer, rows: Columns, part: Shards, place: Place) -> np.ndarray:
    """All parameters at a place but experts', before ZeRO shards them."""
    held = model.num_layers / rows.pp * part.layer
    held = held + place.first * (part.vocabulary + part.positions)
    both = place.first if model.tied_embeddings else False
    return held + place.last * (part.final_norm + np.where(both, 0, part.vocabulary))


def layer_bytes(model: Transformer, rows: Columns, number: float, full: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Bytes that a layer keeps of one microbatch; `scores` is 1 where attention's scores are kept, else 0."""
    tokens = model.seq / rows.cp * rows.microbatch
    whole = 1 + rows.sequence_parallel * (rows.tp - 1)
    inputs = model.hidden * (4 * number + 2 * MASK_BYTES)
    feed_forward = (4 if model.gated else 2) * model.expert_width
    routed = 0.0
    if model.experts is not None:
        feed_forward *= model.experts.top_k + model.experts.shared
        routed = number * model.experts.top_k * model.hidden
    matrices = number * (2 * model.hidden + 2 * model.key_value_width + feed_forward)
    sharded = matrices + scores * model.heads * model.seq * (2 * number + MASK_BYTES)
    kept = tokens * (inputs / whole + routed + sharded / rows.tp)
    return np.where(full > 0, number * tokens * model.hidden / whole, kept)


def memory_bytes(model: Transformer, rows: Columns, fused_attention: bool) -> np.ndarray:
    """Bytes on the fullest rank of each layout: `vk.memory.per_rank` as `predict` asks it."""
    per = precision_of(rows.precision)
    number = per.parameter_bytes
    part = part_of(model, rows)
    layers = model.num_layers / rows.pp
    experts = layers * part.experts
    tokens = model.seq / rows.cp * rows.microbatch
    scores = 1 - np.maximum(rows.full, rows.selective)
    kept = layer_bytes(model, rows, number, rows.full, scores)
    working: np.ndarray | float = 0.0
    if not fused_attention:
        nothing = np.zeros_like(scores)
        working = layer_bytes(model, rows, number, nothing, nothing + 1) - kept
    whole_tokens = tokens / (1 + rows.sequence_parallel * (rows.tp - 1))
    first_bytes = whole_tokens * model.hidden * MASK_BYTES
    last_bytes = whole_tokens * 2 * model.hidden * number + tokens * LOGIT_BYTES * np.ceil(model.vocab / rows.tp)
    shards_all = rows.zero_stage >= 3
    gathered = shards_all * np.minimum(GATHERED_LAYERS, layers) * (part.layer + part.experts) * per.parameter_bytes
    fullest = np.zeros(len(rows))
    for place in places(rows):
        dense = dense_params(model, rows, part, place)
        whole, share = dense + experts, dense / rows.replicas + experts / rows.expert_replicas
        states = (
            per.parameter_bytes * np.where(shards_all, share, whole)
            + per.gradient_bytes * np.where(rows.zero_stage >= 2, share, whole)
            + per.optimizer_bytes * np.where(rows.zero_stage >= 1, share, whole)
            + 2 * gathered
        )
        held = place.passes * layers / rows.stages_per_rank * kept + working
        total = states + held + place.first_passes * first_bytes + place.last_passes * last_bytes
        fullest = np.maximum(fullest, np.where(place.exists, total, 0))
    return fullest
