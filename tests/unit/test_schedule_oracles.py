"""Published bubbles and activation memory, by simulation: `shared/ORACLES.md`, sections B, D and E."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vizkit.hardware import Link
from vizkit.metrics import breakdown, bubble, peak_activations
from vizkit.schedules import schedule
from vizkit.simulator import simulate
from vizkit.trace import Trace

# p, m, seconds of F, I (the paper's B), W and of a transfer c, then rates: 1F1B, 1F1B-I, ZB-H1, ZB-H2
ZERO_BUBBLE_TABLE_5 = {
    "1.5B, m=24": (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585, 0.1083),
    "1.5B, m=32": (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242, 0.0837),
    "1.5B, m=64": (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674, 0.0444),
    "6.2B, m=24": (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.0808, 0.1323, 0.0698),
    "6.2B, m=32": (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.0628, 0.1045, 0.0559),
    "6.2B, m=64": (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0320, 0.0554, 0.0294),
}
COLUMN = {"1F1B": 6, "Interleaved1F1B": 7, "ZB-H1": 8, "ZB-H2": 9}
RANKS, MICROBATCHES, SECONDS = st.integers(1, 8), st.integers(1, 24), st.integers(1, 40)


def run(name: str, p: int, m: int, *, F=1, I=1, W=1, c=0, v=1, **options) -> Trace:  # noqa: E741, N803
    """A pipeline in which one microbatch takes F + I + W on each rank, and c seconds to the next rank."""
    wanted = schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=v if v > 1 else None)
    parts = wanted.stages_per_pipeline / p
    durations = {"F": F / parts, "I": I / parts, "W": W / parts}
    return simulate(wanted, durations, Link(latency_s=c, bandwidth_bytes_per_s=math.inf), **options)


def bubble_s(trace: Trace) -> float:
    """The longest time of a rank, from its first to its last pass, less the mean compute of a rank."""
    return bubble(trace).over_longest_rank / (1 - bubble(trace).over_longest_rank) * mean_compute_s(trace)


def mean_compute_s(trace: Trace) -> float:
    return breakdown(trace).compute.mean() / 1e9


class TestMegatron:
    """Narayanan et al., SC'21: the bubble over the ideal time."""

    @given(p=RANKS, m=MICROBATCHES, F=SECONDS, B=SECONDS, name=st.sampled_from(["GPipe", "1F1B"]))
    def test_one_stage_a_rank(self, p, m, F, B, name):  # noqa: N803
        """(p − 1) / m, and (p − 1) / (m + p − 1) over the total."""
        found = bubble(run(name, p, m, F=F, I=B / 2, W=B / 2))
        assert found.over_ideal == pytest.approx((p - 1) / m, abs=1e-8)
        assert found.over_total == pytest.approx((p - 1) / (m + p - 1), abs=1e-8)

    @given(p=RANKS, rounds=st.integers(1, 4), v=st.integers(2, 4), F=SECONDS, B=SECONDS)
    def test_interleaved_divides_it_by_the_stages_of_a_rank(self, p, rounds, v, F, B):  # noqa: N803
        """(p − 1) / (v m)."""
        found = bubble(run("Interleaved1F1B", p, rounds * p, F=F, I=B / 2, W=B / 2, v=v))
        assert found.over_ideal == pytest.approx((p - 1) / (v * rounds * p), abs=1e-7)


