"""Bubbles and hops by formula, against the simulator that goes through every action."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vizkit as vk
from vizkit.errors import InvalidInputError
from vizkit.hardware import dgx_a100
from vizkit.hardware.presets import A100
from vizkit.planner import Program, predict, timeline
from vizkit.planner.pipelines import PIPELINE_COSTS, hidden, pipeline_hops

FORWARD_S = INPUTS_S = WEIGHTS_S = 1.0
STAGE_S = FORWARD_S + INPUTS_S + WEIGHTS_S
GPT = vk.Transformer(num_layers=32, hidden=4096, heads=32, vocab=51200, seq=2048)


def simulated_s(name: str, p: int, m: int, v: int, hop_s: float = 0.0, waits: bool = False) -> float:
    schedule = vk.schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)
    split = {"I": INPUTS_S / v, "W": WEIGHTS_S / v} if name == "ZB-H1" else {"B": (INPUTS_S + WEIGHTS_S) / v}
    link = vk.Link(hop_s, math.inf) if hop_s else None
    return vk.simulate(schedule, {"F": FORWARD_S / v, **split}, link, blocking_sends=waits).end_ns.max() / 1e9


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int]:
    name = draw(st.sampled_from(sorted(PIPELINE_COSTS)))
    p = draw(st.integers(2, 8))
    return name, p, p * draw(st.integers(2, 4)), draw(st.integers(2, 4)) if name == "Interleaved1F1B" else 1


@given(pipelines())
@settings(max_examples=30, deadline=None)
def test_the_bubble_is_what_the_simulator_leaves_idle(pipeline):
    """(p−1)(F+B), over v where interleaved, (p−1)(F+I−W) for ZB-H1, beyond m(F+B)."""
    name, p, m, v = pipeline
    idle, weights = (p - 1) * STAGE_S, (p - 1) * WEIGHTS_S
    bubble = float(PIPELINE_COSTS[name].bubble(idle, weights, v))
    assert m * (STAGE_S) + bubble == pytest.approx(simulated_s(name, p, m, v), rel=1e-8)


@given(pipelines(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_hops_are_what_the_simulator_adds(pipeline, waits):
    """For p | m, asynchronous sends and stages that wait, messages of a hundredth of a stage."""
    name, p, m, v = pipeline
    hop_s = 0.01 / v
    formula = float(pipeline_hops(name, p, m, v, hop_s, STAGE_S, asynchronous=not waits))
    added = simulated_s(name, p, m, v, hop_s, waits) - simulated_s(name, p, m, v)
    assert formula == pytest.approx(added, rel=1e-6)


@pytest.mark.parametrize("p, m, v", [(4, 16, 2), (2, 12, 4), (8, 16, 1)])
def test_an_edge_too_slow_for_its_messages_sets_the_pace(p, m, v):
    """v messages a microbatch each way that take longer than a stage computes: m v hops less m stages, at least."""
    name, hop_s = ("Interleaved1F1B", 4.0) if v > 1 else ("1F1B", 40.0)
    formula = float(pipeline_hops(name, p, m, v, hop_s, STAGE_S, asynchronous=True))
    assert formula >= m * (v * hop_s - (STAGE_S))


@given(st.floats(0, 10), st.floats(0, 10), st.integers(1, 100))
def test_what_hides(communication, behind, layers):
    """Never less than one layer's share, never more than all, and all that does not fit behind."""
    shown = float(hidden(communication, behind, layers))
    assert communication / layers <= shown * (1 + 1e-12) + 1e-12
    assert shown <= communication + 1e-12
    assert shown >= communication - behind - 1e-12
    assert float(hidden(communication, 0.0, layers)) == pytest.approx(communication)


