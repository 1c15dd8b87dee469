"""Layouts: which ranks there are, and which models they can share."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vizkit as vk
from vizkit.memory import PRECISIONS, Precision

SIZES = {"num_layers": 12, "hidden": 64, "heads": 8, "vocab": 100, "seq": 48}
small = st.sampled_from([1, 2, 3, 4, 8])


def model(**sizes: object) -> vk.Transformer:
    return vk.Transformer(**{**SIZES, **sizes})


class TestAxes:
    @given(small, small, small, small)
    def test_ranks_are_the_product_of_the_axes(self, dp, tp, pp, cp):
        """dp · cp · tp · pp, in a mesh whose innermost axis is tp."""
        layout = vk.Layout(dp=dp, tp=tp, pp=pp, cp=cp, num_microbatches=5, microbatch=3)
        assert layout.world_size == dp * tp * pp * cp == layout.mesh.world_size
        assert layout.mesh == vk.Mesh(pp=pp, dp=dp, cp=cp, tp=tp)
        assert layout.global_batch == dp * 3 * 5

    def test_experts_live_among_the_replicas(self):
        """dp · cp / ep replicas of each expert, on the same ranks."""
        layout = vk.Layout(dp=4, cp=2, tp=2, ep=4)
        assert layout.expert_replicas == 2
        assert layout.expert_mesh == vk.Mesh(pp=1, dp=2, ep=4, tp=2)
        assert layout.expert_mesh.world_size == layout.world_size

    @pytest.mark.parametrize("schedule, given, stages", [
        ("1F1B", None, 1), ("Interleaved1F1B", None, 2), ("Interleaved1F1B", 3, 3), ("zbv", None, 2),
    ])  # fmt: skip
    def test_stages_of_a_rank_are_the_schedules(self, schedule, given, stages):
        """What is not given is what the schedule is made for."""
        layout = vk.Layout(pp=4, num_microbatches=8, schedule=schedule, stages_per_rank=given)
        assert (layout.local_stages, layout.num_stages) == (stages, 4 * stages)

    def test_dualpipe_cuts_the_layers_once_for_both_pipelines(self):
        """Two stages on each of 4 ranks, of the 4 that there are."""
        assert vk.Layout(pp=4, num_microbatches=8, schedule="DualPipe").num_stages == 4

    def test_it_is_a_value(self):
        """Names are the known ones, whatever their case; layouts compare, hash and are replaced."""
        layout = vk.Layout(pp=4, num_microbatches=8, schedule="zbv", recompute="full")
        assert layout.schedule == "ZBVZeroBubble"
        same = vk.Layout(pp=4, num_microbatches=8, schedule="ZBVZeroBubble", recompute="full")
        assert layout == same
        assert hash(layout) == hash(same)
        assert dataclasses.replace(layout, schedule="1F1B").local_stages == 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            layout.dp = 2

    def test_a_precision_of_ones_own(self):
        assert vk.Layout(precision=Precision(1, 2, 3)).precision.total_bytes == 6

    @pytest.mark.parametrize("sizes, message", [
        ({"dp": 0}, "dp=0: must be a whole number, at least 1; use dp=1"),
        ({"tp": 2.0}, "tp=2.0: must be a whole number, at least 1; use tp=2"),
        ({"num_microbatches": None}, "num_microbatches=None: must be a whole number, at least 1; use num_m.*=1"),
        ({"zero_stage": 4}, "zero_stage=4: must be 0, 1, 2 or 3; use 0 for plain replicas"),
        ({"zero_stage": True}, "zero_stage=True: must be 0, 1, 2 or 3; use 0 for plain replicas"),
        ({"sequence_parallel": 1}, "sequence_parallel=1: must be True or False; use sequence_parallel=True"),
        ({"context_by": "rings"},
         r"context_by='rings': is no way to see all keys; did you mean ring\? use one of ring, ulysses"),
        ({"schedule": "1F1C"}, r"schedule='1F1C': is not a schedule that vizkit knows; did you mean 1F1B\? use one"),
        ({"schedule": 3}, "schedule=3: is not a schedule that vizkit knows; use one of Sequential"),
        ({"schedule": ["1F1B"]}, r"schedule=\['1F1B'\]: is not a schedule that vizkit knows; use one of Sequential"),
        ({"schedule": "ForwardOnly"}, "schedule='ForwardOnly': has no backward to train with; use 1F1B"),
        ({"recompute": "selectiv"},
         r"recompute='selectiv': is no way to recompute; did you mean selective\? use one of none, selective, full"),
        ({"precision": "mixd_adam"}, r"precision='mixd_adam': is not a known precision; did you mean mixed_adam\? use"),
        ({"precision": ["x"]}, r"precision=\['x'\]: is not a known precision; use one of mixed_adam, "),
        ({"dp": 4, "cp": 2, "ep": 3}, "ep=3: does not divide dp × cp=8; use ep=2 or ep=4"),
        ({"pp": 3, "schedule": "DualPipe", "num_microbatches": 8},
         "pp=3: DualPipe pairs each rank with the one at the mirrored place; use pp=2 or 4"),
        ({"pp": 4, "schedule": "DualPipe", "num_microbatches": 7}, "num_microbatches=7: DualPipe .*; use num_m.*=8"),
        ({"pp": 2, "stages_per_rank": 2},
         "stages_per_rank=2: 1F1B has exactly 1 on each rank; leave it out, or use Interleaved1F1B"),
    ])  # fmt: skip
    def test_what_it_refuses(self, sizes, message):
        """Said of the layout's own names, with what would do."""
        with pytest.raises(vk.InvalidInputError, match=f"^{message}"):
            vk.Layout(**sizes)

    @pytest.mark.parametrize("name", PRECISIONS)
    def test_every_known_precision(self, name):
        assert vk.Layout(precision=name).precision == name


