"""Memory and size of transformers against the tables of the papers that the formulas come from."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vizkit as vk
from vizkit.memory import PRECISIONS, Precision, activations, model_states, zero3_estimate
from vizkit.metrics import peak_activations
from vizkit.transformer import Experts, Transformer

GIB, GB = 2**30, 1e9
sizes = st.integers(1, 64)

ZERO_TABLE_1 = [  # parameters, ranks, GB with the optimizer sharded, gradients too, parameters too
    (7.5e9, 1, 120, 120, 120),
    (7.5e9, 4, 52.5, 41.3, 30),
    (7.5e9, 16, 35.6, 21.6, 7.5),
    (128e9, 1, 2048, 2048, 2048),
    (128e9, 4, 896, 704, 512),
    (128e9, 16, 608, 368, 128),
    (1e12, 1, 16000, 16000, 16000),
    (1e12, 4, 7000, 5500, 4000),
    (1e12, 16, 4750, 2875, 1000),
]

MEGATRON_TABLE_1 = [  # billions of parameters as rounded in the table, exact, heads, hidden, layers
    (1.7, 1.652, 24, 2304, 24),
    (3.6, 3.562, 32, 3072, 30),
    (7.5, 7.468, 32, 4096, 36),
    (18.4, 18.450, 48, 6144, 40),
    (1008.0, 1008.039, 160, 25600, 128),
]


def gpt(heads: int, hidden: int, layers: int) -> Transformer:
    return Transformer(num_layers=layers, hidden=hidden, heads=heads, vocab=51200, seq=2048)


GPT_22B, GPT_175B = gpt(64, 6144, 48), gpt(96, 12288, 96)


class TestModelStates:
    """Rajbhandari et al., 2020, Table 1, in GB of 1e9 bytes."""

    @pytest.mark.parametrize("num_params, dp, os, os_g, os_g_p", ZERO_TABLE_1)
    def test_zero_table_1(self, num_params, dp, os, os_g, os_g_p):
        """To the table's precision, which mixes rounding and truncation."""
        found = [model_states(num_params, stage, dp=dp).total_bytes / GB for stage in (1, 2, 3)]
        assert found == pytest.approx([os, os_g, os_g_p], abs=0.0501)

    @settings(max_examples=50)
    @given(st.floats(0, 1e13), sizes)
    def test_the_formulas(self, num_params, dp):
        """(2+2+K)P; 4P + 12P/N; 2P + 14P/N; 16P/N."""
        expected = [16 * num_params, 4 * num_params + 12 * num_params / dp,
                    2 * num_params + 14 * num_params / dp, 16 * num_params / dp]  # fmt: skip
        found = [model_states(num_params, stage, dp=dp).total_bytes for stage in range(4)]
        assert found == pytest.approx(expected)

    def test_largest_models_on_32_gb(self):
        """Table 2: 64 GPUs of 32 GB hold 2, 7.6, 14.4 and 128 billion parameters."""
        for stage, billions in enumerate((2, 7.6, 14.4, 128)):
            assert model_states(billions * 1e9, stage, dp=64).total_bytes == pytest.approx(32e9, rel=0.01)

    @pytest.mark.parametrize("name, kept, shared", [
        ("mixed_adam_both_gradients", 4, 16), ("mixed_adam_fp32_gradients", 6, 12), ("fp32_adam", 8, 8)
    ])  # fmt: skip
    @pytest.mark.parametrize("dp", [1, 2, 8, 64])
    def test_megatrons_distributed_optimizer(self, name, kept, shared, dp):
        """Bytes a parameter: 4 + 16/d, 6 + 12/d and 8 + 8/d."""
        assert model_states(1, zero_stage=1, dp=dp, precision=name).total_bytes == pytest.approx(kept + shared / dp)

    @pytest.mark.parametrize("offload, gib", [("none", 6.09), ("optimizer", 0.78), ("all", 0.12)])
    def test_deepspeeds_estimate(self, offload, gib):
        """2,851 million parameters, the largest layer 32 million, on 8 GPUs."""
        assert zero3_estimate(2851e6, 32e6, 8, offload) / GIB == pytest.approx(gib, abs=0.005)

    @pytest.mark.parametrize("arguments, message", [
        ({"num_params": -1}, "num_params=-1: must be finite and not negative; use 7.5e9 or such"),
        ({"num_params": math.nan}, "num_params=nan: must be finite and not negative; use 7.5e9 or such"),
        ({"num_params": 1, "dp": 0}, "dp=0: must be a whole number, at least 1; use dp=1"),
        ({"num_params": 1, "zero_stage": 4}, "zero_stage=4: must be 0, 1, 2 or 3; use 0 for plain replicas"),
        ({"num_params": 1, "precision": "fp4"},
         f"precision='fp4': is not a known precision; use one of {', '.join(PRECISIONS)}"),
    ])  # fmt: skip
    def test_what_it_refuses(self, arguments, message):
        with pytest.raises(vk.InvalidInputError) as caught:
            model_states(**arguments)
        assert str(caught.value) == message

    def test_a_precision_of_ones_own(self):
        assert model_states(10, precision=Precision(1, 2, 3)).total_bytes == 60


