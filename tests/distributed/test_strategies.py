"""Every way to split a model trains it as one process does: losses, gradients, parameters after two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import vizkit as vk
from tests.distributed import splitting

PATIENT_S = 120
"""Eight ranks on two busy cores need a while until they have met."""


@pytest.fixture(scope="module")
def reference() -> splitting.Result:
    return splitting.one_process()


STRATEGIES: list[tuple[Callable[..., splitting.Result], dict[str, Any], tuple[int, ...]]] = [
    (splitting.ddp, {}, (1, 2, 3, 4, 8)),
    (splitting.zero_1, {}, (2, 3, 4)),
    (splitting.fsdp, {}, (1, 2, 3, 4, 8)),
    (splitting.hsdp, {"num_copies": 1}, (2,)),
    (splitting.hsdp, {"num_copies": 2}, (2, 4, 8)),
    (splitting.tp, {}, (1, 2, 4, 8)),
    (splitting.tp, {"sequence_parallel": True}, (1, 2, 4)),
    (splitting.tp, {"loss_parallel": True}, (2,)),
    (splitting.tp, {"sequence_parallel": True, "loss_parallel": True}, (4,)),
    (splitting.uneven_tp, {"parallel_loss": False}, (3,)),
    (splitting.uneven_tp, {"parallel_loss": True}, (3,)),
    (splitting.dp_tp, {"dp": 2}, (4,)),
    (splitting.dp_tp, {"dp": 3}, (3,)),
    (splitting.fsdp_tp, {"dp": 2}, (4, 8)),
    (splitting.pp, {"num_stages": 2}, (2,)),
    (splitting.pp, {"num_stages": 3}, (3,)),
    (splitting.pp, {"num_stages": 2, "dp": 2}, (4,)),
    (splitting.pp, {"num_stages": 2, "tp": 2}, (4,)),
    (splitting.pp, {"num_stages": 2, "dp": 2, "tp": 2}, (8,)),
]
CASES = [(strategy, options, size) for strategy, options, sizes in STRATEGIES for size in sizes]


def name(strategy: Callable[..., Any], options: dict[str, Any], world_size: int) -> str:
    return f"{strategy.__name__}{''.join(f' {key}={value}' for key, value in options.items())} on {world_size}"


@pytest.mark.parametrize(("strategy", "options", "world_size"), CASES, ids=[name(*case) for case in CASES])
def test_equal_to_one_process(
    strategy: Callable[..., splitting.Result],
    options: dict[str, Any],
    world_size: int,
    reference: splitting.Result,
) -> None:
    """24 sequences a step, whatever the ranks; 3 ranks cut rows, widths and vocabulary unevenly."""
    found = vk.parity(
        vk.launch(strategy, world_size=world_size, device="cpu", timeout_s=PATIENT_S, **options), reference
    )
    assert found, str(found)
    assert {d.name for d in found.differences} >= {"loss.0", "loss.1", "gradients.layers.1.feed_forward.up.weight"}
    assert {d.rank for d in found.differences} == set(range(world_size))


@pytest.mark.parametrize(
    ("bug", "world_size", "right", "wrong"),
    [
        (splitting.unsynchronised, 2, "loss.0", "gradients.layers.0.attention.q.weight"),
        (splitting.wrong_group, 4, "loss.0", "parameters.layers.0.attention.q.weight"),
        (splitting.initialised_after_sharding, 2, None, "parameters.layers.1.feed_forward.up.weight"),
    ],
    ids=["missing all-reduce", "wrong group", "initialised after sharding"],
)
def test_planted_bugs_are_named(
    bug: Callable[[], splitting.Result], world_size: int, right: str | None, wrong: str, reference: splitting.Result
) -> None:
    """The first loss is right where only gradients are not exchanged; the parameter at fault is named, on each rank."""
    found = vk.parity(vk.launch(bug, world_size=world_size, device="cpu", timeout_s=PATIENT_S), reference)
    assert not found
    assert all(difference.holds for difference in found.differences if difference.name == right)
    failing = [difference for difference in found.differences if not difference.holds]
    assert {difference.rank for difference in failing if difference.name == wrong} == set(range(world_size))
    assert str(found).startswith("not equal to one process: ")
    assert str(max(failing, key=lambda difference: difference.largest / difference.allowed)) in str(found)
