"""Odd arguments to the models of bytes: refused with value, rule and remedy, or right; never silently wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

import vizkit as vk
from vizkit.ledgers import ShardedMovement, ledger
from vizkit.memory import (
    Precision,
    activations,
    key_value_cache,
    model_states,
    per_rank,
    pipeline,
    zero3_estimate,
)
from vizkit.metrics import peak_memory
from vizkit.trace import Counter, Span, Trace
from vizkit.volume import Movement, movements

SIZES = {"num_layers": 4, "hidden": 64, "heads": 8, "vocab": 100, "seq": 32}
MODEL = vk.Transformer(**SIZES)
LAYOUT = vk.Layout(dp=2, tp=2, pp=2, num_microbatches=2, zero_stage=3, recompute="full")
ODD = [
    0, -1, True, 2.0, 2.5, float("nan"), float("inf"), "2", "", None, [2], (2,), {}, 10**30, b"2", 1j, object,
    np.uint8(2), np.int32(2), np.int64(2), np.float64(2.0), np.bool_(True), np.array(2), np.array([1, 2]),
    torch.tensor(2),
]  # fmt: skip
TRACE = Trace.from_spans([Span(rank, "all_reduce", 0, 1, payload_bytes=8) for rank in range(2)], clock="ideal")


def transformer(**change: object) -> tuple[object, ...]:
    model = vk.Transformer(**{**SIZES, **change})
    return model.num_params(), model.flops(2)


def experts(**change: object) -> tuple[object, ...]:
    return transformer(experts=vk.Experts(**{"count": 4, **change}))


def precision(**change: object) -> float:
    widths = {"parameter_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12, **change}
    return per_rank(MODEL, vk.Layout(precision=Precision(**widths))).states_bytes


def layout(**change: object) -> tuple[object, ...]:
    made = vk.Layout(**change)
    return made.world_size, made.num_stages, made.global_batch


def books(**change: object) -> str:
    movement = Movement(**{"axis": "dp", "kind": "all_reduce", "payload_bytes": 8, "times": 1, **change})
    return str(ledger(TRACE, vk.Mesh(dp=2), [movement]))


CALLS: list[tuple[Callable[..., object], tuple[str, ...]]] = [
    (transformer, (*SIZES, "kv_heads", "ffn_hidden", "gated", "bias", "rms_norm", "learned_positions",
                   "tied_embeddings", "final_norm", "experts")),
    (experts, ("count", "top_k", "ffn_hidden", "shared")),
    (MODEL.flops, ("batch",)),
    (functools.partial(MODEL.flops, 2), ("recompute",)),
    (layout, ("dp", "tp", "pp", "cp", "ep", "zero_stage", "sequence_parallel", "context_by", "microbatch",
              "num_microbatches", "schedule", "stages_per_rank", "recompute", "precision")),
    (vk.Layout().check, ("model",)),
    (precision, ("parameter_bytes", "gradient_bytes", "optimizer_bytes")),
    (functools.partial(per_rank, MODEL, LAYOUT), ("stage", "number_bytes", "dropout", "norm_statistics",
                                                  "logits_bytes", "gathered_layers", "working_layer")),
    (functools.partial(per_rank, layout=LAYOUT), ("model",)),
    (functools.partial(per_rank, MODEL), ("layout",)),
    (functools.partial(movements, MODEL, LAYOUT), ("stage", "number_bytes", "regather", "reduce_each_microbatch")),
    (functools.partial(movements, layout=LAYOUT), ("model",)),
    (functools.partial(movements, MODEL), ("layout",)),
    (functools.partial(activations, MODEL), ("microbatch", "tp", "sequence_parallel", "cp", "recompute", "pp",
                                             "schedule", "num_microbatches", "stages_per_rank", "dropout",
                                             "number_bytes", "norm_statistics")),
    (activations, ("model",)),
    (functools.partial(key_value_cache, MODEL), ("batch", "tokens", "tp", "pp", "number_bytes")),
    (key_value_cache, ("model",)),
    (functools.partial(model_states, 1e9), ("zero_stage", "dp", "precision")),
    (model_states, ("num_params",)),
    (functools.partial(zero3_estimate, 1e9, 1e6, 2), ("offload",)),
    (functools.partial(zero3_estimate, num_params=1e9, dp=2), ("largest_layer_params",)),
    (functools.partial(pipeline, num_ranks=2, num_microbatches=4), ("schedule",)),
    (functools.partial(pipeline, "1F1B", num_microbatches=4), ("num_ranks",)),
    (functools.partial(pipeline, "1F1B", 2), ("num_microbatches",)),
    (books, ("axis", "kind", "payload_bytes", "times")),
    (functools.partial(ledger, TRACE, None), ("expected", "steps")),
    (lambda shapes: ShardedMovement("dp", "all_gather", 8, shapes=shapes).shapes, ("shapes",)),
    (peak_memory, ("trace",)),
]  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("call, name", [(call, name) for call, names in CALLS for name in names])
def test_odd_arguments_are_refused_or_right(call, name):
    """Nothing but an `InvalidInputError`; what is taken gives finite numbers, 0 or more, of Python's own types."""
    for value in ODD:
        try:
            found = call(**{name: value})
        except vk.InvalidInputError as refusal:
            said = str(refusal)
            assert ": " in said, value
            assert "; " in said, value
            continue
        for number in found if isinstance(found, tuple) else (found,):
            if isinstance(number, (int, float, np.generic)):
                assert type(number) in (int, float), value
                assert 0 <= number < float("inf"), value


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64])
def test_sizes_from_numpy_do_not_overflow(kind):
    """GPT-3 in 32-bit sizes once had −1.48 billion parameters and no operations; all become Python's integers."""
    sizes = {"num_layers": 96, "hidden": 12288, "heads": 96, "vocab": 51200, "seq": 2048}
    given = {name: kind(size) if size <= np.iinfo(kind).max else size for name, size in sizes.items()}
    model, same = vk.Transformer(**given), vk.Transformer(**sizes)
    assert model == same
    assert (model.num_params(), model.flops(kind(8))) == (174_615_822_336, same.flops(8))
    assert vk.Experts(count=kind(8), top_k=kind(2), shared=kind(1)) == vk.Experts(count=8, top_k=2, shared=1)
    assert vk.Layout(zero_stage=kind(2), dp=kind(4)) == vk.Layout(zero_stage=2, dp=4)
    assert key_value_cache(same, batch=kind(100), tp=kind(8)) == key_value_cache(same, batch=100, tp=8)
    assert model_states(np.float32(1e9)).total_bytes == 16e9
    assert per_rank(same, LAYOUT, number_bytes=kind(2)) == per_rank(same, LAYOUT, number_bytes=2)


