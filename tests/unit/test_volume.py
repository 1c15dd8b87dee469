"""What a step moves, against the volumes that papers publish, and between formulas that have to agree."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import vizkit as vk
from tests.unit.test_memory_mixture import PIPELINES, models, powers
from vizkit.collectives import algorithm_bandwidth, bus_bandwidth, bus_factor, time_s
from vizkit.memory import PRECISIONS, per_rank, pipeline
from vizkit.memory.shards import shards
from vizkit.volume import Movement, movements

GPT = vk.Transformer(num_layers=8, hidden=64, heads=8, vocab=96, seq=32)
UNTIED = vk.Transformer(num_layers=8, hidden=64, heads=8, vocab=96, seq=32, tied_embeddings=False)
SBH = 32 * 64
B = 2
"""Bytes of a number in mixed precision."""


def along(axis: str, found: tuple[Movement, ...]) -> dict[str, float]:
    """Bytes by kind along one axis."""
    total: dict[str, float] = defaultdict(float)
    for movement in found:
        if movement.axis == axis:
            total[movement.kind.value] += movement.total_bytes
    return dict(total)


def wire_elements(axis: str, ranks: int, found: tuple[Movement, ...]) -> float:
    """Elements that each rank sends along an axis, by the ring."""
    return sum(size * bus_factor(kind, ranks) / B for kind, size in along(axis, found).items())


class TestData:
    """Rajbhandari et al., 2020, section 7: 2P elements a step, with ZeRO-3 3P."""

    @pytest.mark.parametrize("stage, elements", [(0, 2), (1, 2), (2, 2), (3, 3)])
    @pytest.mark.parametrize("dp", [2, 3, 64])
    def test_zero(self, stage, elements, dp):
        """On the wire of a ring, (n−1)/n of them."""
        found = movements(GPT, vk.Layout(dp=dp, zero_stage=stage))
        assert wire_elements("dp", dp, found) == pytest.approx(elements * GPT.num_params() * (dp - 1) / dp)

    @pytest.mark.parametrize("stage, expected", [
        (0, {"all_reduce": 1}), (1, {"reduce_scatter": 1, "all_gather": 1}),
        (2, {"reduce_scatter": 4, "all_gather": 1}), (3, {"reduce_scatter": 4, "all_gather": 8}),
    ])  # fmt: skip
    def test_what_is_sharded_moves_for_each_microbatch(self, stage, expected):
        """Payloads in units of all parameters, for 4 microbatches."""
        found = along("dp", movements(GPT, vk.Layout(dp=2, zero_stage=stage, num_microbatches=4)))
        assert found == {kind: times * B * GPT.num_params() for kind, times in expected.items()}

    def test_gradients_that_wait_whole(self):
        """FSDP2 without gradient synchronisation until the last microbatch: one reduce-scatter."""
        layout = vk.Layout(dp=2, zero_stage=3, num_microbatches=4)
        found = along("dp", movements(GPT, layout, reduce_each_microbatch=False))
        assert found == {"all_gather": 8 * B * GPT.num_params(), "reduce_scatter": B * GPT.num_params()}

    @pytest.mark.parametrize("name", PRECISIONS)
    def test_each_in_its_own_format(self, name):
        """Gradients and parameters as wide as the precision says."""
        if not PRECISIONS[name].gradient_bytes:
            pytest.skip("has no gradients")
        found = along("dp", movements(GPT, vk.Layout(dp=2, zero_stage=1, precision=name)))
        assert found == {"reduce_scatter": PRECISIONS[name].gradient_bytes * GPT.num_params(),
                         "all_gather": PRECISIONS[name].parameter_bytes * GPT.num_params()}  # fmt: skip

    def test_context_parallel_ranks_are_replicas(self):
        """Gradients are added over both axes; an axis of size 1 is not named."""
        for sizes, axis in (({"dp": 2, "cp": 2}, "dp×cp"), ({"cp": 2}, "cp"), ({"dp": 2}, "dp")):
            found = movements(GPT, vk.Layout(**sizes))
            assert along(axis, found)["all_reduce"] == B * GPT.num_params()

    @settings(max_examples=40)
    @given(models, powers, powers, st.sampled_from(PIPELINES), st.sampled_from(range(4)), powers)
    def test_a_rank_moves_the_parameters_that_it_holds(self, model, tp, pp, schedule, zero_stage, ep):
        """Whatever the mixture: 2P or 3P of `vk.memory.per_rank`'s own number of parameters."""
        assume(model.experts or ep == 1)
        layout = vk.Layout(dp=4, tp=tp, pp=pp, ep=ep, zero_stage=zero_stage, schedule=schedule, num_microbatches=8)
        for stage in range(pp):
            found = movements(model, layout, stage, reduce_each_microbatch=False)
            moved = sum(
                movement.payload_bytes * (2 if movement.kind == "all_reduce" else 1)
                for movement in found
                if "dp" in movement.axis or (movement.axis == "ep" and movement.kind != "all_to_all")
            )
            own = shards(model, tp, ep).experts * model.num_layers // layout.num_stages * layout.local_stages
            held = per_rank(model, layout, stage).num_params - own * (layout.expert_replicas == 1)
            assert moved == pytest.approx(2 * B * held)


