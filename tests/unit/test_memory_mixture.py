"""Memory of one rank of any mixture, against the papers that each part comes from, and against real tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import vizkit as vk
from vizkit.memory import activations, model_states, per_rank, pipeline, zero3_estimate
from vizkit.memory.in_flight import count
from vizkit.memory.shards import shards
from vizkit.metrics import peak_activations
from vizkit.runtime import gpt as tiny

GIB = 2**30


def gpt(heads: int, hidden: int, layers: int, **sizes: object) -> vk.Transformer:
    known = {"num_layers": layers, "hidden": hidden, "heads": heads, "vocab": 51200, "seq": 2048}
    return vk.Transformer(**{**known, **sizes})


GPT_22B, GPT_175B, GPT_530B, GPT_1T = gpt(64, 6144, 48), gpt(96, 12288, 96), gpt(128, 20480, 105), gpt(160, 25600, 128)
BOTH = {"sequence_parallel": True, "recompute": "selective"}

powers = st.sampled_from([1, 2, 4])
models = st.builds(
    vk.Transformer,
    num_layers=st.sampled_from([8, 16]),
    hidden=st.sampled_from([64, 128]),
    heads=st.just(8),
    kv_heads=st.sampled_from([None, 4]),
    vocab=st.sampled_from([96, 640]),
    seq=st.sampled_from([32, 64]),
    gated=st.booleans(),
    bias=st.booleans(),
    rms_norm=st.booleans(),
    learned_positions=st.booleans(),
    tied_embeddings=st.booleans(),
    final_norm=st.booleans(),
    experts=st.sampled_from([None, vk.Experts(count=4, top_k=2), vk.Experts(count=8, shared=1, ffn_hidden=32)]),
)
WAYS = ["none", "selective", "full"]
PIPELINES = ["GPipe", "1F1B", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble"]


class TestZero:
    """Rajbhandari et al., 2020, Table 1, with the exact parameters of a real model."""

    @pytest.mark.parametrize("dp", [1, 4, 16, 64])
    def test_table_1(self, dp):
        """16P, 4P + 12P/N, 2P + 14P/N, 16P/N."""
        num_params = (model := gpt(32, 4096, 36)).num_params()
        found = [per_rank(model, vk.Layout(dp=dp, zero_stage=stage)).states_bytes for stage in range(4)]
        assert found == pytest.approx([num_params * (kept + shared / dp)
                                       for kept, shared in ((16, 0), (4, 12), (2, 14), (0, 16))])  # fmt: skip
        assert found == [model_states(num_params, stage, dp=dp).total_bytes for stage in range(4)]

    @pytest.mark.parametrize("name, kept, shared", [
        ("mixed_adam_both_gradients", 4, 16), ("mixed_adam_fp32_gradients", 6, 12), ("fp32_adam", 8, 8)
    ])  # fmt: skip
    def test_megatrons_distributed_optimizer(self, name, kept, shared):
        """Bytes a parameter: 4 + 16/d, 6 + 12/d and 8 + 8/d, where d counts context-parallel ranks as replicas."""
        found = per_rank(GPT_22B, vk.Layout(dp=4, cp=2, tp=8, zero_stage=1, precision=name))
        assert found.states_bytes / found.num_params == pytest.approx(kept + shared / 8)

    def test_deepspeeds_estimate(self):
        """18 bytes a parameter shared by 8 GPUs, and one layer in fp16 with its gradients: `gathered_layers=1`."""
        layout = vk.Layout(dp=8, zero_stage=3, precision="mixed_adam_fp32_gradients")
        found = per_rank(GPT_22B, layout, gathered_layers=1).states_bytes
        assert found == pytest.approx(zero3_estimate(GPT_22B.num_params(), GPT_22B.layer_params(), 8))

    @settings(max_examples=40)
    @given(models, st.sampled_from([1, 2, 3, 8]), powers)
    def test_each_stage_takes_less(self, model, dp, cp):
        """Where there are replicas; without, all are equal."""
        found = [per_rank(model, vk.Layout(dp=dp, cp=cp, zero_stage=stage)).states_bytes for stage in range(4)]
        assert found == sorted(found, reverse=True)
        assert len(set(found)) == (1 if dp * cp == 1 else 4)


class TestParameters:
    """What tensor, pipeline and expert parallelism leave on a rank."""

    @settings(max_examples=60)
    @given(models, powers, powers, powers, st.sampled_from(PIPELINES))
    def test_all_ranks_together_hold_the_model(self, model, tp, pp, ep, schedule):
        """Once what is sharded, t times what is not, and tied embeddings twice where they are on two ranks."""
        assume(model.experts or ep == 1)
        layout = vk.Layout(dp=4, tp=tp, pp=pp, ep=ep, schedule=schedule, num_microbatches=8)
        stages = [per_rank(model, layout, stage) for stage in range(pp)]
        part = shards(model, tp, ep)
        whole = model.num_layers * part.replicated + part.positions + part.final_norm
        experts = model.num_layers * part.experts
        row_bias = model.num_layers * model.hidden * model.bias * (model.experts.count // ep if model.experts else 0)
        held = sum(memory.num_params for memory in stages)
        copies = part.vocabulary if model.tied_embeddings and pp > 1 and schedule != "ZBVZeroBubble" else 0
        dense = tp * (held - experts - copies - whole) + whole
        assert dense + ep * (tp * (experts - row_bias) + row_bias) == model.num_params()

    @pytest.mark.parametrize("rounded, heads, hidden, layers, tp, pp", [
        (1.7, 24, 2304, 24, 1, 1), (3.6, 32, 3072, 30, 2, 1), (7.5, 32, 4096, 36, 4, 1), (18.4, 48, 6144, 40, 8, 1),
        (1008.0, 160, 25600, 128, 8, 64),
    ])  # fmt: skip
    def test_megatrons_models_on_their_ranks(self, rounded, heads, hidden, layers, tp, pp):
        """Narayanan et al., SC'21, Table 1: t · p ranks hold the model, and a little twice."""
        layout = vk.Layout(tp=tp, pp=pp, num_microbatches=512)
        held = tp * sum(per_rank(gpt(heads, hidden, layers), layout, stage).num_params for stage in range(pp)) / 1e9
        assert held == pytest.approx(rounded, rel=0.04)
        assert held >= gpt(heads, hidden, layers).num_params() / 1e9

    def test_a_vocabulary_that_does_not_divide(self):
        """Each rank has room for ⌈V/t⌉ tokens."""
        assert shards(gpt(8, 64, 1, vocab=97), 4, 1).vocabulary == 25 * 64

    def test_dualpipe_holds_each_stage_twice(self):
        """The layers of two stages on each rank, and at both ends of the pipeline both ends of the model."""
        sizes = {"pp": 4, "num_microbatches": 8}
        twice, once = vk.Layout(schedule="DualPipe", **sizes), vk.Layout(**sizes)
        assert per_rank(GPT_22B, twice, 1).num_params == 2 * per_rank(GPT_22B, once, 1).num_params
        assert per_rank(GPT_22B, twice, 0).num_params == per_rank(GPT_22B, twice, 3).num_params

    def test_replicas_of_experts_are_fewer(self):
        """ZeRO-3 on 8 replicas with 4 ranks to a set of experts: a dense parameter is shared by 8, an expert's by 2."""
        model = gpt(8, 64, 4, experts=vk.Experts(count=8, top_k=2))
        dense, part = model.num_params() - 4 * 8 * model.expert_params(), 4 * 2 * model.expert_params()
        found = per_rank(model, vk.Layout(dp=8, ep=4, zero_stage=3))
        assert found.num_params == dense + part
        assert found.states_bytes == pytest.approx(16 * (dense / 8 + part / 2))


