"""What a step of training moves between ranks, by the published formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vizkit.memory.in_flight import PipelineRank, known_pipeline
from vizkit.memory.shards import Shards, check_fit, dense_params, shards
from vizkit.memory.states import precision_of
from vizkit.sizes import number_width, yes_or_no
from vizkit.trace import SpanKind
from vizkit.transformer import Recompute, Transformer

if TYPE_CHECKING:
    from vizkit.layout import Layout

LOSS_BYTES = 4
"""Maximum, target and sum of a token's exponentials are fp32."""


@dataclass(frozen=True)
class Movement:
    """One kind of communication along one axis of the mesh, in one step, on one rank.

    `payload_bytes` is that of one call, as `vizkit.Span` defines it; each rank makes `times` such calls. `why` says
    what moves and by which formula.
    """

    axis: str
    kind: SpanKind
    payload_bytes: float
    times: float = 1.0
    why: str = ""

    @property
    def total_bytes(self) -> float:
        """Payload of all calls of one rank together."""
        return self.payload_bytes * self.times


def movements(
    model: Transformer,
    layout: Layout,
    stage: int | None = None,
    *,
    number_bytes: float | None = None,
    regather: bool = False,
    reduce_each_microbatch: bool = True,
) -> tuple[Movement, ...]:
    """What one rank moves in one step of training, by axis and kind; nothing along an axis of size 1.

    `stage` is a place along the pp axis; None takes for each axis and kind the rank that moves most of it. Numbers of
    activations have `number_bytes`, by default those of a parameter; gradients and parameters those of the precision.
    Tensors that always travel together count as one call: buckets and layers cut it, and the bytes stay.

    - dp: an all-reduce of P gradients; ZeRO-1 and 2 a reduce-scatter and an all-gather, together 2P elements; ZeRO-3 an
      all-gather for the forward, one for the backward and a reduce-scatter, 3P (Rajbhandari et al., 2020, section 7).
      What is sharded cannot be added up whole: ZeRO-2 and 3 reduce, and ZeRO-3 gathers, for each microbatch; with
      `reduce_each_microbatch=False` gradients wait whole, as in FSDP2's `set_requires_gradient_sync(False)`, which
      then costs memory. The axis is "dp×cp" with cp.
    - tp: 4 all-reduces of bsh a layer and microbatch, 2 more where recomputation is full (Narayanan et al., SC'21);
      with sequence parallelism an all-gather and a reduce-scatter for each. `regather` adds the 2 all-gathers a layer
      of Korthikanti et al., 2022, who keep only a shard of the inputs. Embedding, logits and loss share the vocabulary.
    - pp: bsh/t with sequence parallelism, else bsh, for each hop and microbatch; the ends' gradients of tied
      embeddings; DualPipe's two copies of each stage.
    - cp: keys and values go round the ring c−1 times forward and again backward, their gradients c times, as they end
      where they began; with Ulysses 4 all-to-alls of a rank's bsh/c, forward and backward (Jacobs et al., 2023).
    - ep: an all-to-all to the experts and one back, of top_k copies of each token, forward and backward (Lepikhin et
      al., 2020, arXiv:2006.16668), with balanced loads. Axes are then those of `Layout.expert_mesh`: experts'
      gradients move along "dp", all others along "dp×ep" ("cp" is none of its axes).

    Payloads are those of `vizkit.Span`. Raises `InvalidInputError` where layout and model do not fit.

    >>> from vizkit.layout import Layout
    >>> gpt = Transformer(num_layers=4, hidden=64, heads=4, vocab=100, seq=32)
    >>> for movement in movements(gpt, Layout(dp=2, zero_stage=3, precision="fp32_adam")):
    ...     print(movement.axis, movement.kind.value, int(movement.payload_bytes), "B ×", movement.times)
    dp all_gather 833536 B × 2
    dp reduce_scatter 833536 B × 1
    """
    check_fit(model, layout)
    if number_bytes is not None:
        number_bytes = number_width("number_bytes", number_bytes)
    yes_or_no("regather", regather)
    yes_or_no("reduce_each_microbatch", reduce_each_microbatch)
    plan = known_pipeline(layout.schedule, layout.pp, layout.num_microbatches, layout.local_stages)
    per = precision_of(layout.precision)
    part = shards(model, layout.tp, layout.ep)
    layers = model.num_layers // layout.num_stages * layout.local_stages
    microbatches = layout.num_microbatches // plan.num_pipelines  # DualPipe's two copies of a stage share them
    number = per.parameter_bytes if number_bytes is None else number_bytes
    tokens = model.seq // layout.cp * layout.microbatch
    step = _Step(
        model,
        layout,
        part,
        per.parameter_bytes,
        per.gradient_bytes,
        number,
        tokens,
        layers,
        layers * microbatches,
        microbatches,
        plan.num_pipelines,
        regather,
        microbatches if reduce_each_microbatch else 1,
        tokens * model.hidden * number,
        1 if layout.recompute is Recompute.FULL else 0,
    )
    places = plan.distinct if stage is None else (plan.at(stage),)
    calls = [*_gradients_of(step, places), *_tensor(step), *_context(step), *_experts(step)]
    if layout.tp > 1:
        calls += _most(list(_vocabulary(step, places[0])), list(_vocabulary(step, places[-1])))
    if layout.pp > 1:
        calls += _pipeline(step, places)
    return tuple([Movement(*call) for call in calls if call[2] and call[3]])