class TestTransformer:
    """Narayanan et al., SC'21: parameters (eq. 2) and operations (eq. 3)."""

    @pytest.mark.parametrize("rounded, billions, heads, hidden, layers", MEGATRON_TABLE_1)
    def test_megatron_table_1(self, rounded, billions, heads, hidden, layers):
        """Exact to the million; the table rounds, 18.450 down."""
        found = gpt(heads, hidden, layers).num_params() / 1e9
        assert found == pytest.approx(billions, abs=0.0005)
        assert found == pytest.approx(rounded, abs=0.06)

    @settings(max_examples=50)
    @given(sizes, sizes, st.integers(1, 16), st.integers(1, 4096), st.integers(1, 100_000), sizes)
    def test_megatrons_formulas(self, layers, width, heads, seq, vocab, batch):
        """12 l h² (1 + 13/(12h) + (V+s)/(12 l h)); 72 B s l h² (1 + s/(6h) + V/(12 l h)), with recomputation 96, 16."""
        h = width * heads
        model = Transformer(num_layers=layers, hidden=h, heads=heads, vocab=vocab, seq=seq)
        params = 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocab + seq) / (12 * layers * h))
        assert model.num_params() == pytest.approx(params, rel=1e-12)
        for recompute, factor, logits in (("none", 72, 12), ("full", 96, 16)):
            size = factor * batch * seq * layers * h**2
            expected = size * (1 + seq / (6 * h) + vocab / (logits * layers * h))
            assert model.flops(batch, recompute=recompute) == pytest.approx(expected, rel=1e-12)

    def test_days_of_training(self):
        """8TP/(nX): 300 billion tokens with 175 billion parameters on 1,024 GPUs at 140 TFLOP/s take 34 days."""
        flops = GPT_175B.flops(1, recompute="full") / GPT_175B.seq * 300e9
        assert flops / (1024 * 140e12) / 86400 == pytest.approx(34, rel=0.06)  # 8P leaves attention and logits out

    @pytest.mark.parametrize("options", [
        {},
        {"kv_heads": 2},
        {"gated": True, "ffn_hidden": 24},
        {"tied_embeddings": False, "learned_positions": False},
        {"experts": Experts(count=4, top_k=2)},
        {"experts": Experts(count=4, top_k=2, ffn_hidden=8, shared=1), "gated": True},
        {"bias": False, "rms_norm": True, "final_norm": True, "gated": True},
    ])  # fmt: skip
    def test_torch_counts_the_same(self, options):
        """The parameters of real modules, layer by layer."""
        model = Transformer(num_layers=3, hidden=16, heads=4, vocab=50, seq=8, **options)
        assert sum(p.numel() for p in as_torch(model).parameters()) == model.num_params()

    def test_a_token_uses_only_the_experts_that_it_visits(self):
        """Active parameters: top_k experts and the router in each layer."""
        dense = gpt(16, 1024, 2)
        sparse = Transformer(
            num_layers=2, hidden=1024, heads=16, vocab=51200, seq=2048, experts=Experts(count=8, top_k=2)
        )
        assert sparse.num_params(active=True) - dense.num_params() == 2 * (dense.expert_params() + 1024 * 8)
        assert sparse.num_params() - sparse.num_params(active=True) == 2 * 6 * dense.expert_params()

    @pytest.mark.parametrize("sizes, message", [
        ({"heads": 5}, "heads=5: does not divide hidden=16; use heads=4 or heads=8"),
        ({"kv_heads": 3}, "kv_heads=3: does not divide heads=4; use kv_heads=2 or kv_heads=4"),
        ({"num_layers": 0}, "num_layers=0: must be a whole number, at least 1; use num_layers=1"),
        ({"hidden": 16.0}, "hidden=16.0: must be a whole number, at least 1; use hidden=16"),
    ])  # fmt: skip
    def test_what_it_refuses(self, sizes, message):
        with pytest.raises(vk.InvalidInputError) as caught:
            Transformer(**{"num_layers": 1, "hidden": 16, "heads": 4, "vocab": 9, "seq": 8, **sizes})
        assert str(caught.value) == message

    def test_more_experts_visited_than_there_are(self):
        with pytest.raises(vk.InvalidInputError, match="top_k=5: a token visits 1 to 4 of 4 experts; use top_k=1"):
            Experts(count=4, top_k=5)


