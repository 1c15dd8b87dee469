"""What the training program does that a layout does not say: what it hides, and how it cuts what it sends."""

from __future__ import annotations

from dataclasses import dataclass

from vizkit.errors import InvalidInputError
from vizkit.sizes import is_number, whole_number, yes_or_no


@dataclass(frozen=True, kw_only=True)
class Program:
    """How a training program behaves; the defaults are those of today's Megatron and FSDP.

    - `overlap_gradients`: they are reduced layer by layer during the last backward. `overlap_parameters`: what ZeRO
      shards is gathered layer by layer during the forward, or the backward, that comes before it is used.
    - `overlap_tensor`: a backward's tensor-parallel communication goes on while the weights' gradients are computed.
    - `asynchronous_sends`: a stage goes on while its output travels; otherwise it waits, as Megatron did in 2021.
    - `scatter_gather`: tensor-parallel ranks, which hold the same output, each send a part of it and gather it again
      inside the node (Narayanan et al., SC'21, section 4.1).
    - `send_share`: what a message between stages gets of its link's bandwidth, next to a collective.
    - `fused_attention`: scores never leave the chip, and those of later tokens are not computed (Dao, 2023,
      arXiv:2307.08691). In memory it is what `recompute="selective"` says.
    - `regather`: a backward gathers what sequence parallelism kept only a shard of (Korthikanti et al., 2022).
    - `calls_per_layer`: into how many calls ZeRO-3 cuts a layer: FSDP 1, DeepSpeed one for each tensor.
    - `reserved_share`: of a device's memory, for the driver, communication buffers and what the allocator loses.
    """

    overlap_gradients: bool = True
    overlap_parameters: bool = True
    overlap_tensor: bool = True
    asynchronous_sends: bool = True
    scatter_gather: bool = True
    send_share: float = 1.0
    fused_attention: bool = True
    regather: bool = True
    calls_per_layer: int = 1
    reserved_share: float = 0.1

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            object.__setattr__(self, name, yes_or_no(name, getattr(self, name)))
        object.__setattr__(self, "calls_per_layer", whole_number("calls_per_layer", self.calls_per_layer))
        if not (is_number(self.send_share) and 0 < self.send_share <= 1):
            raise InvalidInputError.because(
                "send_share", self.send_share, "is a share, over 0 and at most 1", "use send_share=1"
            )
        if not (is_number(self.reserved_share) and 0 <= self.reserved_share < 1):
            raise InvalidInputError.because(
                "reserved_share", self.reserved_share, "is a share, at least 0 and under 1", "use reserved_share=0.1"
            )


_SWITCHES = (
    "overlap_gradients",
    "overlap_parameters",
    "overlap_tensor",
    "asynchronous_sends",
    "scatter_gather",
    "fused_attention",
    "regather",
)
