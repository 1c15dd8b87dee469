"""Odd arguments to the planner and what stands around it: refused with value, rule and remedy, and in bounded time."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import numpy as np
import pytest
import yaml

import vizkit as vk
from vizkit.balance import balanced_stages, proportional_shares
from vizkit.cluster_files import pytorch_job, slurm
from vizkit.hardware import Cluster, Device, dgx_a100
from vizkit.links import Links
from vizkit.planner import Program, plan, predict
from vizkit.sizes import is_finite

GPT = vk.Transformer(num_layers=12, hidden=768, heads=12, vocab=50304, seq=1024)
NODE = dgx_a100(num_nodes=1)
A100 = NODE.device
NO_NUMBERS = [None, "2", b"2", [2], (), {}, 1j, object(), True, np.bool_(True), np.array(2.0), np.array([1.0, 2.0])]
UNUSABLE = [*NO_NUMBERS, 0, -1, float("nan"), -float("inf"), 10**400]


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(vk.InvalidInputError) as refused:
        call()
    assert refused.value.args[0].count(";") >= 1, "value: rule; remedy"
    return str(refused.value)


@pytest.mark.parametrize("value", UNUSABLE, ids=lambda value: repr(value)[:20])
def test_no_link_or_device_of_unusable_numbers(value: object):
    """A bandwidth of zero, a latency that is a text, a peak beyond what floats hold."""
    assert refusal(lambda: vk.Link(1e-6, value)).startswith("bandwidth_bytes_per_s=")
    if not (type(value) is int and value == 0):  # a link without latency is fine
        assert refusal(lambda: vk.Link(value, 1e9)).startswith("latency_s=")
    for name in ("peak_flops_per_s", "memory_bytes", "memory_bandwidth_bytes_per_s"):
        fields = {"peak_flops_per_s": 1e14, "memory_bytes": 8e10, "memory_bandwidth_bytes_per_s": 1e12, name: value}
        assert refusal(lambda fields=fields: Device(name="odd", **fields)).startswith(f"{name}=")


def test_numbers_of_numpy_do_not_overflow_later():
    """A link takes them as Python's."""
    link = vk.Link(np.uint8(2), np.uint8(100))
    assert link.time_s(2_000_000) == 2 + 20_000
    assert [is_finite(value) for value in (np.float32(1), np.int8(-128), np.float64("inf"))] == [True, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices_per_node": None}, "devices_per_node=None: must be a whole number, at least 1"),
        ({"num_nodes": None}, "num_nodes=None: must be a whole number, at least 1"),
        ({"devices_per_node": 10**4, "num_nodes": 10**6}, "num_nodes=1000000: a cluster has 1,000,000,000 at most"),
        ({"links_between": 10**400}, "links_between=1000"),
    ],
)
def test_what_is_no_cluster(change: dict, message: str):
    """None is a number of links only."""
    assert refusal(lambda: Cluster(device=A100, **change)).startswith(message)


@pytest.mark.parametrize("name", ["schedules", "zero_stages", "recompute", "sequence_parallel"])
def test_none_stands_for_all_sizes_only(name: str):
    """Of what has no sizes there is no "all that divide"."""
    assert refusal(lambda: plan(GPT, NODE, 32, **{name: None})) == (
        f"{name}=None: must be one or more values; use {name}=[…]"
    )


@pytest.mark.parametrize("batch", [10**12, 2**40, 10**30, 8 * (2**61 - 1)])
def test_a_huge_batch_is_refused_at_once(batch: int):
    """Not after a search for its divisors; and the remedy is none that does not work."""
    said = refusal(lambda: plan(GPT, NODE, batch))
    assert said.startswith(f"global_batch={batch}: ")
    assert "devices" not in said


def test_what_cannot_be_counted_is_refused():
    """Models, sequences and steps beyond 2**53, links so slow that seconds overflow."""
    wide = vk.Transformer(num_layers=10**6, hidden=10**6, heads=8, vocab=10, seq=8)
    assert "has over 9e+15 parameters" in refusal(lambda: plan(wide, NODE, 8))
    long = vk.Transformer(num_layers=1, hidden=8, heads=8, vocab=8, seq=10**13)
    assert "a step has over 9e+15 tokens" in refusal(lambda: plan(long, NODE, 8000))
    one = Cluster(device=A100)
    assert "a step has over 9e+15 tokens" in refusal(lambda: predict(GPT, vk.Layout(microbatch=10**30), one))
    slow = Device(name="slow", peak_flops_per_s=5e-324, memory_bytes=8e10, memory_bandwidth_bytes_per_s=1e-320)
    with np.errstate(all="ignore"):
        for call in (
            lambda: plan(GPT, Cluster(device=slow), 8),
            lambda: predict(GPT, vk.Layout(), Cluster(device=slow)),
        ):
            assert "a step takes longer than can be counted" in refusal(call)


