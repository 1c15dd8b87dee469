"""Ten mixtures worked out by hand from the papers' formulas, without the kit: memory and volume of a rank."""

from __future__ import annotations

from collections import defaultdict

import pytest

import vizkit as vk
from vizkit.memory import key_value_cache, per_rank
from vizkit.volume import movements

L, H, A, V, S = 8, 64, 8, 96, 32
"""Layers, hidden, heads, vocabulary, tokens of the sequence; 16-bit numbers, so 2 bytes each."""
B, M = 3, 2
"""Samples of a microbatch, microbatches of a step."""
P = 12 * L * H**2 + 13 * L * H + (V + S) * H
GPT = vk.Transformer(num_layers=L, hidden=H, heads=A, vocab=V, seq=S)
KV, F = 16, 160
LLAMA = vk.Transformer(
    num_layers=L, hidden=H, heads=A, kv_heads=2, vocab=V, seq=S, ffn_hidden=F, gated=True, bias=False, rms_norm=True,
    learned_positions=False, tied_embeddings=False, final_norm=True,
)  # fmt: skip
MOE = vk.Transformer(num_layers=L, hidden=H, heads=A, vocab=V, seq=S, experts=vk.Experts(count=4, top_k=2))
SBH = S * B * H
SCORES = 5 * A * S / H
LOGITS = 4 * S * B * V
Moved = dict[tuple[str, str], float]


def both_ways(axis: str, num_bytes: float) -> Moved:
    return {(axis, "send"): num_bytes, (axis, "receive"): num_bytes}


def check(model: vk.Transformer, layout: vk.Layout, held: tuple[float, ...], moved: Moved, stage: int = 0) -> None:
    """Bytes of parameters, gradients, optimizer, activations; bytes by axis and kind."""
    found = per_rank(model, layout, stage)
    parts = (found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes, found.activations_bytes)
    assert parts == pytest.approx(held, rel=1e-12)
    calls: Moved = defaultdict(float)
    for movement in movements(model, layout, stage):
        calls[movement.axis, movement.kind.value] += movement.total_bytes
    assert dict(calls) == pytest.approx(moved, rel=1e-12)


def test_zero_1():
    """2P, 2P, 12P/N; 34sbh + 5as²b a layer, 5sbh + 4sbV at the ends; P to reduce-scatter and P to gather."""
    held = 2 * P, 2 * P, 12 * P / 4, L * SBH * (34 + SCORES) + 5 * SBH + LOGITS
    moved = {("dp", "reduce_scatter"): 2 * P, ("dp", "all_gather"): 2 * P}
    check(GPT, vk.Layout(dp=4, zero_stage=1, microbatch=B, num_microbatches=M), held, moved)


def test_zero_3_with_a_ring_of_two():
    """Half of each sequence; 4-byte gradients; keys and values go round once forward, once and twice backward."""
    held = 2 * P / 4, 4 * P / 4, 12 * P / 4, (L * 34 * SBH + 5 * SBH + LOGITS) / 2
    keys_and_values = 2 * 2 * SBH / 2
    moved = {
        ("dp×cp", "all_gather"): 2 * M * 2 * P,
        ("dp×cp", "reduce_scatter"): M * 4 * P,
        **both_ways("cp", L * M * keys_and_values * (1 + 1 + 2)),
    }
    precision = "mixed_adam_fp32_gradients"
    layout = vk.Layout(dp=2, cp=2, zero_stage=3, recompute="selective", precision=precision, microbatch=B,
                       num_microbatches=M)  # fmt: skip
    check(GPT, layout, held, moved)


def test_tensor_and_sequence_parallel():
    """sbh(34 + 5as/h)/t a layer; 4 pairs of all-gather and reduce-scatter, one at each end, and 3 numbers a token."""
    t = 4
    layer = 12 * H**2 / t + 7 * H / t + 6 * H
    num_params = L * layer + V * H / t + S * H
    held = 2 * num_params, 2 * num_params, 12 * num_params, L * SBH / t * (34 + SCORES) + 5 * SBH / t + LOGITS / t
    pairs = 2 * SBH * M * (4 * L + 2)
    whole = 2 * (L * 6 * H + S * H)
    moved = {
        ("tp", "all_gather"): pairs,
        ("tp", "reduce_scatter"): pairs,
        ("tp", "all_reduce"): whole + 3 * 4 * S * B * M,
    }
    check(GPT, vk.Layout(tp=t, sequence_parallel=True, microbatch=B, num_microbatches=M), held, moved)


def test_grouped_queries_with_full_recomputation():
    """2sbh a layer; 6 all-reduces of bsh a layer; SwiGLU has 3hf parameters, keys and values h · kv each."""
    t = 2
    assert LLAMA.num_params() == L * (2 * H**2 + 2 * H * KV + 3 * H * F + 2 * H) + 2 * V * H + H
    num_params = L * ((2 * H**2 + 2 * H * KV + 3 * H * F) / t + 2 * H) + 2 * V * H / t + H
    held = 2 * num_params, 2 * num_params, 12 * num_params, L * 2 * SBH + 5 * SBH + LOGITS / t
    moved = {("tp", "all_reduce"): 2 * SBH * M * (6 * L + 2) + 3 * 4 * S * B * M}
    check(LLAMA, vk.Layout(tp=t, recompute="full", microbatch=B, num_microbatches=M), held, moved)