@pytest.mark.parametrize("call, message", [
    (lambda: transformer(gated="no"), "gated='no': must be True or False; use gated=True"),
    (lambda: transformer(experts=8),
     "experts=8: must be a vk.Experts, or None; use vk.Experts(count=8, top_k=2)"),
    (lambda: precision(gradient_bytes=-2),
     "gradient_bytes=-2: must be finite and not negative; use 2 for 16 bits, 0 for none"),
    (lambda: per_rank(MODEL, LAYOUT, number_bytes=0),
     "number_bytes=0: must be over 0 and at most 8; use 2 for 16-bit numbers"),
    (lambda: per_rank(MODEL, LAYOUT, logits_bytes=-4),
     "logits_bytes=-4: must be finite and not negative; use 4 for fp32, 0 for none"),
    (lambda: per_rank(MODEL, LAYOUT, gathered_layers=1.5),
     "gathered_layers=1.5: must be a whole number, at least 0; use 2 for FSDP with prefetch"),
    (lambda: per_rank(MODEL, LAYOUT, working_layer=1),
     "working_layer=1: must be True or False; use working_layer=True"),
    (lambda: per_rank(MODEL, vk.Mesh(dp=2)), "layout=Mesh(dp=2): must be a vk.Layout; use vk.Layout(dp=2)"),
    (lambda: per_rank(7, LAYOUT),
     "model=7: must be a vk.Transformer; use vk.Transformer(num_layers=24, hidden=1024, …)"),
    (lambda: movements(MODEL, LAYOUT, number_bytes="2"),
     "number_bytes='2': must be over 0 and at most 8; use 2 for 16-bit numbers"),
    (lambda: activations(MODEL, tp=8, sequence_parallel=True, cp=8),
     "tp=8: does not divide seq / cp=4; use tp=4"),
    (lambda: activations(vk.Transformer(**SIZES, kv_heads=2), tp=4), "tp=4: does not divide kv_heads=2; use tp=2"),
    (lambda: zero3_estimate(1e9, -1, 8),
     "largest_layer_params=-1: must be finite and not negative; use 32e6 or such"),
    (lambda: zero3_estimate(1e9, 1e6, 8, "optimiser"),
     "offload='optimiser': is not a way to offload; did you mean optimizer? use one of none, optimizer, all"),
    (lambda: pipeline("1F1B", 0, 4), "num_ranks=0: must be a whole number, at least 1; use num_ranks=1"),
    (lambda: pipeline("1F1B", 2, 4, 2),
     "stages_per_rank=2: 1F1B has exactly 1 on each rank; "
     "leave it out, or use Interleaved1F1B, LoopedBFS or InterleavedZeroBubble"),
    (lambda: books(axis=3), "axis=3: must be a name of Mesh(dp=2)'s axes; use dp"),
    (lambda: ledger(TRACE, None, 5),
     "expected=5: must be a vizkit.volume.Movement; use vk.volume.movements(model, layout)"),
    (lambda: ShardedMovement("dp", "all_gather", 8, shapes=(4, 2)),
     "shapes=(4, 2): must be a shape for each tensor; use shapes=((5, 3), (8,))"),
    (lambda: peak_memory(LAYOUT), "trace='Layout': must be a vizkit.Trace; give run.trace"),
    (lambda: peak_memory(TRACE).of(-1), "rank=-1: there are 2 ranks, from 0; use one of them, such as rank=0"),
])  # fmt: skip
def test_what_refusals_say(call, message):
    """Value, rule, remedy."""
    with pytest.raises(vk.InvalidInputError) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize("name, size", [("heads", 10**30), ("kv_heads", 2**63)])
