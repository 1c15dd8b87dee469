"""What a plan holds: all layouts there are, in order, with reasons, and what to do where none fits."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vizkit as vk
from vizkit.errors import InvalidInputError
from vizkit.hardware import Cluster, Device, consumer_pc, dgx_a100, dgx_h100, laptop
from vizkit.planner import Plan, Program, plan, predict
from vizkit.planner.choices import COLUMNS
from vizkit.planner.reasons import reason
from vizkit.planner.search import pareto_front
from vizkit.planner.space import Space, divisors
from vizkit.units import bytes_text, seconds_text

GPT_7B = vk.Transformer(num_layers=32, hidden=4096, heads=32, vocab=51200, seq=2048)
GPT_1T = vk.Transformer(num_layers=128, hidden=25600, heads=160, vocab=51200, seq=2048)
GPT_125M = vk.Transformer(num_layers=12, hidden=768, heads=12, vocab=50304, seq=1024)
TINY = vk.Transformer(num_layers=4, hidden=64, heads=4, vocab=100, seq=32)


@pytest.fixture(scope="module")
def seven_billion() -> Plan:
    return plan(GPT_7B, dgx_a100(num_nodes=4), 256)


class TestSpace:
    @pytest.mark.parametrize("experts, num_devices, batch", [(None, 8, 8), (vk.Experts(count=4), 4, 12)])
    def test_every_layout_there_is_once(self, experts, num_devices, batch):
        """Against all combinations of sizes, each asked whether `Layout` and the model have it."""
        model = dataclasses.replace(TINY, experts=experts)
        space = Space(cp=range(1, 9), zero_stages=(0, 3), recompute=("none",), sequence_parallel=(False,))
        found = set()
        for rows in space.chunks(model, num_devices, batch):
            for at in range(len(rows)):
                layout = rows.layout(at)
                layout.check(model)
                assert layout.world_size == num_devices
                assert layout.global_batch == batch
                assert layout not in found
                found.add(layout)
        assert found == set(by_trial(model, num_devices, batch))

    @given(st.integers(1, 10**6))
    def test_divisors(self, number):
        """All, in order, and nothing else."""
        found = divisors(number)
        assert found == sorted(set(found))
        assert all(number % d == 0 for d in found)
        assert found[0] == 1
        assert found[-1] == number
        assert [number // d for d in reversed(found)] == found

    def test_restrictions_hold(self):
        """What is not allowed is not there."""
        found = plan(
            GPT_7B, dgx_a100(4), 256, tp=[4, 8], pp=[2], zero_stages=[1], schedules=["Interleaved1F1B"],
            stages_per_rank=[4], microbatches=[2], recompute=["full"], sequence_parallel=[True],
        ).table  # fmt: skip
        assert set(found.tp) == {4, 8}
        for name, value in (("pp", 2), ("zero_stage", 1), ("stages_per_rank", 4), ("microbatch", 2)):
            assert set(found[name]) == {value}, name
        assert set(found.recompute) == {"full"}
        assert set(found.sequence_parallel) == {True}

    def test_long_sequences_are_shared(self):
        """cp appears where 4,096 tokens are left to each rank."""
        assert max(plan(GPT_7B, dgx_a100(), 8, seq=8192, recompute=["full"]).table.cp) == 2
        assert max(plan(GPT_7B, dgx_a100(), 8, recompute=["full"]).table.cp) == 1


def by_trial(model: vk.Transformer, num_devices: int, batch: int):
    sizes = range(1, num_devices + 1)
    for dp, tp, pp, cp, ep in itertools.product(sizes, sizes, sizes, sizes, sizes):
        if dp * tp * pp * cp != num_devices or batch % dp:
            continue
        for b, name, v, zero in itertools.product(
            divisors(batch // dp), ("1F1B", "Interleaved1F1B", "ZB-H1"), range(1, 5), (0, 3)
        ):
            m = batch // dp // b
            looped = name == "Interleaved1F1B"
            if (pp == 1 and name != "1F1B") or looped != (v > 1) or (looped and m % pp) or (zero and dp * cp == 1):
                continue
            try:
                layout = vk.Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero_stage=zero, microbatch=b,
                                   num_microbatches=m, schedule=name, stages_per_rank=v)  # fmt: skip
                layout.check(model)
            except InvalidInputError:
                continue
            yield layout


class TestPlan:
    def test_it_is_a_sequence_fastest_first(self, seven_billion):
        """Length, index, slice and iteration; one choice for each way to divide the devices."""
        table = seven_billion.table
        assert len(seven_billion) == len(table) == len(table[["dp", "tp", "pp", "cp", "ep"]].drop_duplicates())
        assert table.step_s.is_monotonic_increasing
        assert seven_billion.best.layout == seven_billion[0].layout == seven_billion[-len(table)].layout
        assert [choice.rank for choice in seven_billion[:3]] == [1, 2, 3]
        assert len(list(seven_billion)) == len(seven_billion)
        with pytest.raises(IndexError):
            seven_billion[len(table)]

    def test_each_choice_is_what_predict_says(self, seven_billion):
        """The arrays' table and the choices' own predictions."""
        for choice, row in zip(seven_billion, seven_billion.table.itertuples(), strict=True):
            found = predict(GPT_7B, choice.layout, dgx_a100(4))
            assert row.step_s == pytest.approx(found.step_s, rel=1e-9)
            assert row.memory_GB * 1e9 == pytest.approx(found.memory_bytes, rel=1e-9)
            assert row.mfu == pytest.approx(found.model_flops_utilisation, rel=1e-9)
            assert row.tflops_per_device * 1e12 == pytest.approx(found.achieved_flops_per_s, rel=1e-9)
            assert row.tokens_per_s == pytest.approx(found.tokens_per_s, rel=1e-9)
            assert found.fits

    def test_the_columns(self, seven_billion):
        """Named as documented, and the seconds add up to the step."""
        table = seven_billion.table
        assert tuple(table.columns) == COLUMNS
        parts = [
            name for name in COLUMNS if name.endswith("_s") and name not in ("step_s", "tokens_per_s", "compute_s")
        ]
        assert table[parts].sum(axis=1).to_numpy() == pytest.approx(table.step_s.to_numpy(), rel=1e-9)

    def test_nothing_that_fits_is_faster_than_the_first(self, seven_billion):
        """Of all variants of all meshes, by trying them."""
        space, best, fitting, considered = Space(), math.inf, 0, 0
        from vizkit.planner.steps import steps

        for rows in space.chunks(GPT_7B, 32, 256):
            found = steps(GPT_7B, rows, dgx_a100(4), Program())
            fits = found.memory_bytes <= 80 * 2**30 * 0.9
            best = min(best, found.step_s[fits].min())
            fitting, considered = fitting + int(fits.sum()), considered + len(rows)
        assert (seven_billion.considered, seven_billion.fitting) == (considered, fitting)
        assert seven_billion.best.prediction.step_s == pytest.approx(best, rel=1e-9)

    def test_what_it_says(self, seven_billion):
        """Model, cluster, counts, clock, a short table, and a reason for each of five."""
        lines = str(seven_billion).splitlines()
        assert lines[0].startswith("6.662 billion parameters on 4 nodes × 8 A100-80GB; inside a node 3 µs")
        assert lines[1].startswith("256 sequences of 2,048, 524,288 tokens a step; ")
        assert lines[1].endswith("; times are ideal")
        assert lines[2].split() == ["dp", "tp", "pp", "cp", "ep", "ZeRO", "schedule", "b×m", "recompute", "GB", "step",
                                    "(s)", "MFU", "bubble", "exposed"]  # fmt: skip
        assert [line[:2] for line in lines[8:13]] == ["1.", "2.", "3.", "4.", "5."]
        assert tuple(lines[13:]) == seven_billion.remedies
        assert max(map(len, lines[2:8])) < 120

    def test_one_sequence_is_no_sequences(self):
        """A batch of one."""
        assert "\n1 sequence of 2,048, 2,048 tokens a step; " in str(plan(GPT_7B, dgx_a100(4), 1))

    def test_a_plan_is_a_value_for_the_clock(self, seven_billion):
        """It says "ideal", and is true where it holds something."""
        assert seven_billion
        assert seven_billion.clock is vk.Clock.IDEAL

    @given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30))
    @settings(max_examples=100)
    def test_the_front_by_definition(self, pairs):
        """Those than which none is as small and faster, or smaller and as fast; each pair once."""
        front = pareto_front(FakeFound(np.array(pairs, float)))
        kept = {tuple(row) for row in front.pairs.tolist()}
        dominated = {(m, s) for m, s in pairs if any((a <= m and b < s) or (a < m and b <= s) for a, b in pairs)}
        assert kept == set(pairs) - dominated
        assert front.pairs[:, 0].tolist() == sorted(front.pairs[:, 0].tolist())

    def test_the_front_of_a_plan(self, seven_billion):
        """Its fastest is the plan's best; times fall as memory grows; points are a sample of what fits."""
        front = seven_billion.pareto
        memory = [choice.prediction.memory_bytes for choice in front]
        seconds = [choice.prediction.step_s for choice in front]
        assert memory == sorted(memory)
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[-1] == pytest.approx(seven_billion.best.prediction.step_s, rel=1e-12)
        points = seven_billion.points
        assert 0 < len(points) <= 2000
        assert points.memory_GB.max() <= 77.4
        assert not (
            (points.memory_GB < memory[0] / 1e9 * (1 - 1e-9)) | (points.step_s < seconds[-1] * (1 - 1e-9))
        ).any()


