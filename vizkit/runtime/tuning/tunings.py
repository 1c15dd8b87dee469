"""Ways to train the same task with other communication, as data, and what each puts on the wire by formula."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vizkit.collectives.exchanges import (
    FP32_BYTES,
    Moved,
    Nodes,
    all_reduce,
    hierarchical_all_reduce,
    power_sgd_elements,
    quantised_all_gather,
    quantised_all_reduce,
    reduce_scatter,
)
from vizkit.errors import InvalidInputError
from vizkit.runtime.tuning.quantised import BLOCK
from vizkit.sizes import is_number, whole_number, yes_or_no

Shapes = Sequence[Sequence[int]]


class Exchange(enum.StrEnum):
    """What ranks do with their gradients in the backward of a step."""

    ALL_REDUCE = "all-reduce"
    """DDP's own, fp32."""
    FP16 = "all-reduce in fp16"
    """Torch's `fp16_compress_hook`."""
    POWER_SGD = "PowerSGD"
    """Torch's `powerSGD_hook`: two thin factors of each matrix."""
    HIERARCHICAL = "hierarchical all-reduce"
    """Inside nodes first, then 1/g of the bytes between them."""
    INT8 = "int8 all-to-all and all-gather"
    """Blocks of int8 with scales."""
    SHARDED = "reduce-scatter, int8 all-gather"
    """Each rank updates its part of the parameters, which all gather in int8: ZeRO-1 with quantised weights."""
    NOTHING = "nothing"
    """Local SGD: parameters are averaged every `period` steps."""
    IN_NODE = "all-reduce inside nodes"
    """Local SGD of whole nodes."""


@dataclass(frozen=True)
class Tuning:
    """One way to communicate; what is not said is DDP as it comes.

    - `exchange`: what happens to gradients, an `Exchange` or its text.
    - `bucket_mb`: DDP's bucket size in MiB; several buckets travel while the backward goes on.
    - `accumulate`: batches whose gradients are added up before one exchange and one optimizer step.
    - `forward_in_no_sync=False` leaves the forward outside `no_sync`, the usual mistake, which then changes nothing.
    - `period`: optimizer steps between two averages of the parameters, for the exchanges `NOTHING` and `IN_NODE`.
    - `rank`, `error_feedback`: PowerSGD's; `block`: numbers in a block of int8.
    - `learning_rate` of the SGD with momentum 0.9.

    Raises `InvalidInputError` for sizes below 1, and for a period with or without an exchange that needs it.

    >>> Tuning("fp16", "all-reduce in fp16").exchange
    <Exchange.FP16: 'all-reduce in fp16'>
    """

    name: str
    exchange: Exchange = Exchange.ALL_REDUCE
    bucket_mb: float = 25.0
    accumulate: int = 1
    forward_in_no_sync: bool = True
    period: int = 1
    rank: int = 1
    error_feedback: bool = True
    block: int = BLOCK
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        if self.exchange not in list(Exchange):
            raise InvalidInputError.unknown("exchange", self.exchange, "is no way to exchange gradients", Exchange)
        object.__setattr__(self, "exchange", Exchange(self.exchange))
        for name in ("accumulate", "period", "rank", "block"):
            whole_number(name, getattr(self, name))
        for name in ("forward_in_no_sync", "error_feedback"):
            yes_or_no(name, getattr(self, name))
        for name in ("bucket_mb", "learning_rate"):
            if not is_number(value := getattr(self, name)) or not 0 < value < math.inf:
                raise InvalidInputError.because(name, value, "must be positive and finite", f"use {name}=0.1")
        if (self.period > 1) != self.averages_parameters:
            raise InvalidInputError.because(
                "period",
                self.period,
                f"with the exchange {self.exchange.value!r}: parameters are averaged, every 2 steps or more, where "
                "gradients are not, and only there",
                "use period=4 with 'nothing' or 'all-reduce inside nodes', and period=1 with any other",
            )

    @property
    def averages_parameters(self) -> bool:
        return self.exchange in (Exchange.NOTHING, Exchange.IN_NODE)

    @property
    def cycle(self) -> int:
        """Batches after which everything has happened equally often."""
        return self.accumulate * self.period

    def moved(self, shapes: Shapes, nodes: Nodes, backend: str = "gloo") -> Moved:
        """Bytes on the wire for one `cycle`, for parameters of these shapes in fp32, by the formula of the exchange."""
        exchanges = self.accumulate if not self.forward_in_no_sync else 1
        step = _STEPS[self.exchange](self, shapes, nodes, backend)
        return self.period * exchanges * step + _AVERAGES.get(self.exchange, _no_average)(shapes, nodes)


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _sharded(tuning: Tuning, shapes: Shapes, nodes: Nodes, backend: str) -> Moved:
    part = math.ceil(_elements(shapes) / nodes.world_size)
    gradients = reduce_scatter(nodes, part * nodes.world_size * FP32_BYTES, backend)
    return gradients + quantised_all_gather(nodes, part, tuning.block)