class TestTensor:
    """Narayanan et al., SC'21: 8bsh(t−1)/t elements a layer and microbatch."""

    @settings(max_examples=40)
    @given(powers, powers, st.integers(1, 6), st.booleans())
    def test_a_layer(self, tp, batch, num_microbatches, sequence_parallel):
        """The same on the wire with sequence parallelism: a layer more moves as much more."""
        layout = vk.Layout(
            tp=tp, microbatch=batch, num_microbatches=num_microbatches, sequence_parallel=sequence_parallel
        )
        more = vk.Transformer(num_layers=9, hidden=64, heads=8, vocab=96, seq=32)
        one, other = (wire_elements("tp", tp, movements(model, layout)) for model in (GPT, more))
        norms = 2 * (tp - 1) / tp * shards(GPT, tp, 1).replicated * sequence_parallel
        assert other - one - norms == pytest.approx(8 * batch * SBH * (tp - 1) / tp * num_microbatches)

    def test_calls(self):
        """4 all-reduces of bsh a layer, 2 around the vocabulary and 3 of the loss in fp32."""
        found = along("tp", movements(GPT, vk.Layout(tp=2)))
        assert found == {"all_reduce": (4 * 8 + 2) * SBH * B + 3 * 32 * 4}

    def test_sequence_parallel_calls(self):
        """Halves of them, and once a step the gradients of whole parameters; 3 more gathers where inputs are cut."""
        layout = vk.Layout(tp=2, sequence_parallel=True)
        found, again = (along("tp", movements(GPT, layout, regather=regather)) for regather in (False, True))
        whole = 8 * 6 * 64 + 32 * 64  # norms and biases after rows; positions
        assert found == {"all_gather": (4 * 8 + 2) * SBH * B, "reduce_scatter": (4 * 8 + 2) * SBH * B,
                         "all_reduce": whole * B + 3 * 32 * 4}  # fmt: skip
        assert again == {**found, "all_gather": found["all_gather"] + (2 * 8 + 1) * SBH * B}

    def test_full_recomputation_makes_the_forward_twice(self):
        """6 all-reduces a layer instead of 4; selective recomputation repeats none."""
        full, selective, none = (
            along("tp", movements(GPT, vk.Layout(tp=2, recompute=way)))["all_reduce"]
            for way in ("full", "selective", "none")
        )
        assert full - none == 2 * 8 * SBH * B
        assert selective == none