class TestActivations:
    """Korthikanti et al., 2022, in GiB."""

    @pytest.mark.parametrize("model, tp, pp, v, microbatch, par_and_opt, plain, selective", [
        (GPT_22B, 8, 1, 1, 4, 45.5625, 59.25, 9.5625),
        (GPT_175B, 8, 8, 3, 1, 45.5625, 66.84375, 12.3515625),
    ])  # fmt: skip
    def test_table(self, model, tp, pp, v, microbatch, par_and_opt, plain, selective):
        """Parameters and optimizer state 12 h² L/(tp) × 18 bytes; activations with TP, and with SP and selective."""
        params = 12 * model.hidden**2 * model.num_layers / (tp * pp)
        assert model_states(params, precision="mixed_adam_fp32_gradients").total_bytes / GIB == par_and_opt
        layout = {
            "microbatch": microbatch, "tp": tp, "pp": pp, "stages_per_rank": v, "num_microbatches": 64,
            "schedule": "Interleaved1F1B" if v > 1 else "1F1B",
        }  # fmt: skip
        assert activations(model, **layout).total_bytes / GIB == pytest.approx(plain, rel=1e-12)
        with_both = activations(model, **layout, sequence_parallel=True, recompute="selective")
        assert with_both.total_bytes / GIB == pytest.approx(selective, rel=1e-12)

    @pytest.mark.parametrize("model, expected", [
        (GPT_22B, (66.84, 49.42, 16.18, 7.64)),
        (GPT_175B, (62.04, 56.53, 18.49, 8.71)),
        (gpt(128, 20480, 105), (58.31, 62.04, 20.27, 9.42)),
        (gpt(160, 25600, 128), (58.31, 62.04, 20.27, 9.42)),
    ])  # fmt: skip
    def test_figure_7(self, model, expected):
        """Shares of the tensor-parallel baseline: SP, selective, both, full; read off a figure, so to 0.15 points."""
        baseline = activations(model, tp=8).layer_bytes
        ways = [
            {"sequence_parallel": True}, {"recompute": "selective"},
            {"sequence_parallel": True, "recompute": "selective"}, {"recompute": "full"},
        ]  # fmt: skip
        found = [100 * activations(model, tp=8, **way).layer_bytes / baseline for way in ways]
        assert found == pytest.approx(expected, abs=0.15)

    @settings(max_examples=50)
    @given(sizes, st.sampled_from([1, 2, 4]), st.integers(1, 128), sizes)
    def test_the_formulas(self, width, t, share, b):
        """sbh(34 + 5as/h); sbh(10 + 24/t + 5as/(ht)); sbh/t (34 + 5as/h); without the scores; 2sbh."""
        a, h, s = 4, 4 * width, 4 * share
        model = Transformer(num_layers=2, hidden=h, heads=a, vocab=10, seq=s)
        sbh, scores = s * b * h, 5 * a * s / h
        table = [
            ({}, 34 + scores), ({"tp": t}, 10 + 24 / t + scores / t),
            ({"tp": t, "sequence_parallel": True}, (34 + scores) / t),
            ({"tp": t, "recompute": "selective"}, 10 + 24 / t),
            ({"tp": t, "sequence_parallel": True, "recompute": "selective"}, 34 / t), ({"recompute": "full"}, 2),
        ]  # fmt: skip
        for layout, factor in table:
            assert activations(model, microbatch=b, **layout).layer_bytes == pytest.approx(sbh * factor)

    @pytest.mark.parametrize("name", [name for name in vk.schedule_names() if name != "ForwardOnly"])
    @pytest.mark.parametrize("p, m, v", [(1, 4, 2), (2, 4, 2), (4, 8, 2), (4, 12, 3), (8, 16, 2)])
    def test_microbatches_in_flight_are_the_simulators(self, name, p, m, v):
        """The fullest rank's peak in the simulated schedule."""
        local = v if name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble") else None
        try:
            schedule = vk.schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=local)
        except vk.InvalidInputError:
            pytest.skip(f"{name} does not have these sizes")
        layers = gpt(4, 64, 48)
        found = activations(layers, pp=p, schedule=name, num_microbatches=m, stages_per_rank=local)
        simulated = vk.simulate(schedule, vk.Durations(F=1, I=1, W=1))
        assert found.layers * found.in_flight == pytest.approx(peak_activations(simulated).max() * 48 / p)

    def test_context_parallelism_divides_the_tokens(self):
        """A quarter of everything: queries are local, keys stay whole."""
        assert activations(GPT_22B, cp=4).layer_bytes * 4 == activations(GPT_22B).layer_bytes

    @pytest.mark.parametrize("layout, message", [
        ({"tp": 7}, "tp=7: does not divide heads=64; use tp=4 or tp=8"),
        ({"cp": 3}, "cp=3: does not divide seq=2048; use cp=2 or cp=4"),
        ({"pp": 5}, "pp=5: does not divide num_layers=48; use pp=4 or pp=6"),
        ({"recompute": "some"}, "recompute='some': is no way to recompute; use one of none, selective, full"),
        ({"schedule": "mine"},
         "schedule='mine': is not a schedule that vizkit knows; did you mean V-Min? use one of "
         + ", ".join(vk.schedule_names())),
    ])  # fmt: skip
    def test_what_it_refuses(self, layout, message):
        with pytest.raises(vk.InvalidInputError) as caught:
            activations(GPT_22B, **layout)
        assert str(caught.value) == message