_Call = tuple[str, SpanKind, float, int, str]
"""A movement's fields: tuples are made in a tenth of the time."""


class _Step(NamedTuple):
    """What the formulas need; `tokens` of one microbatch on one rank, `passes` a microbatch through a layer."""

    model: Transformer
    layout: Layout
    part: Shards
    parameter_bytes: float
    gradient_bytes: float
    number_bytes: float
    tokens: int
    layers: int
    passes: int
    microbatches: int
    num_pipelines: int
    regather: bool
    reductions: int
    activation_bytes: float
    """bsh"""
    again: int
    """How many more forwards a backward makes."""


def _most(first: list[_Call], last: list[_Call]) -> list[_Call]:
    """Of each kind, the calls of the rank that moves more: the ends of the model are on the first and the last."""
    if first == last:
        return first
    mine, theirs = ({kind: _moved(calls, kind) for kind in {call[1] for call in calls}} for calls in (first, last))
    return [call for call in first if mine[call[1]] >= theirs.get(call[1], 0.0)] + [
        call for call in last if theirs[call[1]] > mine.get(call[1], 0.0)
    ]


def _moved(calls: list[_Call], kind: SpanKind) -> float:
    return sum([payload * times for _, this, payload, times, _ in calls if this is kind])


def _gradients_of(step: _Step, places: tuple[PipelineRank, ...]) -> Iterator[_Call]:
    """Of the rank that holds most."""
    layout, held = step.layout, _most_dense(step, places)
    if layout.ep == 1:
        axis = "dp" if layout.cp == 1 else "cp" if layout.dp == 1 else "dp×cp"
        yield from _gradients(step, axis, held + step.layers * step.part.experts, layout.replicas)
    else:
        yield from _gradients(step, "dp×ep" if layout.expert_replicas > 1 else "ep", held, layout.replicas)


def _most_dense(step: _Step, places: tuple[PipelineRank, ...]) -> int:
    return max([dense_params(step.model, step.layout, step.part, place) for place in places])


def _gradients(step: _Step, axis: str, num_params: int, replicas: int) -> Iterator[_Call]:
    if replicas == 1:
        return
    zero = step.layout.zero_stage
    gradients, parameters = num_params * step.gradient_bytes, num_params * step.parameter_bytes
    if zero == 0:
        yield axis, SpanKind.ALL_REDUCE, gradients, 1, _GRADIENTS
        return
    gathers = 2 * step.microbatches if zero == 3 else 1
    yield axis, SpanKind.ALL_GATHER, parameters, gathers, _GATHERED if zero == 3 else _UPDATED
    yield axis, SpanKind.REDUCE_SCATTER, gradients, 1 if zero == 1 else step.reductions, _SHARDED


def _tensor(step: _Step) -> Iterator[_Call]:
    """Two blocks a layer, each with a conjugate pair around it."""
    layout, size = step.layout, step.activation_bytes
    if layout.tp == 1:
        return
    pairs = (4 + 2 * step.again) * step.passes
    if not layout.sequence_parallel:
        yield "tp", SpanKind.ALL_REDUCE, size, pairs, _TENSOR
        return
    yield "tp", SpanKind.ALL_GATHER, size, pairs + 2 * step.passes * step.regather, _SEQUENCE
    yield "tp", SpanKind.REDUCE_SCATTER, size, pairs, _SEQUENCE


def _vocabulary(step: _Step, place: PipelineRank) -> Iterator[_Call]:
    """Around the embedding and the logits, within the loss, and gradients of what each rank saw a part of."""
    size, part, times = step.activation_bytes, step.part, step.microbatches
    sequence_parallel = step.layout.sequence_parallel
    ends = bool(place.first) + bool(place.last)
    if sequence_parallel:
        gathers = ends + (step.regather if place.last else 0)
        yield "tp", SpanKind.ALL_GATHER, size, gathers * times, _ENDS
        yield "tp", SpanKind.REDUCE_SCATTER, size, ends * times, _ENDS
        whole = step.layers * part.replicated
        whole += (part.positions if place.first else 0) + (part.final_norm if place.last else 0)
        yield "tp", SpanKind.ALL_REDUCE, whole * step.gradient_bytes, 1, _REPLICATED
    else:
        yield "tp", SpanKind.ALL_REDUCE, size, ends * times, _ENDS
    if place.last:
        yield "tp", SpanKind.ALL_REDUCE, step.tokens * LOSS_BYTES, 3 * times, _LOSS


