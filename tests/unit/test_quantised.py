"""Numbers in int8: how far they may be off, and what they refuse; no ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vizkit import InvalidInputError
from vizkit.collectives.exchanges import packed_bytes
from vizkit.runtime.tuning import dequantise, quantise, scales

LARGEST = 127

numbers = st.floats(-(2.0**99), 2.0**99, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30)


@given(st.lists(numbers, max_size=40), st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_no_number_is_off_by_more_than_half_a_scale(values: list[float], block: int) -> None:
    """For any length and block, filled-up numbers are zeros, and a block's largest number comes back as it was."""
    x = torch.tensor(values, dtype=torch.float32)
    rows = quantise(x, block)
    back = dequantise(rows)
    assert rows.nbytes == packed_bytes(len(x), block)
    assert back[len(x) :].eq(0).all()
    allowed = scales(rows).repeat_interleave(block)[: len(x)] / 2
    assert ((back[: len(x)] - x).abs() <= allowed * (1 + 1e-5)).all()
    largest = torch.stack([part.abs().max() for part in x.split(block)]) if values else torch.zeros(0)
    torch.testing.assert_close(back.view(-1, block).abs().amax(dim=1) if values else back, largest, rtol=1e-6, atol=0)


@given(st.lists(st.integers(-LARGEST, LARGEST), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_what_fits_in_int8_is_exact(values: list[int]) -> None:
    """Whole numbers whose largest is 127 have a scale of 1."""
    x = torch.tensor([float(LARGEST), *map(float, values)])
    assert torch.equal(dequantise(quantise(x, len(x))), x)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_what_is_not_finite_comes_back_as_nan(bad: float) -> None:
    """And only that block: a loss scaler sees it, and the others are unharmed."""
    back = dequantise(quantise(torch.tensor([1.0, 2.0, bad, 3.0, 4.0, 4.0]), block=2))
    assert back.isnan().tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floating_point_types_come_back_as_fp32(dtype: torch.dtype) -> None:
    back = dequantise(quantise(torch.tensor([[1.0, -127.0]], dtype=dtype), block=2))
    assert back.dtype is torch.float32
    assert back.tolist() == [1.0, -127.0]


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: quantise(torch.arange(3)),
            "x=torch.int64: only floating-point numbers are quantised; use x.float()",
        ),
        (lambda: quantise(torch.ones(3), block=0), "block=0: must be a whole number, at least 1; use block=1"),
        (lambda: quantise(torch.ones(3), block=2.5), "block=2.5: must be a whole number, at least 1; use block=2"),
    ],
)
def test_what_is_refused(call, message: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        call()
    assert str(refusal.value) == message
