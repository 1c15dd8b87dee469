"""How long a step of each of many layouts takes: `predict`, of arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from vizkit.collectives import critical_path
from vizkit.collectives.movements import Algorithm
from vizkit.hardware.cluster import Cluster, Links
from vizkit.memory.shards import Shards
from vizkit.memory.states import precision_of
from vizkit.planner.columns import Columns
from vizkit.planner.pipelines import PIPELINE_COSTS, hidden, pipeline_hops
from vizkit.planner.places import Place, dense_params, memory_bytes, part_of, places
from vizkit.planner.program import Program
from vizkit.planner.stages import update_bytes
from vizkit.planner.traffic import ALGORITHMS, backward_share
from vizkit.planner.work import Passes, Work
from vizkit.trace import SpanKind
from vizkit.transformer import Transformer
from vizkit.volume import LOSS_BYTES

_AR, _AG, _RS, _A2A = SpanKind.ALL_REDUCE, SpanKind.ALL_GATHER, SpanKind.REDUCE_SCATTER, SpanKind.ALL_TO_ALL


@dataclass(frozen=True)
class Steps:
    """Seconds of each part of a step, and bytes, a row for each layout; `Prediction` says what each is."""

    matrix_s: np.ndarray
    elementwise_s: np.ndarray
    tp_s: np.ndarray
    cp_s: np.ndarray
    ep_s: np.ndarray
    pp_s: np.ndarray
    dp_s: np.ndarray
    bubble_s: np.ndarray
    optimizer_s: np.ndarray
    memory_bytes: np.ndarray

    @property
    def step_s(self) -> np.ndarray:
        return np.sum([getattr(self, field.name) for field in fields(self)[:-1]], axis=0)

    def where(self, chosen: np.ndarray) -> Steps:
        """The rows of a mask or of positions."""
        return Steps(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @classmethod
    def join(cls, parts: list[Steps]) -> Steps:
        """The rows of all parts."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


@dataclass(frozen=True)
class _Place:
    """What `StageTime` says of one rank, as arrays."""

    exists: np.ndarray
    passes: Passes
    seconds: np.ndarray
    tensor_s: np.ndarray
    copies_s: np.ndarray
    replicas_s: np.ndarray
    optimizer_s: np.ndarray


def steps(model: Transformer, rows: Columns, cluster: Cluster, program: Program) -> Steps:
    """What `predict` and `vk.memory.per_rank` say of each row, which has to fit the model and the cluster."""
    per = precision_of(rows.precision)
    work = Work(model, cluster.device, per.parameter_bytes, program.fused_attention)
    layers, m, p, v = model.num_layers / rows.pp, rows.num_microbatches, rows.pp, rows.stages_per_rank
    layer = work.layer(rows.microbatch, rows.tp, rows.cp, rows.ep, rows.sequence_parallel, rows.full, rows.selective)
    logits = work.logits(rows.microbatch, rows.tp, rows.cp)
    part = part_of(model, rows)
    on_wire = _Wire(model, rows, cluster, program, part)
    attention_s = layers * (3 + rows.full) * work.attention(rows.microbatch, rows.tp, rows.cp)[0]
    behind = attention_s if rows.context_by == "ring" else 0.0
    context_s = np.maximum(on_wire.context_s() / m - behind, 0.0)
    experts_s = on_wire.experts_s() / m
    found = []
    for place in places(rows):
        passes = layer.times(layers).plus(logits, place.last)
        tensor_s = on_wire.tensor_s(place) / m
        if program.overlap_tensor:
            in_backward = tensor_s * backward_share(rows.sequence_parallel, rows.full, program.regather)
            tensor_s = tensor_s - np.minimum(in_backward, passes.matrix_forward)
        dense, experts = dense_params(model, rows, part, place), layers * part.experts
        shared = rows.zero_stage > 0
        updated = np.where(shared, dense / rows.replicas + experts / rows.expert_replicas, dense + experts)
        found.append(
            _Place(
                place.exists,
                passes,
                np.where(place.exists, passes.forward + passes.backward + tensor_s + context_s + experts_s, -np.inf),
                tensor_s,
                on_wire.copies_s(place),
                on_wire.replicas_s(dense, experts, passes),
                cluster.device.moving_s(updated * update_bytes(per)),
            )
        )
    slowest = np.argmax([place.seconds for place in found], axis=0)

    def at_slowest(of: Callable[[_Place], np.ndarray]) -> np.ndarray:
        return np.choose(slowest, [of(place) for place in found])

    def most(of: Callable[[_Place], np.ndarray]) -> np.ndarray:
        return np.max([np.where(place.exists, of(place), 0) for place in found], axis=0)

    def waiting(of: Callable[[_Place], np.ndarray]) -> np.ndarray:
        ends = [np.where(place.exists, of(place), 0) for place in found]
        return sum(ends) + np.where(p > 3, p - 3, 0) * ends[1] - at_slowest(of)

    stage_s = at_slowest(lambda place: place.seconds)
    idle, weights = waiting(lambda place: place.seconds), waiting(lambda place: place.passes.matrix_forward)
    hop_s = on_wire.hop_s()
    bubble, hops = np.zeros(len(rows)), np.zeros(len(rows))
    for name, cost in PIPELINE_COSTS.items():
        mask = rows.is_schedule(name) & (p > 1)
        bubble = np.where(mask, cost.bubble(idle, weights, v), bubble)
        sends = pipeline_hops(name, p, m, v, hop_s, stage_s, program.asynchronous_sends)
        hops = np.where(mask, sends, hops)
    return Steps(
        matrix_s=m * at_slowest(lambda place: place.passes.matrix),
        elementwise_s=m * at_slowest(lambda place: place.passes.moving),
        tp_s=m * at_slowest(lambda place: place.tensor_s),
        cp_s=m * context_s,
        ep_s=m * experts_s,
        pp_s=most(lambda place: place.copies_s) + hops,
        dp_s=most(lambda place: place.replicas_s),
        bubble_s=bubble,
        optimizer_s=most(lambda place: place.optimizer_s),
        memory_bytes=memory_bytes(model, rows, program.fused_attention),
    )