class TestPipeline:
    """Narayanan et al., SC'21: bsh a hop and microbatch; v times as many hops where interleaved."""

    @pytest.mark.parametrize("schedule, hops", [("1F1B", 2), ("GPipe", 2), ("Interleaved1F1B", 6), ("ZBV", 4)])
    def test_a_rank_in_between(self, schedule, hops):
        """Forwards and backwards of 12 microbatches."""
        local = 3 if schedule == "Interleaved1F1B" else None
        model = vk.Transformer(num_layers=24, hidden=64, heads=8, vocab=96, seq=32)
        layout = vk.Layout(pp=4, num_microbatches=12, schedule=schedule, stages_per_rank=local, microbatch=5)
        found = along("pp", movements(model, layout, 1))
        assert found == {"send": hops * 12 * 5 * SBH * B, "receive": hops * 12 * 5 * SBH * B}
        assert along("pp", movements(model, layout))["send"] == found["send"]

    def test_sequence_parallelism_cuts_the_messages(self):
        """bsh/t a hop."""
        whole, cut = (vk.Layout(pp=2, tp=4, sequence_parallel=way) for way in (False, True))
        assert along("pp", movements(UNTIED, whole))["send"] == 4 * along("pp", movements(UNTIED, cut))["send"]

    def test_tied_embeddings_add_their_gradients(self):
        """An all-reduce of Vh between the two ends; none in a V, whose ends are on one rank, nor where not tied."""
        sizes = {"pp": 4, "num_microbatches": 8}
        for stage, expected in ((0, 96 * 64 * B), (1, 0), (3, 96 * 64 * B)):
            assert along("pp", movements(GPT, vk.Layout(**sizes), stage)).get("all_reduce", 0) == expected
        assert "all_reduce" not in along("pp", movements(GPT, vk.Layout(**sizes, schedule="ZBV")))
        assert "all_reduce" not in along("pp", movements(UNTIED, vk.Layout(**sizes)))

    def test_dualpipes_copies_add_their_gradients(self):
        """Each rank all that it holds; its two pipelines share the microbatches."""
        layout = vk.Layout(pp=4, tp=2, num_microbatches=8, schedule="DualPipe")
        for stage in range(4):
            found = movements(GPT, layout, stage)
            assert along("pp", found)["all_reduce"] == B * per_rank(GPT, layout, stage).num_params
            layers = [m for m in found if "block" in m.why]
            assert sum(m.times for m in layers) == 4 * (8 // 4 * 2) * (8 // 2)

    @settings(max_examples=30)
    @given(st.sampled_from(PIPELINES), powers, st.sampled_from([4, 8]))
    def test_what_is_sent_arrives(self, schedule, pp, num_microbatches):
        """All ranks' sends together are all ranks' receives, and one microbatch's hops times their number."""
        layout = vk.Layout(pp=pp, schedule=schedule, num_microbatches=num_microbatches)
        found = [along("pp", movements(UNTIED, layout, stage)) for stage in range(pp)]
        sent, received = (sum(each.get(kind, 0) for each in found) for kind in ("send", "receive"))
        ranks = pipeline(layout.schedule, pp, num_microbatches, layout.local_stages).ranks
        assert sent == received == sum(rank.hops for rank in ranks) * SBH * B


class TestContext:
    """Attention over a sequence that several ranks share."""

    @pytest.mark.parametrize("cp", [2, 4, 8])
    def test_ulysses_against_megatrons_sequence_parallelism(self, cp):
        """Jacobs et al., 2023: 4Nh/P elements a layer in the forward, against 4Nh; the backward as much again."""
        ulysses = vk.Layout(cp=cp, context_by="ulysses")
        assert along("cp", movements(GPT, ulysses))["all_to_all"] / (8 * 2 * B) == 4 * SBH / cp
        megatron = [m for m in movements(GPT, vk.Layout(tp=cp, sequence_parallel=True)) if "block" in m.why]
        assert sum(m.total_bytes for m in megatron) / (8 * 2 * B) == 4 * SBH

    @pytest.mark.parametrize("cp", [1, 2, 4])
    @pytest.mark.parametrize("kv_heads, width", [(None, 64), (4, 32)])
    def test_ring(self, cp, kv_heads, width):
        """Keys and values c−1 times each way, their gradients c times; grouped heads carry less."""
        model = vk.Transformer(num_layers=8, hidden=64, heads=8, kv_heads=kv_heads, vocab=96, seq=32)
        found = along("cp", movements(model, vk.Layout(cp=cp)))
        one_way = 8 * 2 * (32 // cp) * width * B
        assert found.get("send", 0) == found.get("receive", 0) == one_way * (2 * (cp - 1) + cp) * (cp > 1)

    def test_ranks_of_a_tensor_group_pass_their_own_heads(self):
        ring = [along("cp", movements(GPT, vk.Layout(cp=2, tp=tp)))["send"] for tp in (1, 2, 4)]
        assert ring == [ring[0], ring[0] / 2, ring[0] / 4]


class TestExperts:
    """Lepikhin et al., 2020: two all-to-alls a layer forward, two backward."""

    MODEL = vk.Transformer(num_layers=2, hidden=64, heads=8, vocab=96, seq=32, experts=vk.Experts(count=8, top_k=2))

    @pytest.mark.parametrize("recompute, calls", [("none", 4), ("full", 6)])
    def test_dispatch_and_combine(self, recompute, calls):
        """top_k copies of each token."""
        found = movements(self.MODEL, vk.Layout(dp=4, ep=4, num_microbatches=3, recompute=recompute))
        assert along("ep", found)["all_to_all"] == calls * 2 * 3 * 2 * SBH * B

    @pytest.mark.parametrize("ep, dense_axis", [(1, "dp"), (2, "dp×ep"), (4, "ep")])
    def test_gradients_go_to_those_who_hold_the_same(self, ep, dense_axis):
        """Of experts dp·cp/ep ranks, of all else dp·cp."""
        found = movements(self.MODEL, vk.Layout(dp=4, ep=ep))
        experts = 2 * 8 // ep * self.MODEL.expert_params() * B
        dense = self.MODEL.num_params() * B - experts * ep
        expected = {1: {"dp": dense + experts}, 2: {"dp×ep": dense, "dp": experts}, 4: {"ep": dense}}[ep]
        assert {m.axis: m.total_bytes for m in found if m.kind == "all_reduce"} == expected
        assert dense_axis in expected

    def test_axes_are_the_meshs(self):
        """The ledger finds each one in the mesh that experts see."""
        layout = vk.Layout(dp=4, ep=2, tp=2, pp=2, num_microbatches=2)
        for movement in movements(self.MODEL, layout):
            for axis in movement.axis.split("×"):
                assert layout.expert_mesh.size(axis) > 1


class TestBandwidth:
    """Volume over bandwidth: seconds."""

    def test_idefics_80b(self):
        """3 × 2 bytes × 80 billion parameters of ZeRO-3 at 42.5 GB/s of bus bandwidth: 11 seconds."""
        model = vk.Transformer(num_layers=80, hidden=8192, heads=64, vocab=32000, seq=1024, gated=True,
                               ffn_hidden=29440, bias=False, rms_norm=True, learned_positions=False)  # fmt: skip
        assert model.num_params() == pytest.approx(80e9, rel=0.01)
        link, ranks = vk.Link(latency_s=0, bandwidth_bytes_per_s=42.5e9), 512
        found = movements(model, vk.Layout(dp=ranks, zero_stage=3))
        seconds = sum(time_s(m.kind, "ring", ranks, m.payload_bytes, link) * m.times for m in found)
        assert seconds == pytest.approx(3 * 2 * 80 / 42.5, rel=0.01)
        assert round(seconds) == 11

    @pytest.mark.parametrize("ranks", range(2, 17))
    @pytest.mark.parametrize("kind, factor", [
        ("all_reduce", lambda n: 2 * (n - 1) / n), ("reduce_scatter", lambda n: (n - 1) / n),
        ("all_gather", lambda n: (n - 1) / n), ("all_to_all", lambda n: (n - 1) / n),
        ("broadcast", lambda n: 1), ("reduce", lambda n: 1),
    ])  # fmt: skip
    def test_bus_over_algorithm_bandwidth(self, kind, factor, ranks):
        """The whole table of factors, as the two bandwidths of one measurement."""
        algorithm = algorithm_bandwidth(3e9, seconds=0.5)
        assert algorithm == 6e9
        assert bus_bandwidth(kind, ranks, 3e9, seconds=0.5) / algorithm == pytest.approx(factor(ranks), rel=1e-12)

    @pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
    def test_one_rank_alone_needs_no_bus(self, kind):
        assert bus_bandwidth(kind, 1, 3e9, seconds=0.5) == 0


class TestAll:
    def test_one_rank_moves_nothing(self):
        """No axis of size 1 shows up."""
        assert movements(GPT, vk.Layout(num_microbatches=4, sequence_parallel=True, zero_stage=3)) == ()

    @settings(max_examples=40)
    @given(models, powers, powers, powers, st.sampled_from(PIPELINES), st.booleans())
    def test_the_default_is_the_most_of_each(self, model, dp, tp, pp, schedule, sequence_parallel):
        """Of each axis and kind, what the rank moves that moves most of it."""
        layout = vk.Layout(
            dp=dp, tp=tp, pp=pp, schedule=schedule, num_microbatches=8, sequence_parallel=sequence_parallel
        )
        every = [movements(model, layout, stage) for stage in range(pp)]
        most: dict[tuple[str, str], float] = defaultdict(float)
        for found in every:
            for axis in ("dp", "tp", "pp"):
                for kind, size in along(axis, found).items():
                    most[axis, kind] = max(most[axis, kind], size)
        found = movements(model, layout)
        default = {(axis, kind): size for axis in ("dp", "tp", "pp") for kind, size in along(axis, found).items()}
        assert default == most

    def test_each_says_why(self):
        """Formula and source."""
        layout = vk.Layout(dp=2, tp=2, pp=2, cp=2, num_microbatches=4, sequence_parallel=True, zero_stage=2)
        for movement in movements(GPT, layout):
            assert len(movement.why) > 40

    def test_a_layout_that_does_not_fit(self):
        with pytest.raises(vk.InvalidInputError, match="cp=3: does not divide seq=32; use cp=2 or cp=4"):
            movements(GPT, vk.Layout(cp=3))