def test_an_enormous_size_is_refused_at_once(name, size):
    """The nearest that would do is found without counting down from it."""
    with pytest.raises(vk.InvalidInputError, match=f"{name}={size}: does not divide .*; use {name}="):
        transformer(**{name: size})


def test_no_more_layers_are_gathered_than_there_are():
    """Prefetching 5 layers on a rank that has 2 gathers 2."""
    held = [per_rank(MODEL, LAYOUT, 0, gathered_layers=n).states_bytes for n in (0, 1, 2, 5)]
    assert held[2] - held[1] == held[1] - held[0] > 0
    assert held[3] == held[2]


def test_one_microbatch_is_one():
    assert str(activations(MODEL)).endswith("4 layers, 1 microbatch in flight")
    assert str(activations(MODEL, pp=4)).endswith("1 layer, 4 microbatches in flight")


def test_what_a_figure_expects_is_a_number_of_bytes():
    """A bool is no number of bytes."""
    counter = Counter("parameters", 0, np.array([0]), np.array([4_000]))
    trace = Trace.from_spans([Span(0, "F", 0, 5)], clock="virtual", counters=[counter])
    with pytest.raises(vk.InvalidInputError, match=r"expected\['parameters'\]=True: must be finite and not negative"):
        vk.memory_figure(trace, {"parameters": True})