@pytest.mark.parametrize("schedule, v", [("1F1B", 1), ("GPipe", 1), ("ZB-H1", 1), ("Interleaved1F1B", 2)])
@pytest.mark.parametrize("waits", [False, True])
def test_the_timeline_takes_as_long_as_predicted(schedule, v, waits):
    """Stages of real sizes, the last with the logits: formulas against the simulated trace, within 3 %."""
    layout = vk.Layout(tp=2, pp=4, num_microbatches=16, schedule=schedule, stages_per_rank=v, recompute="full")
    program = Program(asynchronous_sends=not waits)
    found = predict(GPT, layout, dgx_a100(), program=program)
    copies_s = predict(
        dataclasses.replace(GPT, tied_embeddings=True), dataclasses.replace(layout, num_microbatches=16), dgx_a100(),
        program=program,
    ).exposed_s["pp"] - predict(
        dataclasses.replace(GPT, tied_embeddings=False), layout, dgx_a100(), program=program
    ).exposed_s["pp"]  # fmt: skip
    trace = timeline(GPT, layout, dgx_a100(), program=program)
    in_trace = found.step_s - found.optimizer_s - copies_s
    assert trace.end_ns.max() / 1e9 == pytest.approx(in_trace, rel=0.03)


def test_a_timeline_of_fewer_microbatches():
    """A multiple of pp is shown, and the clock is ideal."""
    layout = vk.Layout(pp=4, dp=2, num_microbatches=64)
    trace = timeline(GPT, layout, dgx_a100(), most_microbatches=10)
    assert sorted(set(trace.microbatch.tolist()) - {-1}) == list(range(8))
    assert trace.clock is vk.Clock.IDEAL
    with pytest.raises(InvalidInputError, match=r"^most_microbatches=0: must be a whole number, at least 1; use"):
        timeline(GPT, layout, dgx_a100(), most_microbatches=0)