@dataclasses.dataclass(frozen=True)
class FakeFound:
    """Just memory and seconds, where a front needs no layouts."""

    pairs: np.ndarray

    @property
    def steps(self):
        return self

    @property
    def memory_bytes(self):
        return self.pairs[:, 0]

    @property
    def step_s(self):
        return self.pairs[:, 1]

    def where(self, chosen):
        return FakeFound(self.pairs[chosen])


class TestReasons:
    def why(self, first: vk.Layout, second: vk.Layout, cluster: Cluster | None = None) -> str:
        cluster = cluster or dgx_a100(4)
        return reason(*(predict(GPT_7B, layout, cluster) for layout in (first, second)), cluster)

    def test_tensor_parallelism_inside_a_node(self):
        """tp=8 against tp=16: the first stays inside a node, and the seconds that this saves are the predictions'."""
        first, second = (
            vk.Layout(dp=32 // tp, tp=tp, num_microbatches=8 * tp // 8, recompute="full") for tp in (8, 16)
        )
        said = self.why(first, second)
        assert "(tp=8 inside a node against tp=16 between nodes)" in said
        saved = [predict(GPT_7B, layout, dgx_a100(4)).exposed_s["tp"] for layout in (second, first)]
        assert f"{seconds_text(saved[0] - saved[1])} less of exposed tensor-parallel communication" in said

    def test_a_bubble(self):
        """Fewer stages, or more microbatches."""
        sizes = {"dp": 2, "tp": 4, "pp": 4, "recompute": "full"}
        said = self.why(vk.Layout(**sizes, num_microbatches=16, schedule="Interleaved1F1B", stages_per_rank=4),
                        vk.Layout(**sizes, num_microbatches=16))  # fmt: skip
        assert "less of bubble (pp=4, Interleaved1F1B, 16 microbatches, 4 stages a rank against pp=4, 1F1B, 16" in said
        assert "faster than the next (schedule=1F1B, stages_per_rank=1)" in said

    def test_recomputation(self):
        """What is computed again is named."""
        said = self.why(
            vk.Layout(dp=32, microbatch=2, recompute="selective"), vk.Layout(dp=32, microbatch=2, recompute="full")
        )
        assert "recompute=selective, against" in said
        assert "recompute=full)" in said

    def test_what_it_pays(self):
        """Where the first is slower in some part, the reason says so."""
        first = vk.Layout(dp=8, pp=4, num_microbatches=32, recompute="full")
        second = vk.Layout(dp=4, tp=8, num_microbatches=64, recompute="full")
        said = self.why(first, second)
        assert "; it pays " in said
        assert "more of bubble" in said.split("; it pays ")[1]

    def test_equals(self):
        """Layouts that take the same time differ in memory."""
        layout = vk.Layout(dp=32, recompute="full", num_microbatches=4)
        assert self.why(layout, layout).startswith("as fast as the next (the same), with ")

    def test_the_last(self):
        """A plan of one choice says what it spends most on."""
        alone = plan(GPT_125M, laptop(), 8, precision="fp32_adam")
        assert len(alone) == 1
        assert alone.best.reason.startswith("nothing else fits; 9")
        assert alone.best.reason.endswith("% of its step are matrix products")


class TestNothingFits:
    def test_a_trillion_parameters_on_eight_devices(self):
        """An empty plan that says what it needs, how many devices suffice, and what each would need."""
        found = plan(GPT_1T, dgx_a100(), 64)
        assert not found
        assert len(found) == 0
        assert found.fitting == 0
        assert found.pareto == ()
        assert found.table.empty
        assert tuple(found.table.columns) == COLUMNS
        said = " ".join(found.remedies)
        assert "the layout that needs least takes 2.02 TB a device, and 77.3 GB of 85.9 GB may be used" in said
        assert "it fits on 256 devices" in said
        with pytest.raises(InvalidInputError, match=r"fits on no layout of 1 node × 8 A100-80GB; .* 256 devices"):
            _ = found.best
        assert str(found).endswith("\n".join(found.remedies))

    def test_the_remedies_are_true(self):
        """On so many devices it fits, and on half as many it does not; with so much memory each it fits as well."""
        assert plan(GPT_1T, dgx_a100(num_nodes=32), 64)
        assert not plan(GPT_1T, dgx_a100(num_nodes=16), 64)
        larger = dataclasses.replace(dgx_a100().device, memory_bytes=2.25e12)
        assert plan(GPT_1T, dataclasses.replace(dgx_a100(), device=larger), 64)

    @pytest.mark.parametrize(
        "restriction, remedy",
        [
            ({"zero_stages": [0]}, "it fits with ZeRO-3: "),
            ({"tp": [1], "pp": [1], "zero_stages": [0]}, "it fits with other sizes of tp: "),
            (
                {"recompute": ["selective"], "zero_stages": [2], "microbatches": [32]},
                "it fits with other microbatches: ",
            ),
        ],
    )
    def test_a_restriction_that_stands_in_the_way(self, restriction, remedy):
        """Each is lifted alone, and named where that suffices."""
        model = dataclasses.replace(GPT_7B, num_layers=40, hidden=5120, heads=40)
        sizes = {"tp": [1], "pp": [1], **restriction}
        found = plan(model, dgx_a100(), 256, **sizes)
        assert not found
        assert any(line.startswith(remedy) for line in found.remedies), found.remedies

    def test_a_device_without_room_for_anything(self):
        """No number of devices holds a model whose layers do not fit; the plan says so, in bounded time."""
        tiny = Device(name="tiny", peak_flops_per_s=1e12, memory_bytes=1e6, memory_bandwidth_bytes_per_s=1e9)
        found = plan(GPT_125M, Cluster(device=tiny), 8)
        assert not found
        assert any("no doubling of the 1 devices" in line for line in found.remedies)


class TestNearestMiss:
    def test_what_the_fastest_that_does_not_fit_lacks(self):
        """Bytes, seconds, and the variant of the same mesh that fits: all three by prediction."""
        found = plan(GPT_7B, dgx_a100(), 64, zero_stages=[1], recompute=["selective"], tp=[1], pp=[1])
        (said,) = found.remedies
        layout = dataclasses.replace(found.best.layout, microbatch=8, num_microbatches=1)
        missed = predict(GPT_7B, layout, dgx_a100())
        assert missed.step_s < found.best.prediction.step_s
        assert f"(microbatch=8) would take {seconds_text(missed.step_s)} a step" in said
        assert f"lacks {bytes_text(missed.memory_bytes - missed.memory_limit_bytes)} a device" in said
        assert said.endswith(f"takes {seconds_text(found.best.prediction.step_s)}")
        assert str(found).endswith(said)

    def test_nothing_is_said_where_all_that_is_faster_fits(self):
        """A small model on large devices."""
        assert plan(GPT_125M, dgx_a100(), 64).remedies == ()


class TestOddClusters:
    def test_one_device(self):
        """No axis, no communication; microbatches and recomputation are chosen."""
        best = plan(GPT_125M, consumer_pc(1), 32).best
        assert best.layout.world_size == 1
        assert best.prediction.exposed_total_s == 0

    @pytest.mark.parametrize(
        "num_devices, batch, remedy",
        [
            (7, 32, "use 6 or 8 devices, or a global_batch of 28 or 35"),
            (10007, 1024, "use a global_batch of 10007"),
        ],
    )
    def test_a_prime_number_of_devices(self, num_devices, batch, remedy):
        """Nothing divides but the batch: the nearest devices and batches that work."""
        cluster = dataclasses.replace(dgx_a100(), devices_per_node=1, num_nodes=num_devices)
        with pytest.raises(InvalidInputError) as error:
            plan(GPT_125M, cluster, batch)
        assert str(error.value) == (
            f"cluster={num_devices}: devices cannot be shared out: dp has to divide global_batch={batch}, tp the "
            f"heads, pp the 12 layers, cp the sequence, within what is allowed; {remedy}"
        )
        assert plan(GPT_125M, cluster, num_devices).best.layout.dp == num_devices

    def test_a_million_devices(self):
        """As many layouts as sizes divide, not as there are devices."""
        cluster = dgx_a100(num_nodes=125_000)
        found = plan(GPT_1T, cluster, 10**6, recompute=["full"], zero_stages=[1])
        assert found.best.layout.world_size == 10**6
        assert found.considered < 50_000

    def test_no_bandwidth(self):
        """A link that moves nothing is refused where it is made."""
        with pytest.raises(InvalidInputError, match=r"^bandwidth_bytes_per_s=0: must be positive; use float\('inf'\)"):
            vk.Link(1e-6, 0)

    def test_a_link_that_moves_almost_nothing(self):
        """The plan avoids it: one node's link is slow, so replicas that speak once a step are better than tp."""
        slow = dataclasses.replace(dgx_a100().of(8), inside=vk.Link(1e-6, 1e3))
        best = plan(GPT_125M, slow, 64).best.layout
        assert best.tp == 1

    def test_mixtures_of_experts(self):
        """ep is tried, within dp × cp."""
        model = dataclasses.replace(GPT_7B, experts=vk.Experts(count=8, top_k=2), ffn_hidden=4096)
        assert set(plan(model, dgx_h100(), 64).table.ep) >= {1, 2, 4, 8}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("gpt", dgx_a100(), 8),
            "model='gpt': must be a vk.Transformer; use vk.Transformer(num_layers=24, hidden=1024, …)",
        ),
        ((GPT_7B, 8, 8), "cluster=8: must be a Cluster; use vk.hardware.dgx_a100()"),
        ((GPT_7B, dgx_a100(), 0), "global_batch=0: must be a whole number, at least 1; use global_batch=1"),
    ],
)
def test_what_it_refuses(arguments, message):
    """With the rule and what to write instead."""
    with pytest.raises(InvalidInputError) as error:
        plan(*arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "restriction, message",
    [
        ({"tp": []}, "tp=[]: must be one or more values; use tp=[…]"),
        ({"tp": [0]}, "tp=0: must be a whole number, at least 1; use tp=1"),
        ({"zero_stages": [4]}, "zero_stage=4: must be 0, 1, 2 or 3; use 0 for plain replicas"),
        ({"schedules": "1F1B"}, "schedules='1F1B': must be one or more values; use schedules=[…]"),
        (
            {"schedules": ["DualPipe"]},
            "schedules='DualPipe': has no formula for its time here; did you mean GPipe? use one of GPipe, 1F1B, "
            "Interleaved1F1B, ZB-H1",
        ),
        ({"recompute": ["ful"]}, "recompute='ful': is no way to recompute; did you mean full? use one of none, "
                                 "selective, full"),
        ({"precision": "fp4"}, None),
        ({"context_by": "rings"}, "context_by='rings': is no way to see all keys; did you mean ring? use one of ring, "
                                  "ulysses"),
        ({"seq": 0}, "seq=0: must be a whole number, at least 1; use seq=1"),
        ({"program": "fast"}, "program='fast': must be a Program; use Program()"),
    ],
)  # fmt: skip
def test_a_restriction_that_cannot_be(restriction, message):
    """Names and numbers are checked before anything is computed."""
    with pytest.raises(InvalidInputError) as error:
        plan(GPT_7B, dgx_a100(), 8, **restriction)
    assert message is None or str(error.value) == message
