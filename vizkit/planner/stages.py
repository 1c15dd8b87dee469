"""What each rank of a pipeline takes for one microbatch, and says to others in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.hardware.cluster import Cluster
from vizkit.layout import Layout
from vizkit.memory import precision_of
from vizkit.memory.in_flight import known_pipeline
from vizkit.memory.shards import dense_params, shards
from vizkit.memory.states import Precision
from vizkit.planner.pipelines import PIPELINE_COSTS, hidden
from vizkit.planner.program import Program
from vizkit.planner.traffic import Traffic, backward_share, forward_share, traffic
from vizkit.planner.work import Passes, Work
from vizkit.transformer import Recompute, Transformer, check_model

MOST_COUNTED = 2**53


@dataclass(frozen=True)
class StageTime:
    """What one rank of the pipeline takes: one microbatch's `passes`, and exposed tensor- and context-parallel seconds
    of one; `traffic` for the whole step, hidden or not."""

    passes: Passes
    tensor_s: float
    tensor_forward_s: float
    context_s: float
    traffic: Traffic
    layers: int
    num_microbatches: int
    optimizer_s: float

    @property
    def forward_s(self) -> float:
        """Of one microbatch, with what is exposed on the way: half of the calls to experts, a third of the contexts."""
        return self.passes.forward + self.tensor_forward_s + self._experts_s / 2 + self.context_s / 3

    @property
    def backward_s(self) -> float:
        return self.seconds - self.forward_s

    @property
    def _experts_s(self) -> float:
        return self.traffic.experts_s / self.num_microbatches

    @property
    def seconds(self) -> float:
        """Of one microbatch: what is computed, and what is waited for on the way."""
        return self.passes.forward + self.passes.backward + self.tensor_s + self.context_s + self._experts_s


def stage_times(model: Transformer, layout: Layout, cluster: Cluster, program: Program) -> list[StageTime]:
    """Of the first rank along pp, the second where it is neither end, and the last where it is another."""
    work = Work(model, cluster.device, precision_of(layout.precision).parameter_bytes, program.fused_attention)
    places = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    return [_stage_time(model, layout, cluster, program, work, place) for place in places]


def _stage_time(
    model: Transformer, layout: Layout, cluster: Cluster, program: Program, work: Work, place: int
) -> StageTime:
    per, m = precision_of(layout.precision), layout.num_microbatches
    rank = known_pipeline(layout.schedule, layout.pp, m, layout.local_stages).at(place)
    layers = model.num_layers // layout.pp
    full, selective = layout.recompute is Recompute.FULL, layout.recompute is Recompute.SELECTIVE
    passes = work.layer(
        layout.microbatch, layout.tp, layout.cp, layout.ep, layout.sequence_parallel, full, selective
    ).times(layers)
    if rank.last:
        passes = passes.plus(work.logits(layout.microbatch, layout.tp, layout.cp))
    moved = traffic(model, layout, cluster, program, place)
    tensor_s = moved.tensor_s / m
    tensor_forward_s = tensor_s * forward_share(layout.sequence_parallel, full, program.regather)
    if program.overlap_tensor:
        in_backward = tensor_s * backward_share(layout.sequence_parallel, full, program.regather)
        tensor_s -= min(in_backward, passes.matrix_forward)
    attention_s = layers * (3 + full) * work.attention(layout.microbatch, layout.tp, layout.cp)[0]
    behind = attention_s if layout.context_by == "ring" else 0.0
    part = shards(model, layout.tp, layout.ep)
    dense, experts = dense_params(model, layout, part, rank), layers * part.experts
    updated = dense / layout.replicas + experts / layout.expert_replicas if layout.zero_stage else dense + experts
    return StageTime(
        passes=passes,
        tensor_s=tensor_s,
        tensor_forward_s=tensor_forward_s,
        context_s=max(moved.context_s / m - behind, 0.0),
        traffic=moved,
        layers=layers,
        num_microbatches=m,
        optimizer_s=cluster.device.moving_s(updated * update_bytes(per)),
    )


def update_bytes(per: Precision) -> float:
    """What an optimizer reads and writes for one parameter: its states both, the gradient in, the parameter out."""
    return 2 * per.optimizer_bytes + per.gradient_bytes + per.parameter_bytes


def replicas_s(stage: StageTime, layout: Layout, program: Program) -> float:
    """Exposed seconds of what replicas say to each other."""
    moved, zero = stage.traffic, layout.zero_stage
    gather, reduce = moved.gather_s, moved.reduce_s
    ahead, behind = (gather, 0.0) if program.overlap_parameters else (0.0, gather)
    hiding, waiting = (reduce, 0.0) if program.overlap_gradients else (0.0, reduce)
    forward, backward = stage.passes.forward, stage.passes.backward
    forwards = moved.gathers / 2 if zero == 3 else moved.gathers
    exposed = forwards * (hidden(ahead, forward, stage.layers) + behind)
    if zero == 3:
        hiding, waiting = hiding + ahead, waiting + behind
    return float(exposed + moved.reductions * (hidden(hiding, backward, stage.layers) + waiting))


def check(model: Transformer, layout: Layout, cluster: Cluster, program: Program) -> None:
    """Raises `InvalidInputError` where they do not fit each other, or are something else."""
    check_model(model)
    for name, value, kind, remedy in (
        ("layout", layout, Layout, "use vk.Layout(dp=8)"),
        ("cluster", cluster, Cluster, "use vk.hardware.dgx_a100()"),
        ("program", program, Program, "use Program()"),
    ):
        if not isinstance(value, kind):
            raise InvalidInputError.because(name, value, f"must be a {kind.__name__}", remedy)
    layout.check(model)
    if layout.world_size != cluster.num_devices:
        raise InvalidInputError.because(
            "layout",
            layout.world_size,
            f"are its ranks, and the cluster has {cluster.num_devices} devices",
            "use cluster.of(layout.world_size), or another dp",
        )
    check_schedule(layout.schedule, "layout.schedule")
    check_precision(layout.precision)
    check_sizes(model, layout.global_batch)


def check_sizes(model: Transformer, global_batch: int) -> None:
    """Raises `InvalidInputError` for more parameters, or tokens in a step, than floats count exactly."""
    if model.num_params() > MOST_COUNTED:
        raise InvalidInputError.because(
            "model", model, f"has over {MOST_COUNTED:.0e} parameters", "use fewer layers, or narrower ones"
        )
    if global_batch * model.seq > MOST_COUNTED:
        raise InvalidInputError.because(
            "global_batch",
            global_batch,
            f"with {model.seq:,} tokens each, a step has over {MOST_COUNTED:.0e} tokens",
            "use fewer sequences, or shorter ones",
        )


def check_precision(precision: str | Precision) -> None:
    """Raises `InvalidInputError` for one that keeps no gradients: there is no step of training to plan."""
    if not precision_of(precision).gradient_bytes:
        raise InvalidInputError.because(
            "precision", precision, "keeps no gradients to train with", "use precision='mixed_adam'"
        )


def check_finite(seconds: Any, cluster: Cluster) -> None:
    """Raises `InvalidInputError` for steps that take longer than floats can say."""
    if not np.isfinite(seconds).all():
        raise InvalidInputError.because(
            "cluster", str(cluster), "a step takes longer than can be counted", "look at its bandwidths and its peak"
        )


def check_schedule(schedule: str, name: str) -> None:
    """Raises `InvalidInputError` for a schedule without a formula for its bubble and hops."""
    if schedule not in PIPELINE_COSTS:
        raise InvalidInputError.unknown(name, schedule, "has no formula for its time here", PIPELINE_COSTS)