class TestZeroBubble:
    """Qi et al., 2023, arXiv:2401.10241; ZB-2p, what their automatic scheduler finds, is not among our schedules."""

    @pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZB-H2"])
    @pytest.mark.parametrize("row", ZERO_BUBBLE_TABLE_5.values(), ids=ZERO_BUBBLE_TABLE_5)
    def test_rates_of_table_5_to_four_decimals(self, row: tuple, name: str):
        """ZB-H1's are also those of ZB-1p in the paper."""
        p, m, F, I, W, c, *_ = row  # noqa: E741, N806
        found = bubble(run(name, p, m, F=F, I=I, W=W, c=c)).over_longest_rank
        assert round(found, 4) == row[COLUMN[name]]

    @pytest.mark.parametrize("model", ZERO_BUBBLE_TABLE_5)
    def test_rates_of_interleaved_1f1b_are_a_little_higher_than_theirs(self, model: str):
        """By less than 0.0036, with as many stages a rank as leave each stage one layer."""
        p, m, F, I, W, c, *_ = row = ZERO_BUBBLE_TABLE_5[model]  # noqa: E741, N806
        stages_per_rank = 3 if model.startswith("1.5B") else 4
        found = bubble(run("Interleaved1F1B", p, m, F=F, I=I, W=W, c=c, v=stages_per_rank)).over_longest_rank
        assert 0 < found - row[COLUMN["Interleaved1F1B"]] < 0.0036

    @given(p=st.integers(2, 8), rounds=st.integers(1, 4), F=SECONDS, I=SECONDS, W=SECONDS, c=st.integers(0, 100))
    def test_1f1b_with_transfers(self, p, rounds, F, I, W, c):  # noqa: E741, N803
        """(p−1)(F+I+W) + c(2(p−1)m/p + 2(p−2)) if p divides m, however long a transfer takes."""
        m = rounds * p
        expected = (p - 1) * (F + I + W) + c * (2 * (p - 1) * rounds + 2 * (p - 2))
        assert bubble_s(run("1F1B", p, m, F=F, I=I, W=W, c=c)) == pytest.approx(expected, abs=1e-5)

    @given(p=RANKS, more=st.integers(1, 20), times=st.lists(SECONDS, min_size=3, max_size=3), share=st.floats(0, 0.5))
    def test_h1_closed_form(self, p, more, times, share):
        """(p−1)(F+I−W+4c) for m > p, W ≤ F, c ≤ W/2."""
        W, F, I = min(times[:2]), max(times[:2]), times[2]  # noqa: E741, N806
        c = round(share * W, 3)
        expected = (p - 1) * (F + I - W + 4 * c)
        assert bubble_s(run("ZB-H1", p, p + more, F=F, I=I, W=W, c=c)) == pytest.approx(expected, abs=1e-5)

    @given(p=RANKS, more=st.integers(0, 20), times=st.lists(SECONDS, min_size=3, max_size=3), share=st.floats(0, 0.5))
    def test_h2_closed_form(self, p, more, times, share):
        """(p−1)(F+I−2W+2c) for m ≥ 2p−1, W ≤ F, W ≤ (F+I)/2, c ≤ (F+I)/2."""
        W, F, I = min(times), *sorted(times, reverse=True)[:2]  # noqa: E741, N806
        c = round(share * (F + I), 3)
        expected = (p - 1) * (F + I - 2 * W + 2 * c)
        assert bubble_s(run("ZB-H2", p, 2 * p - 1 + more, F=F, I=I, W=W, c=c)) == pytest.approx(expected, abs=1e-5)

    @given(p=RANKS, more=st.integers(0, 20), F=SECONDS, I=SECONDS, W=SECONDS)
    def test_table_2_without_transfers(self, p, more, F, I, W):  # noqa: E741, N803
        """Bubbles (p−1)(F+I+W), (p−1)(F+I−W), (p−1)(F+I−2W); peaks p, p, 2p−1, for ZB-H1 and ZB-H2 on every rank."""
        W, m = min(F, I, W), 2 * p - 1 + more  # noqa: N806
        traces = {name: run(name, p, m, F=F, I=I, W=W) for name in ("1F1B", "ZB-H1", "ZB-H2")}
        for times, trace in zip((-1, 1, 2), traces.values(), strict=True):
            assert bubble_s(trace) == pytest.approx((p - 1) * (F + I - times * W), abs=1e-5)
        peaks = {name: peak_activations(trace).tolist() for name, trace in traces.items()}
        assert peaks == {"1F1B": [*range(p, 0, -1)], "ZB-H1": [p] * p, "ZB-H2": [2 * p - 1] * p}

    @given(p=st.integers(1, 8), m=MICROBATCHES)
    def test_few_microbatches_are_all_kept(self, p, m):
        """No rank keeps more than there are."""
        assert peak_activations(run("ZB-H1", p, m)).tolist() == [min(p, m)] * p
        assert peak_activations(run("ZB-H2", p, m)).tolist() == [min(2 * p - 1, m)] * p

    @pytest.mark.parametrize("p", range(1, 7))
    def test_h1_is_torchs_zero_bubble_with_one_stage_a_rank(self, p: int):
        """Action for action, where torch has the size."""
        for m in (1, p, 2 * p, 5 * p):
            sizes = {"num_ranks": p, "num_microbatches": m}
            assert schedule("ZB-H1", **sizes) == schedule("InterleavedZeroBubble", stages_per_rank=1, **sizes)


