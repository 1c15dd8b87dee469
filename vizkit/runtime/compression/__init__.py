"""Smaller models and messages: numbers in 2 to 8 bits, and linear layers that compute with them."""

from __future__ import annotations

from vizkit.runtime.compression.layers import (
    DynamicLinear,
    WeightOnlyLinear,
    dynamic_int8,
    model_bytes,
    shard,
    weight_only,
)
from vizkit.runtime.compression.messages import message_bytes, received, scales, to_message
from vizkit.runtime.compression.quantized import Quantized, quantize

__all__ = [
    "DynamicLinear",
    "Quantized",
    "WeightOnlyLinear",
    "dynamic_int8",
    "message_bytes",
    "model_bytes",
    "quantize",
    "received",
    "scales",
    "shard",
    "to_message",
    "weight_only",
]