def test_the_remedy_for_microbatches_works():
    """Of 32 sequences no replica can make microbatches of 3; of those that it says, some can."""
    said = refusal(lambda: plan(GPT, NODE, 32, microbatches=[3]))
    assert said.startswith("global_batch=32: what a replica gets of it has to be whole microbatches")
    assert said.endswith("a global_batch of 24 or 48")
    assert all(len(plan(GPT, NODE, batch, microbatches=[3])) for batch in (24, 48))


def test_experts_of_a_model_without_any():
    """Said of the model, not of the devices."""
    assert refusal(lambda: plan(GPT, NODE, 32, ep=[2])) == (
        "ep=[2]: the model has no experts; use ep=[1], or leave it out"
    )


def test_a_precision_without_gradients_trains_nothing():
    """Refused by both, where the arrays once charged latencies that a single prediction did not."""
    for call in (
        lambda: plan(GPT, NODE, 32, precision="inference_16bit"),
        lambda: predict(GPT, vk.Layout(dp=8, precision="inference_16bit"), NODE),
    ):
        assert refusal(call).startswith("precision='inference_16bit': keeps no gradients to train with")


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2", None, 10**12])
@pytest.mark.parametrize("name", vk.hardware.PRESETS)
def test_presets_of_odd_numbers(name: str, count: object):
    """A laptop is divided among processes, of which there is one at least."""
    assert "=" in refusal(lambda: vk.hardware.PRESETS[name](count))


def test_a_figure_of_a_plan_and_of_nothing_else():
    """And of a place in it."""
    found = plan(GPT, NODE, 32)
    assert refusal(lambda: vk.plan_figure(None)).startswith("plan='NoneType': must be what vk.plan gives back")
    assert refusal(lambda: vk.plan_figure(found.table)).startswith("plan='DataFrame'")
    places = {0: "must be a whole number", -1: "must be a whole", True: "must be", "1": "must be", len(found) + 1: "8"}
    for chosen, rule in places.items():
        said = refusal(lambda chosen=chosen: vk.plan_figure(found, chosen=chosen))
        assert said.startswith(f"chosen={chosen!r}: ")
        assert rule in said


@pytest.mark.parametrize("count", [True, 4.0, np.array([4]), "4"])
def test_a_slider_has_whole_numbers(count: object):
    """What merely equals one is not on it."""
    assert "its control has 1, 2, 4" in refusal(lambda: vk.widgets.planner(count=count))


@pytest.mark.parametrize("values", [None, 5, {1: 2}, [10**400], np.array(3)], ids=repr)
def test_shares_of_what_are_no_numbers(values: object):
    """One thing, a dict, a number beyond floats."""
    assert refusal(lambda: proportional_shares(4, values)).startswith("speeds")
    assert refusal(lambda: balanced_stages(values, 1)).startswith("costs")


@pytest.mark.parametrize("case", [([1e308] * 3, None), ([1.0, 2.0, 3.0], [1e-308, 1e-308])])
def test_stages_whose_times_overflow(case: tuple):
    """Refused, where once stages came out empty."""
    costs, speeds = case
    assert "use a larger unit" in refusal(lambda: balanced_stages(costs, 2, speeds))


def test_many_ranks_share_by_the_same_rule():
    """Each sample that is left goes to the rank that is done with it first, by a queue as by looking at all."""
    speeds = [1 + (7 * rank) % 11 for rank in range(60)]
    shares = proportional_shares(1_000, speeds)
    assert sum(shares) == 1_000
    done = max(share / speed for share, speed in zip(shares, speeds, strict=True))
    assert all((share + 1) / speed >= done for share, speed in zip(shares, speeds, strict=True))


def test_odd_ranks_and_matrices_between_nodes():
    """Names of ranks are whole numbers from 0 on; bytes are a square of finite numbers."""
    links = Links(vk.Link(1e-6, 1e11), vk.Link(2e-5, 1e9), np.int64(2))
    for ranks in (None, 5, ["a"], [-1, 0], [1.5], [True], "ab"):
        assert refusal(lambda ranks=ranks: links.joining(ranks)).startswith("ranks=")
    for sent in (None, 5, [], "a", np.ones(4), np.ones((2, 3)), np.full((4, 4), np.nan), -np.ones((4, 4))):
        assert refusal(lambda sent=sent: links.crossing_bytes(sent)).startswith("wire_bytes=")
    assert links.crossing_bytes([[0, 1, 2], [3, 4, 5], [6, 7, 8]]) == 2 + 5 + 6 + 7