def _pipeline(step: _Step, places: tuple[PipelineRank, ...]) -> Iterator[_Call]:
    layout, part = step.layout, step.part
    hop = step.activation_bytes / (layout.tp if layout.sequence_parallel else 1)
    hops = max([place.hops for place in places])
    yield "pp", SpanKind.SEND, hop, hops, _HOPS
    yield "pp", SpanKind.RECEIVE, hop, hops, _HOPS
    if step.num_pipelines > 1:
        copies = _most_dense(step, places) + step.layers * part.experts
        yield "pp", SpanKind.ALL_REDUCE, copies * step.gradient_bytes, 1, _MIRRORED
    elif step.model.tied_embeddings and any(bool(place.first) != bool(place.last) for place in places):
        yield "pp", SpanKind.ALL_REDUCE, part.vocabulary * step.gradient_bytes, 1, _TIED


def _context(step: _Step) -> Iterator[_Call]:
    """Attention's view of the whole sequence."""
    layout, model = step.layout, step.model
    ranks = layout.cp
    if ranks == 1:
        return
    token_bytes = step.tokens * step.number_bytes / layout.tp
    if layout.context_by == "ulysses":
        times = 2 * (2 + step.again) * step.passes
        yield "cp", SpanKind.ALL_TO_ALL, token_bytes * model.hidden, times, _QUERIES
        yield "cp", SpanKind.ALL_TO_ALL, token_bytes * model.key_value_width, times, _KEYS
        return
    hops = 2 * ((2 + step.again) * (ranks - 1) + ranks) * step.passes
    for kind in (SpanKind.SEND, SpanKind.RECEIVE):
        yield "cp", kind, token_bytes * model.key_value_width, hops, _RING


def _experts(step: _Step) -> Iterator[_Call]:
    layout, mixture = step.layout, step.model.experts
    if layout.ep == 1 or mixture is None:
        return
    times = (4 + 2 * step.again) * step.passes
    yield "ep", SpanKind.ALL_TO_ALL, step.activation_bytes * mixture.top_k, times, _ROUTED
    yield from _gradients(step, "dp", step.layers * step.part.experts, layout.expert_replicas)


_GRADIENTS = "gradients of all parameters on the rank: 2P(n−1)/n elements on the wire (Rajbhandari et al., 2020, §7.1)"
_UPDATED = "parameters after each rank has updated its share: P(n−1)/n elements on the wire (ZeRO §7.1)"
_GATHERED = (
    "parameters, for the forward and the backward of each microbatch: 2P(n−1)/n elements on the wire (ZeRO §7.2)"
)
_SHARDED = "gradients to the rank that owns them: P(n−1)/n elements on the wire (ZeRO §7)"
_TENSOR = "bsh after each block and before it in the backward: 8bsh(t−1)/t elements a layer on the wire (SC'21, §3.2)"
_SEQUENCE = "bsh into and out of both blocks: a pair is an all-reduce on the wire (Korthikanti et al., 2022, §4.2.2)"
_ENDS = "bsh of the embedding, which has a part of the vocabulary, and of the logits' inputs (Shoeybi et al., 2019, §3)"
_REPLICATED = "gradients of norms and other whole parameters, of which each rank saw its part of the sequence"
_LOSS = "maximum, target and sum of each token's logits: 3bs fp32 numbers (Shoeybi et al., 2019, §3)"
_HOPS = "bsh of each microbatch, and its gradient, between stages on neighbouring ranks (Narayanan et al., SC'21, §3.2)"
_TIED = "gradients of the embedding, of which the first and the last stage have a copy (Narayanan et al., SC'21)"
_MIRRORED = "gradients of each stage, of which two ranks have a copy (DeepSeek-AI, 2024, arXiv:2412.19437)"
_QUERIES = "queries, and what attention returns: heads for tokens, bsh/c a rank (Jacobs et al., 2023, arXiv:2309.14509)"
_KEYS = "keys and values: heads for tokens (Jacobs et al., 2023, arXiv:2309.14509)"
_RING = "keys and values of one rank, c−1 times round the ring, and c times their gradients (Liu et al., 2023)"
_ROUTED = "top_k copies of each token to its experts and back (Lepikhin et al., 2020, arXiv:2006.16668)"