class TestSensitivity:
    """What changes when one thing changes, by formulas that know nothing of the planner."""

    LAYOUT = vk.Layout(dp=8, tp=8, pp=4, num_microbatches=32, recompute="full")
    PROGRAM = Program(overlap_gradients=False, overlap_tensor=False, asynchronous_sends=False)

    def predicted(self, cluster=None, **sizes):
        layout = dataclasses.replace(self.LAYOUT, **sizes)
        return predict(GPT, layout, cluster or dgx_a100(32), program=self.PROGRAM)

    def test_twice_the_bandwidth_inside_nodes(self):
        """Tensor-parallel seconds halve but for latencies; gradients between nodes stay."""
        links = vk.Link(0, 230e9), vk.Link(0, 460e9)
        slow, fast = (self.predicted(dataclasses.replace(dgx_a100(32), inside=link)) for link in links)
        assert fast.exposed_s["tp"] == pytest.approx(slow.exposed_s["tp"] / 2, rel=1e-12)
        assert fast.exposed_s["dp"] == slow.exposed_s["dp"]
        assert fast.matrix_s == slow.matrix_s
        wire = 8 * 2048 * 4096 * 2 * (1 + 0.5) * 7 / 8 / 8  # 8bsh(t−1)/t elements, half as many again: recomputation
        per_layer = wire * 8 / 230e9
        assert slow.exposed_s["tp"] == pytest.approx(32 * 8 * per_layer * 32 / 32, rel=0.03)

    def test_half_the_bandwidth_between_nodes(self):
        """Gradients of replicas, one a node, take twice as long; tensor parallelism does not notice."""
        links = vk.Link(0, 12.6e9), vk.Link(0, 6.3e9)
        fast, slow = (self.predicted(dataclasses.replace(dgx_a100(32), between=link)) for link in links)
        assert slow.exposed_s["dp"] == pytest.approx(2 * fast.exposed_s["dp"], rel=1e-12)
        assert slow.exposed_s["tp"] == fast.exposed_s["tp"]
        held = GPT.num_params() / 32  # tied embeddings and norms apart
        assert fast.exposed_s["dp"] == pytest.approx(2 * 7 / 8 * held * 2 / 12.6e9, rel=0.15)

    @pytest.mark.parametrize("m", [8, 16, 64, 128])
    def test_the_bubble_over_microbatches(self, m):
        """(p−1)/m of the ideal time, where stages are alike: with so few tokens that logits are nothing."""
        layout = dataclasses.replace(self.LAYOUT, num_microbatches=m)
        found = predict(dataclasses.replace(GPT, vocab=64), layout, dgx_a100(32), program=self.PROGRAM)
        ideal = found.compute_s + found.exposed_s["tp"]
        assert found.bubble_s / ideal == pytest.approx(3 / m, rel=0.02)

    def test_logits_make_the_last_stage_the_slowest(self):
        """All wait for them: m microbatches' logits more, by hand, and a bubble that does not grow."""
        layout = self.LAYOUT
        few, many = (
            predict(dataclasses.replace(GPT, vocab=v), layout, dgx_a100(32), program=self.PROGRAM)
            for v in (51200, 102400)
        )
        products = 3 * (A100.matrix_s(2048, 102400 // 8, 4096) - A100.matrix_s(2048, 51200 // 8, 4096))
        assert many.matrix_s - few.matrix_s == pytest.approx(32 * products, rel=1e-9)
        assert many.bubble_s == pytest.approx(few.bubble_s, rel=1e-12)

    @pytest.mark.parametrize("v", [2, 4, 8])
    def test_interleaving_divides_the_bubble(self, v):
        """By v, and multiplies the messages, (2v−1)m + 2p−3 in place of 2m + 2p−5 (SC'21, section 2.2)."""
        once, often = self.predicted(), self.predicted(schedule="Interleaved1F1B", stages_per_rank=v)
        assert often.bubble_s == pytest.approx(once.bubble_s / v, rel=1e-12)
        plain = predict(
            dataclasses.replace(GPT, tied_embeddings=False), self.LAYOUT, dgx_a100(32), program=self.PROGRAM
        )
        hop_s = plain.exposed_s["pp"] / (2 * 32 + 2 * 4 - 5)
        more = (2 * v - 1) * 32 + 2 * 4 - 3 - (2 * 32 + 2 * 4 - 5)
        assert often.exposed_s["pp"] - once.exposed_s["pp"] == pytest.approx(more * hop_s, rel=1e-9)
        assert hop_s == pytest.approx(2048 * 4096 * 2 / 8 / 12.6e9 + 10e-6 + 7 * (3e-6 + 2048 * 4096 * 2 / 8 / 230e9))

    def test_tensor_parallelism_over_the_edge_of_a_node(self):
        """tp=16 speaks through the cards of two nodes: 8 of 12.6 GB/s in place of NVLink's 230, and 15/16 for 7/8."""
        links = {"inside": vk.Link(0, 230e9), "between": vk.Link(0, 12.6e9)}
        cluster = dataclasses.replace(dgx_a100(32), **links)
        inside, across = (self.predicted(cluster, tp=tp, dp=64 // tp).exposed_s["tp"] for tp in (8, 16))
        assert across / inside == pytest.approx((15 / 16) / (7 / 8) * 230 / (8 * 12.6), rel=1e-9)

    @pytest.mark.parametrize("tp", [1, 2, 4])
    def test_narrower_products_are_slower(self, tp):
        """Twice the tp halves the operations of a rank, and takes more than half the time, as the roofline says."""
        wide, narrow = (self.predicted(tp=way, dp=64 // way, microbatch=1) for way in (tp, 2 * tp))
        ratio = narrow.matrix_s / wide.matrix_s * 2 * (64 // (2 * tp)) / (64 // tp)
        per_device = (narrow.matrix_s / narrow.layout.num_microbatches) / (wide.matrix_s / wide.layout.num_microbatches)
        assert 0.5 < per_device < 0.62
        assert ratio == pytest.approx(per_device, rel=1e-9)

    @pytest.mark.parametrize("b", [2, 4, 8])
    def test_larger_microbatches(self, b):
        """Fewer, larger: matrix products gain, the bubble grows b-fold but for that gain, bytes stay."""
        small = self.predicted(num_microbatches=64)
        large = self.predicted(microbatch=b, num_microbatches=64 // b)
        assert large.matrix_s < small.matrix_s
        assert large.elementwise_s == pytest.approx(small.elementwise_s, rel=1e-9)
        gain = (large.compute_s + large.exposed_s["tp"]) / (small.compute_s + small.exposed_s["tp"])
        assert large.bubble_s / small.bubble_s == pytest.approx(b * gain, rel=0.02)
        assert large.exposed_s["dp"] == small.exposed_s["dp"]