ODD_WORDS = [
    "a b",
    "a'b",
    'a"b',
    "a\nb",
    "a;rm -rf x",
    "$(HOME)",
    "$$(x)",
    "$$x $",
    "`x`",
    "@{nodes}",
    "é 😀",
    "-x",
    "#",
    "a: b",
]


def as_kubernetes_reads(word: str) -> str:
    """Two dollars stand for one, and $(NAME) for a variable."""
    return re.sub(r"\$\$|\$\([^)]*\)", lambda found: "$" if found[0] == "$$" else "filled in", word)


@pytest.mark.parametrize("word", ODD_WORDS)
def test_words_reach_the_function_as_they_are(word: str):
    """Through the shell and through YAML, with what Kubernetes would fill in left alone."""
    script = slurm("train:main", arguments=[word])
    assert shlex.split(script[script.index("-m vizkit run") :])[-1] == word
    container = yaml.safe_load(pytorch_job("train:main", image="i", arguments=[word]))["spec"]["pytorchReplicaSpecs"]
    command = container["Worker"]["template"]["spec"]["containers"][0]["command"]
    assert as_kubernetes_reads(command[-1]) == word


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arguments": "lr=1"}, "arguments='lr=1': must be words in a list"),
        ({"arguments": None}, "arguments=None: must be words in a list"),
        ({"arguments": [1]}, "arguments[0]=1: must be a text"),
        ({"arguments": ["a\0b"]}, "arguments[0]='a\\x00b': must be a text"),
        ({"trace": None}, "trace=None: must be a text"),
        ({"trace": ""}, "trace='': is no name"),
        ({"trace": "-x"}, "trace='-x': is no name"),
        ({"time_limit": 60}, "time_limit=60: must be a text"),
        ({"time_limit": "1:99:99"}, "time_limit='1:99:99': is no time that sbatch takes"),
        ({"target": None}, "target=None: must be a text"),
        ({"target": ".:."}, "target='.:.': is no module:function"),
        ({"max_restarts": 0.0}, "max_restarts=0.0: must be a whole number"),
    ],
)
def test_what_no_job_can_hold(change: dict, message: str):
    """Each is named, and no file is made."""
    assert refusal(lambda: slurm(**{"target": "train:main", **change})).startswith(message)


def test_a_job_always_has_a_name():
    """Also where the function's has no letter that Kubernetes takes."""
    assert yaml.safe_load(pytorch_job("_:_", image="i"))["metadata"]["name"] == "vizkit"
    assert refusal(lambda: pytorch_job("m:f", image=1)).startswith("image=1: must be a text")
    assert refusal(lambda: pytorch_job("m:f", image="i", volume_claim="")).startswith("volume_claim='': is no name")


def test_three_predictions_by_hand():
    """Matrix products by the roofline, bytes of all-reduces over the ring, and the bubble of 1F1B."""
    compute = predict(GPT, vk.Layout(dp=8, microbatch=4), NODE)

    def product_s(m: int, n: int, k: int) -> float:
        moved = 2 * (m * n + n * k + m * k)
        at_ceiling = A100.matrix_ceiling * A100.peak_flops_per_s
        return 2 * m * n * k / at_ceiling + moved / A100.memory_bandwidth_bytes_per_s

    tokens, h, seq, head = 4 * 1024, 768, 1024, 64
    weights = product_s(tokens, 3 * h, h) + product_s(tokens, h, h) + 2 * product_s(tokens, 4 * h, h)
    attention = 4 * 12 * (product_s(seq, seq, head) + product_s(seq, head, seq)) / 2
    layers = 12 * (3 * (weights + attention) + attention / 2)
    assert compute.matrix_s == pytest.approx(layers + 3 * product_s(tokens, 50304, h))

    wide = vk.Transformer(num_layers=24, hidden=2304, heads=24, vocab=51200, seq=2048)
    layout = vk.Layout(tp=8, microbatch=2, num_microbatches=4, recompute="full")
    program = Program(overlap_tensor=False)
    payload, link = 2 * 2 * 2048 * 2304, NODE.inside
    call_s = 2 * 7 / 8 * payload / link.bandwidth_bytes_per_s + 2 * 3 * link.latency_s
    exposed_s = predict(wide, layout, NODE, program=program).exposed_s["tp"]
    assert exposed_s == pytest.approx((24 * 6 * 4 + 2 * 4) * call_s, rel=3e-3)  # and the loss, three small calls each

    deep = predict(wide, vk.Layout(pp=8, num_microbatches=16), NODE)
    again = predict(wide, vk.Layout(pp=8, num_microbatches=32), NODE)
    assert again.bubble_s == pytest.approx(deep.bubble_s), "(p − 1)(F + B), whatever m"
    per_microbatch_s = (again.compute_s - deep.compute_s) / 16  # of the last rank, which has the logits too
    assert 0 < deep.bubble_s < 7 * per_microbatch_s
