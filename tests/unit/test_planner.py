"""What the planner predicts of one layout: its parts by formulas worked out here, and the same by arrays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vizkit as vk
from vizkit import collectives, volume
from vizkit.errors import InvalidInputError
from vizkit.hardware import Cluster, dgx_a100
from vizkit.hardware.presets import A100
from vizkit.planner import Prediction, Program, predict
from vizkit.planner.columns import Columns
from vizkit.planner.places import memory_bytes
from vizkit.planner.steps import steps

GPT_7B = vk.Transformer(num_layers=32, hidden=4096, heads=32, vocab=51200, seq=2048)
SMALL = vk.Transformer(num_layers=8, hidden=512, heads=16, vocab=1001, seq=256)
MIXTURE = vk.Transformer(
    num_layers=8, hidden=512, heads=16, kv_heads=8, vocab=1001, seq=256, gated=True, bias=False, rms_norm=True,
    learned_positions=False, tied_embeddings=False, final_norm=True, experts=vk.Experts(count=8, top_k=2, shared=1),
)  # fmt: skip
BARE = Program(
    overlap_gradients=False, overlap_parameters=False, overlap_tensor=False, asynchronous_sends=False, regather=False
)
TERMS = ("matrix_s", "elementwise_s", "tp_s", "cp_s", "ep_s", "pp_s", "dp_s", "bubble_s", "optimizer_s")


def term(prediction: Prediction, name: str) -> float:
    return prediction.exposed_s.get(name.removesuffix("_s"), 0.0) if name[2] == "_" else getattr(prediction, name)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    switches = ("overlap_gradients", "overlap_parameters", "overlap_tensor", "asynchronous_sends", "scatter_gather",
                "fused_attention", "regather")  # fmt: skip
    return Program(
        **{name: draw(st.booleans()) for name in switches},
        calls_per_layer=draw(st.sampled_from([1, 4])),
        send_share=draw(st.sampled_from([0.4, 1.0])),
    )


@st.composite
def layouts(draw: st.DrawFn, experts: bool) -> vk.Layout:
    """Any that the arrays know and a model of 8 layers and 8 key-value heads has."""
    schedule = draw(st.sampled_from(["1F1B", "GPipe", "Interleaved1F1B", "ZB-H1"]))
    interleaved = schedule == "Interleaved1F1B"
    pp = draw(st.sampled_from([1, 2, 4] if interleaved else [1, 2, 4, 8]))
    dp, cp = draw(st.sampled_from([1, 2, 3, 8, 16])), draw(st.sampled_from([1, 1, 2]))
    stages = [v for v in (2, 4, 8) if v * pp <= 8]
    return vk.Layout(
        dp=dp,
        tp=draw(st.sampled_from([1, 2, 4] if cp > 1 else [1, 2, 4, 8])),
        pp=pp,
        cp=cp,
        ep=draw(st.sampled_from([ep for ep in (1, 2, 4, 8) if experts and dp * cp % ep == 0] or [1])),
        zero_stage=draw(st.integers(0, 3)),
        sequence_parallel=draw(st.booleans()),
        context_by=draw(st.sampled_from(["ring", "ulysses"])),
        microbatch=draw(st.sampled_from([1, 3])),
        num_microbatches=pp * draw(st.integers(1, 3)) if interleaved else draw(st.integers(1, 12)),
        schedule=schedule,
        stages_per_rank=draw(st.sampled_from(stages)) if interleaved else 1,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        precision=draw(st.sampled_from(["mixed_adam", "fp32_adam", "mixed_adam_fp32_gradients"])),
    )


@given(st.data(), programs())
@settings(max_examples=50, deadline=None)
def test_arrays_say_what_one_prediction_says(data: st.DataObject, program: Program):
    """Each second and each byte of a drawn layout, on nodes of 8 or of 1: arrays, `predict` and `vk.memory` agree."""
    model = data.draw(st.sampled_from([SMALL, MIXTURE]))
    layout = data.draw(layouts(experts=model is MIXTURE))
    in_nodes = layout.world_size <= 8 or layout.world_size % 8 == 0
    cluster = dgx_a100().of(layout.world_size) if in_nodes else Cluster(device=A100, num_nodes=layout.world_size)
    one, rows = predict(model, layout, cluster, program=program), Columns.of([layout])
    many = steps(model, rows, cluster, program)
    for name in TERMS:
        assert getattr(many, name)[0] == pytest.approx(term(one, name), rel=1e-9, abs=1e-15), name
    assert many.step_s[0] == pytest.approx(one.step_s, rel=1e-9)
    held = vk.memory.per_rank(model, layout, gathered_layers=2, working_layer=not program.fused_attention)
    assert one.memory_bytes == held.total_bytes
    assert memory_bytes(model, rows, program.fused_attention)[0] == pytest.approx(held.total_bytes, rel=1e-12)
    assert rows.layout(0) == dataclasses.replace(layout, stages_per_rank=layout.local_stages)


def test_a_row_of_many_is_what_it_is_alone():
    """Nothing leaks from one row of an array to another."""
    kinds = [
        vk.Layout(dp=dp, tp=tp, pp=8 // tp, zero_stage=zero, num_microbatches=8, schedule=name, recompute=recompute)
        for dp, tp, zero, name, recompute in (
            (4, 2, 0, "1F1B", "full"),
            (4, 8, 1, "GPipe", "none"),
            (4, 4, 3, "ZB-H1", "selective"),
        )
    ]
    together = steps(SMALL, Columns.of(kinds), dgx_a100(4), Program()).step_s
    assert together == pytest.approx([predict(SMALL, layout, dgx_a100(4)).step_s for layout in kinds], rel=1e-12)


class TestCompute:
    def test_one_device_multiplies_all_matrices(self):
        """Without parallelism, matrix seconds are each product's operations at that product's efficiency."""
        layout = vk.Layout(microbatch=4, num_microbatches=3, recompute="full")
        found = predict(GPT_7B, layout, dgx_a100().of(1), program=dataclasses.replace(BARE, fused_attention=False))
        s, b, h, heads, width = 2048, 4, 4096, 32, 128

        def seconds(m: int, k: int, n: int) -> float:
            return 2 * m * k * n / (312e12 * A100.matrix_efficiency(m, n, k))

        attention = b * heads * (seconds(s, width, s) + seconds(s, s, width))
        layer = seconds(b * s, h, 3 * h) + seconds(b * s, h, h) + seconds(b * s, h, 4 * h) + seconds(b * s, 4 * h, h)
        expected = 3 * (32 * 4 * (layer + attention) + 3 * seconds(b * s, h, 51200))
        assert found.matrix_s == pytest.approx(expected, rel=1e-12)
        slowest, fastest = (A100.matrix_efficiency(*shape) for shape in ((s, s, width), (b * s, 4 * h, h)))
        assert slowest < GPT_7B.flops(12, "full") / found.matrix_s / 312e12 < fastest

    def test_what_moves_bytes(self):
        """Norms, dropout, additions, softmax: bytes by hand, at 0.8 of 2.039 TB/s, forward and backward."""
        layout = vk.Layout(recompute="none")
        found = predict(GPT_7B, layout, dgx_a100().of(1), program=dataclasses.replace(BARE, fused_attention=False))
        tokens, h, s, heads = 2048, 4096, 2048, 32
        layer = tokens * h * (2 * (5 * 2 + 1) + 2 * (8 * 2 + 1)) + tokens * 4 * h * 2 * (2 + 3)
        scores = heads * s * s * (4 * 2 + 1 + 5 * 2 + 1)
        logits = tokens * 51200 * (2 + 20 + 2 + 4)
        assert found.elementwise_s == pytest.approx((32 * (layer + scores) + logits) / (0.8 * 2.039e12), rel=1e-12)

    def test_sequence_parallelism_splits_the_norms(self):
        """22 h + 34 h bytes a token in a layer are divided by tp; the rest was so before."""
        plain, split = (
            predict(GPT_7B, vk.Layout(tp=8, sequence_parallel=shared), dgx_a100(), program=BARE)
            for shared in (False, True)
        )
        saved = 32 * 2048 * 4096 * (22 + 34) * 7 / 8 / (0.8 * 2.039e12)
        assert plain.elementwise_s - split.elementwise_s == pytest.approx(saved, rel=1e-9)

    def test_fused_attention_writes_no_scores_and_makes_half_of_them(self):
        """Its matrix products are those of the earlier tokens, and one more in the backward."""
        layout = vk.Layout(recompute="selective")
        fused, apart = (
            predict(GPT_7B, layout, dgx_a100().of(1), program=dataclasses.replace(BARE, fused_attention=way))
            for way in (True, False)
        )
        attention_s = 32 * 32 * (A100.matrix_s(2048, 2048, 128) + A100.matrix_s(2048, 128, 2048))
        assert apart.matrix_s - fused.matrix_s == pytest.approx((4 - 0.5 * 3 - 0.5 * 0.5) * attention_s, rel=1e-9)
        scores_of_one_layer = 5 * 32 * 2048 * 2048  # which recomputation works on, and fused kernels never write
        assert apart.memory_bytes - fused.memory_bytes == scores_of_one_layer

    def test_the_optimizer_reads_and_writes_its_states(self):
        """2 · 12 + 2 + 2 bytes a parameter, of a rank's share where ZeRO shards them."""
        whole, shared = (predict(GPT_7B, vk.Layout(dp=8, zero_stage=zero), dgx_a100(), program=BARE) for zero in (0, 1))
        assert whole.optimizer_s == pytest.approx(GPT_7B.num_params() * 28 / (0.8 * 2.039e12), rel=1e-12)
        assert shared.optimizer_s == pytest.approx(whole.optimizer_s / 8, rel=1e-12)


