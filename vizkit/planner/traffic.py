"""Seconds that one rank of a layout communicates in a step, from `vk.volume`'s bytes and `vk.collectives`' formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vizkit import volume
from vizkit.collectives import time_s
from vizkit.collectives.movements import Algorithm
from vizkit.hardware.cluster import Cluster, Links
from vizkit.hardware.link import Link
from vizkit.layout import Layout
from vizkit.planner.program import Program
from vizkit.trace import SpanKind
from vizkit.transformer import Transformer
from vizkit.volume import Movement

ALGORITHMS: dict[SpanKind, tuple[Algorithm, ...]] = {
    SpanKind.ALL_REDUCE: (Algorithm.RING, Algorithm.HALVING_DOUBLING),
    SpanKind.ALL_GATHER: (Algorithm.RING,),
    SpanKind.REDUCE_SCATTER: (Algorithm.RING,),
    SpanKind.ALL_TO_ALL: (Algorithm.DIRECT,),
}
"""Of which the fastest is taken: NCCL, too, has a ring and a tree for all-reduce, and rings alone for its two halves
(until its version 2.23); halving and doubling takes the tree's number of steps."""
_REDUCES = (SpanKind.ALL_REDUCE, SpanKind.REDUCE_SCATTER)


@dataclass(frozen=True)
class Traffic:
    """Seconds of one rank at one place of the pipeline, in one step, before anything is hidden.

    `tensor_s`, `context_s` and `experts_s` are of all microbatches; `hop_s` of one message to the next stage;
    `copies_s` of what copies of an embedding, or of a stage, add; `gather_s` and `reduce_s` of one gather of all
    sharded parameters and of one reduction of all gradients, of which there are `gathers` and `reductions`.
    """

    tensor_s: float
    context_s: float
    experts_s: float
    hop_s: float
    copies_s: float
    gather_s: float
    reduce_s: float
    gathers: float
    reductions: float


def traffic(model: Transformer, layout: Layout, cluster: Cluster, program: Program, place: int) -> Traffic:
    """What the rank at `place` along pp spends, on the links that its groups have."""
    moved = volume.movements(model, layout, stage=place, regather=program.regather)
    layers = model.num_layers // layout.num_stages * layout.local_stages
    cuts = layers * (program.calls_per_layer if layout.zero_stage == 3 else 1)
    seconds = {m: m.times * _call_s(m, layout, cluster) for m in moved}
    states = [m for m in moved if m.axis not in ("tp", "pp") and (m.kind in _REDUCES or m.kind is SpanKind.ALL_GATHER)]
    gathers = [m for m in states if m.kind is SpanKind.ALL_GATHER]
    reductions = [m for m in states if m.kind in _REDUCES]
    hops = [m.payload_bytes for m in moved if m.axis == "pp" and m.kind is SpanKind.SEND]

    def of(axis: str, *kinds: SpanKind) -> float:
        return sum(s for m, s in seconds.items() if m.axis == axis and m.kind in kinds)

    def in_cuts(calls: list[Movement]) -> float:
        return sum(cuts * _call_s(m, layout, cluster, m.payload_bytes / cuts) for m in calls)

    return Traffic(
        tensor_s=of("tp", SpanKind.ALL_GATHER, *_REDUCES),
        context_s=of("cp", SpanKind.SEND, SpanKind.ALL_TO_ALL),
        experts_s=of("ep", SpanKind.ALL_TO_ALL),
        hop_s=_hop_s(hops[0], layout, cluster, program) if hops else 0.0,
        copies_s=of("pp", SpanKind.ALL_REDUCE),
        gather_s=in_cuts(gathers),
        reduce_s=in_cuts(reductions),
        gathers=max([m.times for m in gathers], default=0),
        reductions=max([m.times for m in reductions], default=0),
    )


def backward_share(sequence_parallel: Any, full: Any, regather: bool) -> Any:
    """Of a layer's tensor-parallel seconds, those in the backward itself: 2 of 4 calls, recomputation has 2 more.

    >>> backward_share(False, False, True), backward_share(False, True, True)
    (0.5, 0.3333333333333333)
    """
    more = regather * sequence_parallel
    return (2 + more) / (4 + more + 2 * full)


def forward_share(sequence_parallel: Any, full: Any, regather: bool) -> Any:
    """Of the same seconds, those in the forward."""
    return 2 / (4 + regather * sequence_parallel + 2 * full)


def group_of(axis: str, layout: Layout) -> tuple[int, int]:
    """Stride and size of the groups along an axis as `vk.volume` names it: tp innermost, then cp, dp, and pp outermost.

    >>> group_of("dp", Layout(dp=4, tp=2, pp=2)), group_of("pp", Layout(dp=4, tp=2, pp=2))
    ((2, 4), (8, 2))
    """
    if axis == "tp":
        return 1, layout.tp
    if axis == "pp":
        return layout.tp * layout.replicas, layout.pp
    if axis == "cp":
        return layout.tp, layout.cp
    if axis == "ep":
        return layout.tp, layout.ep
    if axis == "dp" and layout.ep > 1:
        return layout.tp * layout.ep, layout.expert_replicas
    return layout.tp, layout.replicas


def _call_s(movement: Movement, layout: Layout, cluster: Cluster, payload_bytes: float | None = None) -> float:
    """Seconds of one call, by the fastest algorithm."""
    payload = movement.payload_bytes if payload_bytes is None else payload_bytes
    stride, size = group_of(movement.axis, layout)
    kind = movement.kind
    if kind in (SpanKind.SEND, SpanKind.RECEIVE):
        return _link(cluster.neighbours(stride, size)).time_s(payload)
    if movement.axis == "pp":  # a copy and its other
        link, size = _link(cluster.neighbours(stride, size)), 2
    else:
        link = _link((cluster.exchange if kind is SpanKind.ALL_TO_ALL else cluster.ring)(stride, size))
    return min(time_s(kind, way, size, payload, link) for way in ALGORITHMS[kind])


def _hop_s(payload_bytes: float, layout: Layout, cluster: Cluster, program: Program) -> float:
    """Seconds from one stage to the next; with scatter and gather each tensor-parallel rank sends a part."""
    link = _link(cluster.neighbours(*group_of("pp", layout)))
    sent = payload_bytes / program.send_share
    if not program.scatter_gather or layout.sequence_parallel or layout.tp == 1:
        return link.time_s(sent)
    again = time_s("all_gather", "ring", layout.tp, payload_bytes, cluster.link_of_group(1, layout.tp))
    return link.time_s(sent / layout.tp) + again


def _link(links: Links) -> Link:
    return Link(float(links[0]), float(links[1]))