@pytest.mark.parametrize("stage", range(4))
def test_each_stage_of_1f1b(stage):
    """p − r microbatches in flight; bsh to each neighbour; the embedding is at both ends, its gradients are added."""
    first, last = stage == 0, stage == 3
    num_params = 2 * (12 * H**2 + 13 * H) + (V + S) * H * first + V * H * last
    kept = (4 - stage) * 2 * S * H * (34 + SCORES) + 4 * S * H * first + (4 * S * H + 4 * S * V) * last
    moved = both_ways("pp", 8 * 2 * S * H * (2 - first - last))
    if first or last:
        moved["pp", "all_reduce"] = 2 * V * H
    held = 2 * num_params, 2 * num_params, 12 * num_params, kept
    check(GPT, vk.Layout(pp=4, num_microbatches=8), held, moved, stage)


def test_interleaving():
    """1 + (p−1)/(pv) of the activations, and v − 1 more hops."""
    layout = vk.Layout(pp=2, num_microbatches=4, schedule="Interleaved1F1B", stages_per_rank=2)
    num_params = 4 * (12 * H**2 + 13 * H) + (V + S) * H
    kept = L * S * H * (34 + SCORES) * (1 + 1 / 4) + 4 * S * H
    moved = {**both_ways("pp", 4 * 2 * S * H * (2 + 1)), ("pp", "all_reduce"): 2 * V * H}
    check(GPT, layout, (2 * num_params, 2 * num_params, 12 * num_params, kept), moved)


def test_experts_with_zero_2():
    """What all tokens visit is shared by 4 ranks, an expert by 2; each token goes to 2 experts and back, twice."""
    expert = 8 * H**2 + 5 * H
    dense = L * (4 * H**2 + 8 * H + 4 * H) + (V + S) * H  # attention, its biases and the norms', a router of 4
    mine = L * 2 * expert
    assert MOE.num_params() == dense + L * 4 * expert
    assert MOE.num_params(active=True) == dense + L * 2 * expert
    sbh = S * H
    layer = sbh * (10 + 2 * 2 + 2 * 4 + 2 * 2 * 4 * 2 + SCORES)  # inputs; routed copies; queries to values; experts
    share = dense / 4 + mine / 2
    held = 2 * (dense + mine), 2 * share, 12 * share, L * layer + 5 * sbh + 4 * S * V
    moved = {
        ("dp×ep", "all_gather"): 2 * dense,
        ("dp×ep", "reduce_scatter"): M * 2 * dense,
        ("dp", "all_gather"): 2 * mine,
        ("dp", "reduce_scatter"): M * 2 * mine,
        ("ep", "all_to_all"): 4 * L * M * 2 * sbh * 2,
    }
    check(MOE, vk.Layout(dp=4, ep=2, zero_stage=2, num_microbatches=M), held, moved)


def test_all_axes_at_once():
    """dp, ZeRO-1, tp, sequence parallelism, pp, selective recomputation and Ulysses, on the first of two stages."""
    t, microbatches = 2, 4
    layer = 12 * H**2 / t + 7 * H / t + 6 * H
    num_params = L / 2 * layer + V * H / t + S * H
    sbh = SBH / 2
    held = 2 * num_params, 2 * num_params, 12 * num_params / 4, 2 * L / 2 * 34 * sbh / t + 2 * sbh / t
    payload = 2 * sbh
    moved = {
        ("dp×cp", "all_gather"): 2 * num_params,
        ("dp×cp", "reduce_scatter"): 2 * num_params,
        ("tp", "all_gather"): payload * microbatches * (4 * L / 2 + 1),
        ("tp", "reduce_scatter"): payload * microbatches * (4 * L / 2 + 1),
        ("tp", "all_reduce"): 2 * (L / 2 * 6 * H + S * H),
        ("cp", "all_to_all"): microbatches * L / 2 * 8 * payload / t,
        **both_ways("pp", microbatches * payload / t),
        ("pp", "all_reduce"): 2 * V * H / t,
    }
    layout = vk.Layout(dp=2, tp=t, pp=2, cp=2, context_by="ulysses", sequence_parallel=True, zero_stage=1,
                       recompute="selective", num_microbatches=microbatches, microbatch=B)  # fmt: skip
    check(GPT, layout, held, moved)


def llama(num_layers: int, hidden: int, ffn_hidden: int, heads: int, **more: object) -> vk.Transformer:
    return vk.Transformer(
        num_layers=num_layers, hidden=hidden, ffn_hidden=ffn_hidden, heads=heads, vocab=32000, seq=4096, gated=True,
        bias=False, rms_norm=True, learned_positions=False, tied_embeddings=False, final_norm=True, **more,
    )  # fmt: skip


@pytest.mark.parametrize("model, total, active", [
    (llama(32, 4096, 11008, 32), 6_738_415_616, 6_738_415_616),
    (llama(80, 8192, 28672, 64, kv_heads=8), 68_976_648_192, 68_976_648_192),
    (llama(32, 4096, 14336, 32, kv_heads=8, experts=vk.Experts(count=8, top_k=2)), 46_702_792_704, 12_879_925_248),
])  # fmt: skip
def test_published_checkpoints(model, total, active):
    """Llama-2 7B and 70B and Mixtral 8x7B, to the parameter."""
    assert (model.num_params(), model.num_params(active=True)) == (total, active)


def test_keys_and_values_of_llama_2_70b():
    """2 × 80 layers × 8 heads × 128 × 2 B = 320 KiB a token, an eighth of it on each of 8 ranks."""
    model = llama(80, 8192, 28672, 64, kv_heads=8)
    assert key_value_cache(model, tokens=1) == 320 * 2**10
    assert key_value_cache(model, tokens=1, tp=8) == 40 * 2**10