class TestCommunication:
    @pytest.mark.parametrize("tp", [2, 4, 8])
    def test_tensor_parallelism(self, tp):
        """4 all-reduces of bsh a layer, 2 for embedding and logits, 3 of the loss, at NVLink's speed, all exposed."""
        found = predict(GPT_7B, vk.Layout(tp=tp, microbatch=2), dgx_a100().of(tp), program=BARE)
        link = dgx_a100().inside

        def all_reduce(payload: float) -> float:
            ways = ("ring", "halving_doubling")
            return min(collectives.time_s("all_reduce", way, tp, payload, link) for way in ways)

        size = 2 * 2048 * 4096 * 2
        expected = (4 * 32 + 2) * all_reduce(size) + 3 * all_reduce(2 * 2048 * 4)
        assert found.exposed_s["tp"] == pytest.approx(expected, rel=1e-12)
        assert expected == pytest.approx(130 * 2 * (tp - 1) / tp * size / 230e9, rel=0.1)  # without latencies

    @pytest.mark.parametrize("zero, volume_of_p", [(0, 2), (1, 2), (2, 2), (3, 3)])
    def test_replicas_move_two_or_three_times_the_parameters(self, zero, volume_of_p):
        """ZeRO, section 7: 2P elements, 3P with ZeRO-3; over 4 nodes through all 8 cards of each."""
        layout = vk.Layout(dp=32, zero_stage=zero)
        found = predict(SMALL, layout, fast_start(dgx_a100(4)), program=BARE)
        num_bytes = volume_of_p * SMALL.num_params() * 2 * 31 / 32
        assert found.exposed_s["dp"] == pytest.approx(num_bytes / (8 * 12.6e9), rel=1e-9)
        moved = sum(collectives.bus_factor(m.kind, 32) * m.total_bytes for m in volume.movements(SMALL, layout))
        assert moved == pytest.approx(num_bytes, rel=1e-12)

    def test_gradients_hide_behind_the_last_backward_but_for_one_layer(self):
        """So much is exposed as the backward of all other layers is too short for, and a layer's share at least."""
        layout, slow = vk.Layout(dp=16, num_microbatches=4), dgx_a100(2)
        shown = predict(GPT_7B, layout, slow, program=BARE).exposed_s["dp"]
        hidden = predict(GPT_7B, layout, slow, program=dataclasses.replace(BARE, overlap_gradients=True))
        backward_s = backward_of_one_microbatch(layout, slow)
        assert hidden.exposed_s["dp"] == pytest.approx(max(shown / 32, shown - backward_s * 31 / 32), rel=1e-9)
        long = dataclasses.replace(layout, microbatch=16)
        assert predict(GPT_7B, long, slow).exposed_s["dp"] == pytest.approx(shown / 32, rel=1e-9)

    def test_zero_3_gathers_for_each_microbatch(self):
        """m times as many microbatches expose m times as much; ZeRO-1 gathers once."""
        times = {
            (zero, m): predict(
                SMALL, vk.Layout(dp=16, zero_stage=zero, num_microbatches=m), dgx_a100(2), program=BARE
            ).exposed_s["dp"]
            for zero in (1, 3)
            for m in (1, 6)
        }
        assert times[3, 6] == pytest.approx(6 * times[3, 1], rel=1e-9)
        assert times[1, 6] == pytest.approx(times[1, 1], rel=1e-9)

    def test_hops_with_scatter_and_gather(self):
        """bsh/t through each rank's card, and an all-gather of bsh inside the node (SC'21, section 4.1)."""
        layout = vk.Layout(tp=8, pp=2, num_microbatches=4, schedule="GPipe")
        program = dataclasses.replace(BARE, asynchronous_sends=True)
        together, apart = (
            predict(GPT_7B, layout, dgx_a100(2), program=dataclasses.replace(program, scatter_gather=way))
            for way in (True, False)
        )
        size = 2048 * 4096 * 2
        gather = collectives.time_s("all_gather", "ring", 8, size, dgx_a100().inside)
        saved = 2 * (size * 7 / 8 / 12.6e9 - gather)  # GPipe has one hop forward and one backward in its way
        assert apart.exposed_s["pp"] - together.exposed_s["pp"] == pytest.approx(saved, rel=1e-9)

    def test_a_ring_of_keys_hides_behind_attention(self):
        """On NVLink it does; on a link a thousand times slower it shows what attention is too short for."""
        model = dataclasses.replace(GPT_7B, seq=32768)
        layout = vk.Layout(cp=8, recompute="selective")
        assert predict(model, layout, dgx_a100(), program=BARE).exposed_s["cp"] == 0
        slow = dataclasses.replace(dgx_a100(), inside=vk.Link(0, 230e6))
        found = predict(model, layout, slow, program=BARE)
        hops = 32 * 2 * (2 * 7 + 8)
        attention = 3 * 32 * 0.5 * 32 * 8 * (A100.matrix_s(4096, 4096, 128) + A100.matrix_s(4096, 128, 4096))
        assert found.exposed_s["cp"] == pytest.approx(hops * 4096 * 4096 * 2 / 230e6 - attention, rel=1e-9)

    def test_tokens_travel_to_experts(self):
        """4 all-to-alls of top_k · bsh a layer; over two nodes 8 of 15 parts leave through the rank's own card."""
        model = dataclasses.replace(MIXTURE, experts=vk.Experts(count=16, top_k=2))
        found = predict(model, vk.Layout(dp=16, ep=16), fast_start(dgx_a100(2)), program=BARE)
        payload = 256 * 512 * 2 * 2
        assert found.exposed_s["ep"] == pytest.approx(4 * 8 * payload * 8 / 16 / 12.6e9, rel=1e-9)