def _in_node(tuning: Tuning, shapes: Shapes, nodes: Nodes, backend: str) -> Moved:
    g = nodes.ranks_per_node
    return nodes.count * all_reduce(Nodes(g, g), FP32_BYTES * _elements(shapes))


def _average_between(shapes: Shapes, nodes: Nodes) -> Moved:
    return nodes.ranks_per_node * all_reduce(Nodes(nodes.count, 1), FP32_BYTES * _elements(shapes))


def _no_average(shapes: Shapes, nodes: Nodes) -> Moved:
    return Moved()


_STEPS: dict[Exchange, Callable[[Tuning, Shapes, Nodes, str], Moved]] = {
    Exchange.ALL_REDUCE: lambda _, shapes, nodes, __: all_reduce(nodes, FP32_BYTES * _elements(shapes)),
    Exchange.FP16: lambda _, shapes, nodes, __: all_reduce(nodes, 2 * _elements(shapes)),
    Exchange.POWER_SGD: lambda tuning, shapes, nodes, _: all_reduce(
        nodes, FP32_BYTES * power_sgd_elements(shapes, tuning.rank)
    ),
    Exchange.HIERARCHICAL: lambda _, shapes, nodes, backend: hierarchical_all_reduce(
        nodes, _elements(shapes), FP32_BYTES, backend
    ),
    Exchange.INT8: lambda tuning, shapes, nodes, _: quantised_all_reduce(nodes, _elements(shapes), tuning.block),
    Exchange.SHARDED: _sharded,
    Exchange.NOTHING: lambda *_: Moved(),
    Exchange.IN_NODE: _in_node,
}
_AVERAGES: dict[Exchange, Callable[[Shapes, Nodes], Moved]] = {
    Exchange.NOTHING: lambda shapes, nodes: all_reduce(nodes, FP32_BYTES * _elements(shapes)),
    Exchange.IN_NODE: _average_between,
}

TUNINGS = (
    Tuning("one bucket"),
    Tuning("buckets of 0.05 MiB", bucket_mb=0.05),
    Tuning("no_sync wrong", accumulate=4, forward_in_no_sync=False),
    Tuning("accumulate 4", accumulate=4),
    Tuning("fp16", Exchange.FP16),
    Tuning("int8", Exchange.INT8),
    Tuning("sharded, int8 gather", Exchange.SHARDED),
    Tuning("PowerSGD rank 2", Exchange.POWER_SGD, rank=2),
    Tuning("hierarchical", Exchange.HIERARCHICAL),
    Tuning("local SGD, every 4", Exchange.NOTHING, period=4),
    Tuning("local SGD of nodes", Exchange.IN_NODE, period=4),
)
"""What `compare` shows unless told otherwise; the first is the baseline."""