class TestActivations:
    """Korthikanti et al., 2022, and what the formulas say of its neighbours."""

    @pytest.mark.parametrize("model, pp, v, microbatch, plain, selective", [
        (GPT_22B, 1, 1, 4, 59.25, 9.5625), (GPT_175B, 8, 3, 1, 66.84375, 12.3515625),
    ])  # fmt: skip
    def test_table(self, model, pp, v, microbatch, plain, selective):
        """GiB of layers' activations on the fullest rank; parameters and optimizer 45.5625, norms and biases apart."""
        schedule = {"schedule": "Interleaved1F1B", "stages_per_rank": v} if v > 1 else {}
        sizes = {"tp": 8, "pp": pp, "microbatch": microbatch, "num_microbatches": 64, **schedule}
        found = [per_rank(model, vk.Layout(**sizes, **way)).layer_activations_bytes / GIB for way in ({}, BOTH)]
        assert found == pytest.approx([plain, selective], rel=1e-12)
        bare = gpt(model.heads, model.hidden, model.num_layers, vocab=1, learned_positions=False)
        states = per_rank(bare, vk.Layout(**sizes, precision="mixed_adam_fp32_gradients")).states_bytes
        h, layers = model.hidden, model.num_layers // pp
        beside = layers * (7 * h / 8 + 6 * h) + h  # split biases, whole ones and norms; the one token
        assert states - 18 * beside == pytest.approx(45.5625 * GIB, rel=1e-12)

    @pytest.mark.parametrize("model, pp, expected", [
        (GPT_22B, 1, (66.84, 49.42, 16.18, 7.64)), (GPT_175B, 8, (62.04, 56.53, 18.49, 8.71)),
        (GPT_530B, 35, (58.31, 62.04, 20.27, 9.42)), (GPT_1T, 64, (58.31, 62.04, 20.27, 9.42)),
    ])  # fmt: skip
    def test_figure_7(self, model, pp, expected):
        """Shares of the tensor-parallel baseline: SP, selective, both, full; to the two digits of the figure."""
        sizes = {"tp": 8, "pp": pp, "num_microbatches": 2 * pp}
        ways = [{}, {"sequence_parallel": True}, {"recompute": "selective"}, BOTH, {"recompute": "full"}]
        baseline, *found = (per_rank(model, vk.Layout(**sizes, **way)).layer_activations_bytes for way in ways)
        assert [100 * part / baseline for part in found] == pytest.approx(expected, abs=0.15)

    def test_only_interleaving_has_the_factor(self):
        """1 + (p−1)/(pv): for 530B 1 + 34/105, for 1T, which is not interleaved, 1."""
        for model, pp, v, factor in ((GPT_530B, 35, 3, 1 + 34 / 105), (GPT_1T, 64, 1, 1.0)):
            schedule = {"schedule": "Interleaved1F1B", "stages_per_rank": v} if v > 1 else {}
            layout = vk.Layout(tp=8, pp=pp, num_microbatches=8 * pp, **schedule, **BOTH)
            layer = 34 * 2048 * model.hidden / 8
            found = per_rank(model, layout).layer_activations_bytes
            assert found == pytest.approx(layer * model.num_layers * factor, rel=1e-12)

    @settings(max_examples=40)
    @given(models, powers, powers, st.booleans(), st.sampled_from(WAYS), st.sampled_from(PIPELINES))
    def test_layers_are_those_of_activations(self, model, tp, cp, sequence_parallel, recompute, schedule):
        """`vk.memory.activations` says the same of the fullest rank's layers."""
        way = {"tp": tp, "cp": cp, "sequence_parallel": sequence_parallel, "recompute": recompute, "microbatch": 3,
               "pp": 4, "num_microbatches": 8, "schedule": schedule}  # fmt: skip
        layout = vk.Layout(**way)
        found = max(per_rank(model, layout, stage).layer_activations_bytes for stage in range(4))
        assert found == pytest.approx(activations(model, **way).total_bytes)

    @pytest.mark.parametrize("pp", [1, 4])
    @pytest.mark.parametrize("sequence_parallel, whole", [(False, 1), (True, 8)])
    def test_the_ends_of_the_model(self, pp, sequence_parallel, whole):
        """Section 4.3: sbhp/t of dropout on the first stage, 4sbh/t (1 + V/h) of norm, logits and loss on the last."""
        layout = vk.Layout(tp=8, pp=pp, microbatch=2, num_microbatches=8, sequence_parallel=sequence_parallel)
        sb, h, vocab = 2 * 2048, GPT_22B.hidden, GPT_22B.vocab
        first, last = pp * sb * h / whole, 4 * sb * h / whole + 4 * sb * vocab / 8
        found = [per_rank(GPT_22B, layout, stage).end_activations_bytes for stage in {0, pp - 1}]
        assert found == ([first + last] if pp == 1 else [first, last])
        inner = [per_rank(GPT_22B, layout, stage).end_activations_bytes for stage in range(1, pp - 1)]
        assert inner == [0] * max(pp - 2, 0)

    def test_numbers_of_32_bits_keep_masks_of_8(self):
        """2 masks of a byte in 34, and 1 in the 5 of the scores: sbh(66 + 9as/h)."""
        found = per_rank(GPT_22B, vk.Layout(precision="fp32_adam")).layer_activations_bytes / 48
        assert found == 2048 * 6144 * 66 + 9 * 64 * 2048**2
        assert per_rank(GPT_22B, vk.Layout(), number_bytes=4).layer_activations_bytes == 48 * found

    def test_the_layer_that_recomputation_works_on(self):
        """Full recomputation keeps 2sbh a layer, and has one whole layer while it goes through it."""
        kept, whole = (per_rank(GPT_22B, vk.Layout(recompute=way)) for way in ("full", "none"))
        found = per_rank(GPT_22B, vk.Layout(recompute="full"), working_layer=True)
        layer, inputs = whole.layer_activations_bytes / 48, kept.layer_activations_bytes / 48
        assert found.layer_activations_bytes == pytest.approx(47 * inputs + layer)

    def test_all_that_torch_saves(self):
        """A real forward in fp32: every floating-point tensor that autograd keeps, to the byte."""
        sizes = vk.Transformer(num_layers=2, hidden=64, heads=4, vocab=97, seq=32, final_norm=True)
        found = per_rank(sizes, vk.Layout(microbatch=3, precision="fp32_adam"), dropout=False, norm_statistics=True)
        assert found.activations_bytes == saved_bytes(tiny.GPT(sizes, seed=0), sizes, batch=3)