class TestSplit:
    def test_the_parts_are_the_whole(self):
        """compute + exposed + bubble + optimizer = step."""
        found = predict(GPT_7B, vk.Layout(dp=2, tp=4, pp=4, num_microbatches=8), dgx_a100(4))
        assert found.step_s == pytest.approx(sum(term(found, name) for name in TERMS), rel=1e-12)
        assert found.bubble_share == found.bubble_s / found.step_s

    def test_utilisation(self):
        """MFU leaves recomputation out, achieved TFLOP/s count it; both from the step's seconds."""
        layout = vk.Layout(dp=8, microbatch=4, num_microbatches=2, recompute="full")
        found = predict(GPT_7B, layout, dgx_a100())
        assert found.model_flops_utilisation == pytest.approx(GPT_7B.flops(64) / found.step_s / 8 / 312e12, rel=1e-12)
        assert found.achieved_flops_per_s == pytest.approx(GPT_7B.flops(64, "full") / found.step_s / 8, rel=1e-12)
        assert found.tokens_per_s == pytest.approx(64 * 2048 / found.step_s, rel=1e-12)

    def test_what_it_says(self):
        """Seconds, shares, memory, and the clock."""
        said = str(predict(GPT_7B, vk.Layout(tp=8, recompute="full"), dgx_a100()))
        assert "ms a step (ideal), " in said
        assert "exposed tp" in said
        assert "bubble" not in said
        assert "GB of 77.3 GB a device" in said


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            (GPT_7B, vk.Layout(dp=4), dgx_a100()),
            "layout=4: are its ranks, and the cluster has 8 devices; use cluster.of(layout.world_size), or another dp",
        ),
        ((GPT_7B, vk.Layout(tp=8), 8), "cluster=8: must be a Cluster; use vk.hardware.dgx_a100()"),
        ((GPT_7B, "tp=8", dgx_a100()), "layout='tp=8': must be a Layout; use vk.Layout(dp=8)"),
        (
            (GPT_7B, vk.Layout(pp=8, num_microbatches=16, schedule="DualPipeV"), dgx_a100()),
            "layout.schedule='DualPipeV': has no formula for its time here; use one of GPipe, 1F1B, Interleaved1F1B, "
            "ZB-H1",
        ),
        ((SMALL, vk.Layout(tp=3), dgx_a100().of(3)), "tp=3: does not divide heads=16; use tp=2 or tp=4"),
    ],
)
def test_what_it_refuses(arguments, message):
    """Each with the rule and what to write instead."""
    with pytest.raises(InvalidInputError) as error:
        predict(*arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "switches, message",
    [
        ({"send_share": 0}, "send_share=0: is a share, over 0 and at most 1; use send_share=1"),
        ({"reserved_share": 1}, "reserved_share=1: is a share, at least 0 and under 1; use reserved_share=0.1"),
        ({"calls_per_layer": 0}, "calls_per_layer=0: must be a whole number, at least 1; use calls_per_layer=1"),
        ({"overlap_tensor": "yes"}, "overlap_tensor='yes': must be True or False; use overlap_tensor=True"),
    ],
)
def test_a_program_that_cannot_be(switches, message):
    """The same shape of message."""
    with pytest.raises(InvalidInputError) as error:
        Program(**switches)
    assert str(error.value) == message


def fast_start(cluster: Cluster) -> Cluster:
    """The same without latencies."""
    inside, between = (dataclasses.replace(link, latency_s=0.0) for link in (cluster.inside, cluster.between))
    return dataclasses.replace(cluster, inside=inside, between=between)


def backward_of_one_microbatch(layout: vk.Layout, cluster: Cluster) -> float:
    """Seconds by the difference that recomputation, one forward more, makes to a microbatch, and by its whole."""
    from vizkit.planner.stages import stage_times

    (stage,) = stage_times(GPT_7B, layout, cluster, BARE)
    found = predict(GPT_7B, layout, cluster, program=BARE)
    assert (stage.passes.forward + stage.passes.backward) * layout.num_microbatches == pytest.approx(found.compute_s)
    return float(np.asarray(stage.passes.backward))
