"""Training runs that others published, as inputs: the model, the layout, and what was measured to compare with."""

from __future__ import annotations

from dataclasses import dataclass

from vizkit.planner.program import Program
from vizkit.transformer import Transformer

MEGATRON_2021 = Program(
    overlap_gradients=False,
    overlap_parameters=False,
    overlap_tensor=False,
    asynchronous_sends=False,
    fused_attention=False,
    regather=False,
)
MEGATRON_2022 = Program(
    overlap_gradients=False,
    overlap_parameters=False,
    asynchronous_sends=False,
    fused_attention=False,
)
DEEPSPEED_2021 = Program(
    overlap_tensor=False, asynchronous_sends=False, fused_attention=False, regather=False, calls_per_layer=12
)