class TestPipelines:
    """What a schedule's own order of actions says."""

    @pytest.mark.parametrize("name", [name for name in vk.schedule_names() if name != "ForwardOnly"])
    @pytest.mark.parametrize("p, m, v", [(1, 3, 2), (2, 4, 1), (3, 6, 2), (4, 8, 3), (4, 24, 2), (8, 16, 2)])
    def test_formulas_count_what_the_actions_do(self, name, p, m, v):
        """Every rank's passes, ends and messages; and the passes are those that the simulator sees held."""
        local = v if name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble") else None
        try:
            schedule = vk.schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=local)
        except vk.InvalidInputError:
            pytest.skip(f"{name} does not have these sizes")
        counted = count(schedule)
        assert pipeline(name, p, m, counted.local_stages) == counted
        simulated = peak_activations(vk.simulate(schedule, vk.Durations(F=1, I=1, W=1)))
        held = [rank.passes * counted.num_pipelines / counted.local_stages for rank in counted.ranks]
        assert held == pytest.approx(simulated.tolist())

    @pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipe"])
    def test_messages_are_those_between_ranks(self, name):
        """What one rank sends another receives: as many forwards as gradients in all, none within a rank."""
        ranks = pipeline(name, 4, 8, 1 if name == "1F1B" else 2).ranks
        assert sum(rank.forwards for rank in ranks) == sum(rank.backwards for rank in ranks)
        assert sum(rank.forwards for rank in ranks) == {"1F1B": 3, "Interleaved1F1B": 7, "ZBVZeroBubble": 6,
                                                        "DualPipe": 3}[name] * 8  # fmt: skip

    def test_the_fullest_rank_is_the_default(self):
        """In 1F1B the first, in GPipe the last, whose logits of all microbatches wait."""
        for schedule in ("1F1B", "GPipe"):
            layout = vk.Layout(pp=4, num_microbatches=8, schedule=schedule)
            every = [per_rank(GPT_22B, layout, stage) for stage in range(4)]
            assert per_rank(GPT_22B, layout) == max(every, key=lambda memory: memory.total_bytes)
        assert per_rank(GPT_22B, layout).stage == 3

    @pytest.mark.parametrize("stage", [4, -1, 1.0, True])
    def test_a_stage_that_is_not(self, stage):
        with pytest.raises(vk.InvalidInputError) as caught:
            per_rank(GPT_22B, vk.Layout(pp=4), stage)
        assert str(caught.value) == (
            f"stage={stage!r}: the pp axis has places 0 to 3; use stage=3, or None for the fullest"
        )

    def test_a_layout_that_does_not_fit(self):
        with pytest.raises(vk.InvalidInputError, match="tp=3: does not divide heads=64; use tp=2 or tp=4"):
            per_rank(GPT_22B, vk.Layout(tp=3))


def test_what_it_says():
    """Powers of 1000, as everywhere in vizkit."""
    said = str(per_rank(GPT_22B, vk.Layout(pp=4), 1))
    assert said == (
        "108 GB at place 1 of the pipeline: "
        "parameters 10.9 GB, gradients 10.9 GB, optimizer 65.2 GB, activations 21.2 GB"
    )


def saved_bytes(module: torch.nn.Module, sizes: vk.Transformer, batch: int) -> int:
    """Bytes of the storages that a forward and its loss keep for the backward: not parameters, numbers of tokens."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.dim():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.arange(batch * sizes.seq).view(batch, -1) % sizes.vocab
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = tiny.loss(module(ids), ids)
    assert loss.requires_grad
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in parameters)
