"""Bytes on a rank from published formulas: model states under ZeRO, activations under every way to split a model."""

from vizkit.memory.activations import Activations, activations
from vizkit.memory.cache import key_value_cache
from vizkit.memory.in_flight import Pipeline, PipelineRank, pipeline
from vizkit.memory.mixture import RankMemory, per_rank
from vizkit.memory.states import (
    OFFLOAD_BYTES,
    PRECISIONS,
    ModelStates,
    Precision,
    model_states,
    precision_of,
    zero3_estimate,
)

__all__ = [
    "OFFLOAD_BYTES",
    "PRECISIONS",
    "Activations",
    "ModelStates",
    "Pipeline",
    "PipelineRank",
    "Precision",
    "RankMemory",
    "activations",
    "key_value_cache",
    "model_states",
    "per_rank",
    "pipeline",
    "precision_of",
    "zero3_estimate",
]
