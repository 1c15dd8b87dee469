"""The badge of equality: what ranks hold beside what one process computes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vizkit as vk
from vizkit.runtime.parity import ABSOLUTE, RELATIVE, parity

WHOLE = {"loss": 2.5, "gradients": {"w": torch.ones(2, 3), "b": torch.zeros(3)}}


def test_ranks_that_hold_parts_are_compared_name_by_name() -> None:
    """A pipeline's ranks hold their stages; None is what lies elsewhere."""
    ranks = [{"loss": None, "gradients": {"w": torch.ones(2, 3)}}, {"loss": 2.5, "gradients": {"b": torch.zeros(3)}}]
    found = parity(ranks, WHOLE)
    assert found
    assert sorted((d.name, d.rank) for d in found.differences) == [("gradients.b", 1), ("gradients.w", 0), ("loss", 1)]
    assert str(found).splitlines()[0] == "equal to one process: 3 values on 2 ranks"


def test_a_value_that_no_rank_holds_is_missing() -> None:
    """A lost shard is no parity, however equal the rest is."""
    found = parity([{"loss": 2.5, "gradients": {"w": torch.ones(2, 3)}}], WHOLE)
    assert not found.holds
    assert found.missing == ("gradients.b",)
    assert "no rank holds gradients.b" in str(found)


def test_the_largest_difference_leads() -> None:
    """What exceeds its tolerance most comes first, with its name, rank, dtype and what is allowed."""
    wrong = {"loss": 2.5, "gradients": {"w": torch.ones(2, 3) + 0.5, "b": torch.full((3,), 1e-3)}}
    found = parity([WHOLE, wrong], WHOLE)
    assert not found
    assert str(found).splitlines() == [
        "not equal to one process: 3 values on 2 ranks compared",
        "gradients.w on rank 1: 0.5, over 1.1e-05 (float32)",
        "gradients.b on rank 1: 0.001, over 1e-05 (float32)",
    ]
    assert found.worst is not None
    assert (found.worst.name, found.worst.rank, found.worst.largest) == ("gradients.w", 1, 0.5)
    assert "✗" in found._repr_html_()
    assert repr(found) == str(found)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(RELATIVE)), st.floats(0.25, 64), st.floats(-4, 4))
def test_tolerances_are_those_of_torch(dtype: torch.dtype, value: float, off: float) -> None:
    """Of each dtype: parity holds exactly where `torch.testing.assert_close` passes."""
    expected = torch.full((3,), value, dtype=dtype)
    actual = (expected.double() + off * (ABSOLUTE[dtype] + RELATIVE[dtype] * value)).to(dtype)
    try:
        torch.testing.assert_close(actual, expected)
        close = True
    except AssertionError:
        close = False
    assert parity([{"w": actual}], {"w": expected}).holds == close


@pytest.mark.parametrize("actual, expected, holds", [
    (torch.tensor([math.nan]), torch.tensor([math.nan]), False),
    (torch.tensor([math.inf]), torch.tensor([math.inf]), True),
    (torch.tensor([math.inf]), torch.tensor([1.0]), False),
    (torch.tensor([3]), torch.tensor([3]), True),
    (torch.tensor([3]), torch.tensor([4]), False),
    (torch.ones(0), torch.ones(0), True),
    (1.0000001, 1.0, True),
    (1.01, 1.0, False),
    (np.float64(1.000001), 1.0, True),
    (torch.tensor(1.000001, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64), False),
    (torch.tensor([1 + 1j]), torch.tensor([1 + 1j]), True),
    (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), False),
])  # fmt: skip
def test_special_values(actual: object, expected: object, holds: bool) -> None:
    """NaN equals nothing, infinity itself; whole numbers have to be equal; imaginary parts count.

    A float of Python or numpy has float32's tolerance, a tensor its dtype's.
    """
    assert parity([{"x": actual}], {"x": expected}).holds is holds


def test_tolerances_of_ones_own() -> None:
    assert parity([[1.1]], [1.0], rtol=0.2).holds
    assert not parity([[1.1]], [1.0], rtol=0, atol=0.05).holds


@pytest.mark.parametrize("ranks, message", [
    ([{"loss": 2.5, "acc": 1.0}],
     "run='acc': rank 0 holds it, the reference has loss, gradients.w, gradients.b; use the same names"),
    ([{"gradients": {"w": torch.ones(3, 2)}}],
     "gradients.w=(3, 2): on rank 0, and (2, 3) in the reference; gather it first"),
    ([{"loss": "low"}], "loss='low': is neither tensor nor number; return tensors and numbers in dicts or lists"),
])  # fmt: skip
def test_what_cannot_be_compared(ranks: list[object], message: str) -> None:
    """A name too many, another shape, something else than numbers."""
    with pytest.raises(vk.InvalidInputError) as caught:
        parity(ranks, WHOLE)
    assert str(caught.value) == message