def as_torch(model: Transformer) -> nn.Module:
    """Modules with this transformer's parameters; they are counted, not run."""

    def linear(inputs: int, outputs: int) -> nn.Module:
        return nn.Linear(inputs, outputs, bias=model.bias)

    def norm() -> nn.Module:
        return nn.RMSNorm(h) if model.rms_norm else nn.LayerNorm(h)

    def feed_forward(width: int) -> nn.Module:
        return nn.ModuleList([linear(h, width) for _ in range(2 if model.gated else 1)] + [linear(width, h)])

    h, kv, experts = model.hidden, model.key_value_width, model.experts
    parts: list[nn.Module] = [nn.Embedding(model.vocab, h)]
    parts += [nn.Embedding(model.seq, h)] * model.learned_positions
    parts += [nn.Linear(h, model.vocab, bias=False)] * (not model.tied_embeddings)
    parts += [norm()] * model.final_norm
    for _ in range(model.num_layers):
        parts += [norm(), norm(), linear(h, h), linear(h, kv), linear(h, kv), linear(h, h)]
        width = model.expert_width
        parts += [feed_forward(width) for _ in range(experts.count + experts.shared if experts else 1)]
        parts += [nn.Linear(h, experts.count, bias=False)] if experts else []
    return nn.ModuleList(parts)