class TestCheck:
    """Whether these ranks can share a model."""

    @pytest.mark.parametrize("layout", [
        {},
        {"sequence_parallel": True},
        {"dp": 5, "tp": 8, "sequence_parallel": True, "pp": 4, "cp": 2},
        {"pp": 3, "schedule": "Interleaved1F1B", "stages_per_rank": 4},
        {"cp": 8, "context_by": "ulysses"},
        {"tp": 2, "cp": 4, "context_by": "ulysses"},
    ])  # fmt: skip
    def test_what_fits(self, layout):
        """Axes of size 1, alone or together with others; a vocabulary of any size."""
        vk.Layout(**layout).check(model(vocab=97))

    @pytest.mark.parametrize("layout, sizes, message", [
        ({"tp": 3}, {}, "tp=3: does not divide heads=8; use tp=2 or tp=4"),
        ({"tp": 16}, {}, "tp=16: does not divide heads=8; use tp=8"),
        ({"tp": 4}, {"kv_heads": 2}, "tp=4: does not divide kv_heads=2; use tp=2"),
        ({"tp": 4}, {"ffn_hidden": 30}, "tp=4: does not divide ffn_hidden=30; use tp=3 or tp=5"),
        ({"cp": 5}, {}, "cp=5: does not divide seq=48; use cp=4 or cp=6"),
        ({"tp": 4, "cp": 4, "context_by": "ulysses"}, {}, "cp=4: does not divide kv_heads / tp=2; use cp=2"),
        ({"tp": 4, "sequence_parallel": True}, {"seq": 50}, "tp=4: does not divide seq=50; use tp=2 or tp=5"),
        ({"tp": 8, "cp": 4, "sequence_parallel": True}, {}, "tp=8: does not divide seq / cp=12; use tp=6 or tp=12"),
        ({"pp": 5}, {}, "pp=5: does not divide num_layers=12; use pp=4 or pp=6"),
        ({"pp": 4, "schedule": "ZBV", "num_microbatches": 8}, {},
         "pp=4: does not divide num_layers / stages_per_rank=6; use pp=3 or pp=6"),
        ({"pp": 2, "schedule": "Interleaved1F1B", "stages_per_rank": 5, "num_microbatches": 2}, {},
         "num_layers=12: 2 ranks of 5 stages need equal shares; use num_layers=10 or num_layers=20"),
        ({"dp": 2, "ep": 2}, {}, "ep=2: the model has no experts; use ep=1"),
        ({"dp": 4, "ep": 4}, {"experts": vk.Experts(count=6)}, "ep=4: does not divide experts=6; use ep=3 or ep=6"),
    ])  # fmt: skip
    def test_what_does_not(self, layout, sizes, message):
        """What there was, what it needs, and the nearest."""
        with pytest.raises(vk.InvalidInputError) as caught:
            vk.Layout(**layout).check(model(**sizes))
        assert str(caught.value) == message
