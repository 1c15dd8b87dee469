"""Bytes on a rank from published formulas: model states under ZeRO, activations under every way to split a model."""

from vizkit.memory.activations import IN_FLIGHT, Activations, activations
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
    "IN_FLIGHT",
    "OFFLOAD_BYTES",
    "PRECISIONS",
    "Activations",
    "ModelStates",
    "Precision",
    "activations",
    "model_states",
    "precision_of",
    "zero3_estimate",
]