@dataclass(frozen=True)
class _Wire:
    """`vk.volume`'s bytes and `vk.collectives`' seconds, of arrays."""

    model: Transformer
    rows: Columns
    cluster: Cluster
    program: Program
    part: Shards

    @property
    def layers(self) -> np.ndarray:
        return self.model.num_layers / self.rows.pp

    @property
    def tokens(self) -> np.ndarray:
        return self.model.seq / self.rows.cp * self.rows.microbatch

    @property
    def number_bytes(self) -> float:
        return precision_of(self.rows.precision).parameter_bytes

    @property
    def activation_bytes(self) -> np.ndarray:
        """bsh"""
        return self.tokens * self.model.hidden * self.number_bytes

    def tensor_s(self, place: Place) -> np.ndarray:
        """Of all microbatches of one step, before anything is hidden."""
        rows, m, layers, size = self.rows, self.rows.num_microbatches, self.layers, self.activation_bytes
        links, t, sp = self.cluster.ring(1, rows.tp), rows.tp, rows.sequence_parallel
        pairs, ends = (4 + 2 * rows.full) * layers, 1.0 * place.first + place.last
        regather = float(self.program.regather)
        whole = layers * self.part.replicated + place.first * self.part.positions + place.last * self.part.final_norm
        gradient_bytes = precision_of(rows.precision).gradient_bytes
        gathers = pairs + 2 * layers * regather + ends + regather * place.last
        sequence = m * gathers * call_s(_AG, t, size, links) + m * (pairs + ends) * call_s(_RS, t, size, links)
        sequence = sequence + np.where(whole > 0, call_s(_AR, t, whole * gradient_bytes, links), 0)
        plain = m * (pairs + ends) * call_s(_AR, t, size, links)
        loss = place.last * 3 * m * call_s(_AR, t, self.tokens * LOSS_BYTES, links)
        return np.where(t > 1, np.where(sp > 0, sequence, plain) + loss, 0)

    def context_s(self) -> np.ndarray:
        rows, model = self.rows, self.model
        token_bytes = self.tokens * self.number_bytes / rows.tp
        passes = self.layers * rows.num_microbatches
        if rows.context_by == "ulysses":
            links = self.cluster.exchange(rows.tp, rows.cp)
            calls = 2 * (2 + rows.full) * passes
            sizes = token_bytes * model.hidden, token_bytes * model.key_value_width
            seconds = sum(calls * call_s(_A2A, rows.cp, size, links) for size in sizes)
        else:
            latency, bandwidth = self.cluster.neighbours(rows.tp, rows.cp)
            hops = 2 * ((2 + rows.full) * (rows.cp - 1) + rows.cp) * passes
            seconds = hops * (latency + token_bytes * model.key_value_width / bandwidth)
        return np.where(rows.cp > 1, seconds, 0)

    def experts_s(self) -> np.ndarray:
        rows, mixture = self.rows, self.model.experts
        if mixture is None:
            return np.zeros(len(rows))
        links = self.cluster.exchange(rows.tp, rows.ep)
        calls = (4 + 2 * rows.full) * self.layers * rows.num_microbatches
        return np.where(rows.ep > 1, calls * call_s(_A2A, rows.ep, self.activation_bytes * mixture.top_k, links), 0)

    def hop_s(self) -> np.ndarray:
        rows = self.rows
        latency, bandwidth = self._along_pipeline()
        size, t = self.activation_bytes, rows.tp
        sent = size / self.program.send_share
        shards = rows.sequence_parallel > 0
        again: np.ndarray | float = 0.0
        if self.program.scatter_gather:
            again = np.where(shards | (t == 1), 0, call_s(_AG, t, size, self.cluster.ring(1, t)))
            shards = shards | (t > 1)
        return np.where(rows.pp > 1, latency + sent / np.where(shards, t, 1) / bandwidth + again, 0)

    def copies_s(self, place: Place) -> np.ndarray:
        """Of tied embeddings on two ranks."""
        rows = self.rows
        if not self.model.tied_embeddings:
            return np.zeros(len(rows))
        payload = self.part.vocabulary * precision_of(rows.precision).gradient_bytes
        seconds = call_s(_AR, np.full_like(rows.pp, 2), np.asarray(payload), self._along_pipeline())
        return np.where((rows.pp > 1) & (place.first != place.last), seconds, 0)

    def _along_pipeline(self) -> Links:
        rows = self.rows
        return self.cluster.neighbours((rows.tp * rows.replicas), rows.pp)

    def replicas_s(self, dense: np.ndarray, experts: np.ndarray, passes: Passes) -> np.ndarray:
        """Exposed seconds of gradients, and of what ZeRO shards."""
        rows, program, zero, m = self.rows, self.program, self.rows.zero_stage, self.rows.num_microbatches
        layers = self.layers
        calls = layers * np.where(zero == 3, program.calls_per_layer, 1)
        per = precision_of(rows.precision)
        tp, ep, replicas = rows.tp, rows.ep, rows.replicas
        alone = rows.ep == 1
        groups = [(np.where(alone, dense + experts, dense), replicas, self.cluster.ring(tp, replicas))]
        if self.model.experts is not None:
            others = rows.expert_replicas
            groups.append((np.where(alone, 0, experts), others, self.cluster.ring(tp * ep, others)))

        def total(kind: SpanKind, number: float) -> np.ndarray:
            seconds = (
                np.where((size > 1) & (params > 0), calls * call_s(kind, size, params * number / calls, links), 0)
                for params, size, links in groups
            )
            return sum(seconds, np.zeros(len(rows)))

        gather = np.where(zero > 0, total(_AG, per.parameter_bytes), 0)
        reduce = np.where(zero > 0, total(_RS, per.gradient_bytes), total(_AR, per.gradient_bytes))
        ahead, behind = (gather, 0.0) if program.overlap_parameters else (0.0, gather)
        hiding, waiting = (reduce, 0.0) if program.overlap_gradients else (0.0, reduce)
        forwards = np.where(zero == 3, m, 1)
        exposed = forwards * (hidden(ahead, passes.forward, layers) + behind)
        hiding, waiting = hiding + np.where(zero == 3, ahead, 0), waiting + np.where(zero == 3, behind, 0)
        return exposed + np.where(zero >= 2, m, 1) * (hidden(hiding, passes.backward, layers) + waiting)


def call_s(kind: SpanKind, ranks: np.ndarray, payload_bytes: np.ndarray, links: Links) -> np.ndarray:
    """Seconds of one call among so many ranks, by the fastest algorithm: `vk.collectives.time_s` of arrays."""
    whole = ranks.astype(np.intp)
    distinct = np.flatnonzero(np.bincount(whole))
    latency, bandwidth = links
    fastest = None
    for way in ALGORITHMS[kind]:
        in_order, share = np.zeros((2, distinct[-1] + 1))
        for number in distinct.tolist():
            in_order[number], share[number] = _path(kind, way, number)
        seconds = in_order[whole] * latency + share[whole] * payload_bytes / bandwidth
        fastest = seconds if fastest is None else np.minimum(fastest, seconds)
    assert fastest is not None
    return fastest


@lru_cache(maxsize=4096)
def _path(kind: SpanKind, way: Algorithm, ranks: int) -> tuple[int, float]:
    return critical_path(kind, way, ranks)
