"""How long a step of training takes on a cluster, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from vizkit.hardware.cluster import Cluster
from vizkit.layout import Layout
from vizkit.memory import RankMemory, per_rank, precision_of
from vizkit.planner.pipelines import PIPELINE_COSTS, pipeline_hops
from vizkit.planner.program import Program
from vizkit.planner.stages import StageTime, check, check_finite, replicas_s, stage_times
from vizkit.trace import Clock
from vizkit.transformer import Transformer
from vizkit.units import bytes_text, seconds_text

GATHERED_LAYERS = 2
"""Of ZeRO-3: one to compute with, one on its way."""
AXES = ("tp", "cp", "ep", "pp", "dp")
"""Along which communication may be exposed; "dp" stands for all that replicas say to each other."""


@dataclass(frozen=True)
class Prediction:
    """One step of training on the clock "ideal": seconds of the slowest rank, which add up to `step_s`.

    `matrix_s` is spent in matrix products, `elementwise_s` in what mostly reads and writes memory, `optimizer_s` in
    updating parameters. `exposed_s` is communication that no computation hides, by axis of `AXES`; `bubble_s` the time
    for which the pipeline leaves the rank idle. `memory` is the fullest rank's, `memory_limit_bytes` what it has.
    """

    model: Transformer = field(repr=False)
    layout: Layout
    num_devices: int
    matrix_s: float
    elementwise_s: float
    exposed_s: Mapping[str, float]
    bubble_s: float
    optimizer_s: float
    memory: RankMemory
    memory_limit_bytes: float
    peak_flops_per_s: float

    clock = Clock.IDEAL

    @property
    def compute_s(self) -> float:
        """Forward and backward of all microbatches."""
        return self.matrix_s + self.elementwise_s

    @property
    def exposed_total_s(self) -> float:
        return sum(self.exposed_s.values())

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_total_s + self.bubble_s + self.optimizer_s

    @property
    def memory_bytes(self) -> float:
        return self.memory.total_bytes

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.memory_limit_bytes

    @property
    def tokens_per_s(self) -> float:
        """Of all devices together."""
        return self.layout.global_batch * self.model.seq / self.step_s

    @property
    def model_flops_utilisation(self) -> float:
        """Share of all devices' peak: operations that the model needs, recomputation left out (Chowdhery et al., 2022,
        arXiv:2204.02311)."""
        needed = self.model.flops(self.layout.global_batch)
        return needed / self.step_s / self.num_devices / self.peak_flops_per_s

    @property
    def achieved_flops_per_s(self) -> float:
        """Of one device, recomputation counted, as SC'21 does for full recomputation (Narayanan et al., eq. 3)."""
        done = self.model.flops(self.layout.global_batch, self.layout.recompute)
        return done / self.step_s / self.num_devices

    @property
    def bubble_share(self) -> float:
        """Of the whole step."""
        return self.bubble_s / self.step_s

    def __str__(self) -> str:
        parts = {"matrix products": self.matrix_s, "element by element": self.elementwise_s}
        parts |= {f"exposed {axis}": seconds for axis, seconds in self.exposed_s.items()}
        parts |= {"bubble": self.bubble_s, "optimizer": self.optimizer_s}
        said = ", ".join(f"{what} {seconds_text(s)} ({s / self.step_s:.0%})" for what, s in parts.items() if s)
        return (
            f"{seconds_text(self.step_s)} a step ({self.clock.value}), {self.tokens_per_s:,.0f} tokens/s, "
            f"MFU {self.model_flops_utilisation:.1%}, {self.achieved_flops_per_s / 1e12:.1f} TFLOP/s a device\n"
            f"{said}\n{bytes_text(self.memory_bytes)} of {bytes_text(self.memory_limit_bytes)} a device"
        )


def predict(model: Transformer, layout: Layout, cluster: Cluster, *, program: Program | None = None) -> Prediction:
    """How long one step takes with this layout on this cluster, and what it is spent on.

    - Compute: matrix products by `Device.matrix_efficiency`, all else by bytes over the memory's bandwidth.
    - Tensor parallelism, all-to-alls and copies are exposed; context parallelism's ring hides behind attention.
    - Gradients, and what ZeRO shards, hide behind the backward, or forward, of one microbatch, but for a layer's share.
    - Pipeline: the bubble of the schedule's paper, and the hops that follow from `vk.simulate`. The last stage's logits
      make its rank the slowest, for which the others wait.
    - Links: an axis whose groups stay inside a node has the link there; others share the node's network cards.

    Bytes are those of `vk.volume`, seconds of a collective those of `vk.collectives`, memory that of `vk.memory`. What
    is left out: data loading, launches of kernels, stragglers, congestion. Raises `InvalidInputError` where model,
    layout and cluster do not fit each other, and for schedules without a formula here.

    >>> from vizkit.hardware import dgx_a100
    >>> gpt = Transformer(num_layers=36, hidden=4096, heads=32, vocab=51200, seq=2048)
    >>> found = predict(gpt, Layout(dp=8, tp=4, num_microbatches=16, recompute="full"), dgx_a100(num_nodes=4))
    >>> found.fits, 0.3 < found.model_flops_utilisation < 0.5
    (True, True)
    """
    program = Program() if program is None else program
    check(model, layout, cluster, program)
    p, m, v = layout.pp, layout.num_microbatches, layout.local_stages
    stages = stage_times(model, layout, cluster, program)
    slowest = max(stages, key=lambda stage: stage.seconds)
    middle, alike = stages[len(stages) // 2], max(p - 3, 0)

    def waiting(of: Callable[[StageTime], float]) -> float:
        return sum(map(of, stages)) + alike * of(middle) - of(slowest)

    exposed = {
        "tp": m * slowest.tensor_s,
        "cp": m * slowest.context_s,
        "ep": slowest.traffic.experts_s,
        "pp": max(stage.traffic.copies_s for stage in stages),
        "dp": max(replicas_s(stage, layout, program) for stage in stages),
    }
    bubble_s = 0.0
    if p > 1:
        hop_s = max(stage.traffic.hop_s for stage in stages)
        sends = layout.schedule, p, m, v, hop_s, slowest.seconds, program.asynchronous_sends
        exposed["pp"] += float(pipeline_hops(*sends))
        idle, weights = waiting(lambda stage: stage.seconds), waiting(lambda stage: stage.passes.matrix_forward)
        bubble_s = float(PIPELINE_COSTS[layout.schedule].bubble(idle, weights, v))
    found = Prediction(
        model,
        layout,
        cluster.num_devices,
        matrix_s=m * slowest.passes.matrix,
        elementwise_s=m * slowest.passes.moving,
        exposed_s=MappingProxyType(exposed),
        bubble_s=bubble_s,
        optimizer_s=max(stage.optimizer_s for stage in stages),
        memory=memory_of(model, layout, program),
        memory_limit_bytes=cluster.device.memory_bytes * (1 - program.reserved_share),
        peak_flops_per_s=cluster.device.peak(precision_of(layout.precision).parameter_bytes),
    )
    check_finite(found.step_s, cluster)
    return found


def memory_of(model: Transformer, layout: Layout, program: Program) -> RankMemory:
    """`vk.memory.per_rank` as the planner asks it.

    ZeRO-3 holds two whole layers at a time. The layer that recomputation works on counts where its scores do; kernels
    that keep none leave it so small that the reserved share has room for it.
    """
    return per_rank(model, layout, gathered_layers=GATHERED_LAYERS, working_layer=not program.fused_attention)