class TestControllableMemory:
    """Qi et al., 2024, arXiv:2405.15362, with the table of sail-sg's README; a pass of a stage takes one second."""

    @pytest.mark.parametrize(
        ("name", "share", "peak"),
        [
            ("1F1B", 1, lambda p: p),
            ("ZB1P", 1 / 3, lambda p: p),
            ("ZBVZeroBubble", 0, lambda p: p),
            ("V-Half", 1 / 2, lambda p: (p + 2) // 2),
            ("V-Min", 2 / 3, lambda p: (p + 4) // 3),
        ],
    )
    @pytest.mark.parametrize("p", [2, 3, 4, 6, 8, 9, 16])
    def test_the_share_of_1f1bs_bubble_and_the_peak(self, p: int, name: str, share: float, peak):
        """1F1B's bubble is 6(p−1) seconds; V-Half has a second less for odd p, V-Min if 3 does not divide p."""
        trace = run(name, p, 2 * p, F=2, I=2, W=2)
        less = {"V-Half": p % 2 == 1, "V-Min": p % 3 > 0}.get(name, False)
        assert bubble_s(trace) == pytest.approx(share * 6 * (p - 1) - less, abs=1e-6)
        assert peak_activations(trace).max() == peak(p)

    @pytest.mark.parametrize(
        ("name", "share"), [("ZB1P", 1 / 3), ("ZBVZeroBubble", 0), ("V-Half", 1 / 2), ("V-Min", 2 / 3)]
    )
    def test_rates_tend_to_the_readmes(self, name: str, share: float):
        """As a rate, that share of b = (p−1)/(m+p−1) is a limit for many microbatches: 1 % above it for m = 64 p."""
        p, m = 6, 64 * 6
        found = bubble(run(name, p, m, F=2, I=2, W=2)).over_longest_rank
        assert found == pytest.approx(share * (p - 1) / (m + p - 1), rel=0.012)

    @pytest.mark.parametrize("p", range(1, 9))
    def test_the_bubble_of_v_half_holds_from_p_microbatches_on(self, p: int):
        """3(p−1) seconds, one less for odd p > 1, and the peak is reached."""
        for m in (*range(p, 2 * p), 5 * p):
            trace = run("V-Half", p, m, F=2, I=2, W=2)
            assert bubble_s(trace) == pytest.approx(max(3 * (p - 1) - p % 2, 0), abs=1e-6)
            assert peak_activations(trace).max() == (p + 2) // 2

    @pytest.mark.parametrize("p", range(1, 9))
    def test_the_bubble_of_v_min_holds_for_any_number_of_microbatches(self, p: int):
        """4(p−1) seconds, one less if 3 does not divide p > 1."""
        for m in (*range(1, p + 1), 5 * p):
            trace = run("V-Min", p, m, F=2, I=2, W=2)
            assert bubble_s(trace) == pytest.approx(max(4 * (p - 1) - (p % 3 > 0), 0), abs=1e-6)
            assert peak_activations(trace).max() <= (p + 4) // 3

    @settings(max_examples=50)
    @given(p=st.integers(2, 8), F=SECONDS, I=SECONDS, W=SECONDS)
    def test_v_half_repeats_without_a_bubble(self, p, F, I, W):  # noqa: E741, N803
        """For W + 2I ≥ 2F and W + 2F ≥ 2I, the paper's condition: twice the microbatches have the same bubble."""
        W = max(W, 2 * abs(F - I))  # noqa: N806
        few, many = (run("V-Half", p, m, F=F, I=I, W=W) for m in (4 * p, 8 * p))
        assert bubble_s(many) == pytest.approx(bubble_s(few), abs=1e-5)


class TestDualPipe:
    """The table of DeepSeek's DualPipe repository; B = I + W, PP stages, F&B the time of an overlapped pair."""

    @settings(max_examples=50)
    @given(half=st.integers(1, 5), more=st.integers(0, 6), F=SECONDS, W=SECONDS, more_than_b=st.integers(0, 40))
    def test_bubbles(self, half, more, F, W, more_than_b):  # noqa: N803
        """Of the rank that idles most; the repository's formulas hold for F = I, W ≤ F, B ≤ F&B ≤ F + B."""
        W, PP = min(F, W), 2 * half  # noqa: N806
        B = F + W  # noqa: N806
        pair = B + min(F, more_than_b)
        m = 2 * PP + 2 * more
        of_one_stage = {"F": F, "I": F, "W": W}
        of_two_stages = {"F": 2 * F, "I": 2 * F, "W": 2 * W}
        found = {
            "1F1B": run("1F1B", PP, m, **of_one_stage),
            "ZB1P": run("ZB1P", PP, m, **of_one_stage),
            "DualPipe": run("DualPipe", PP, m, **of_one_stage, overlap_s=pair),
            "DualPipeV": run("DualPipeV", half, m, **of_two_stages, overlap_s=pair),
        }
        assert {name: round(breakdown(trace).idle.max() / 1e9, 6) for name, trace in found.items()} == {
            "1F1B": (PP - 1) * (F + B),
            "ZB1P": (PP - 1) * (F + B - 2 * W),
            "DualPipe": (half - 1) * (pair + B - 3 * W),
            "DualPipeV": (half - 1) * (pair + B - 3 * W),
        }

    @pytest.mark.parametrize(("PP", "m"), [(2, 4), (4, 8), (4, 20), (8, 20)])
    def test_parameters_and_activations(self, PP: int, m: int):  # noqa: N803
        """In stages: 1F1B and ZB1P keep PP microbatches of one, DualPipe PP + 1 and parameters of two."""
        assert [peak_activations(run(name, PP, m)).max() for name in ("1F1B", "ZB1P")] == [PP, PP]
        assert peak_activations(run("DualPipe", PP, m, overlap_s=3)).tolist() == [PP + 1] * PP
        folded = peak_activations(run("DualPipeV", PP // 2, m, overlap_s=3))
        assert (2 * folded).tolist() == [PP + 1] * (PP // 2)  # a rank's layers are two stages
        both_ways = schedule("DualPipe", num_ranks=PP, num_microbatches=m)
        assert both_ways.num_stages == 2 * both_ways.stages_per_pipeline == 2 * PP


@pytest.mark.parametrize("name", ["ZB-H1", "ZB-H2", "V-Half", "V-Min"])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 9])
def test_every_size_is_a_schedule_that_runs(name: str, p: int):
    """Any number of ranks and microbatches, fewer of these than ranks too: the checker finds nothing."""
    for m in (1, 2, 3, p, 2 * p + 1):
        built = schedule(name, num_ranks=p, num_microbatches=m)
        assert built.check() == []
        assert len(built) == 3 * built.num_stages * m
