"""A link costs latency plus bytes over bandwidth."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vizkit.errors import InvalidInputError
from vizkit.hardware import FREE_LINK, Link


@pytest.mark.parametrize(
    "latency_s, bandwidth, num_bytes, seconds",
    [
        (1e-3, 1e6, 2_000_000, 2.001),
        (1e-3, 1e6, 0, 1e-3),
        (0.0, 1e6, 500_000, 0.5),
        (2e-6, math.inf, 10**15, 2e-6),
    ],
)
def test_the_time_is_latency_plus_bytes_over_bandwidth(
    latency_s: float, bandwidth: float, num_bytes: int, seconds: float
):
    """α + bytes/β; an infinite β leaves α."""
    assert Link(latency_s, bandwidth).time_s(num_bytes) == pytest.approx(seconds, rel=1e-12)


@given(st.integers(0, 2**60))
def test_the_free_link_costs_nothing(num_bytes: int):
    """What remains on it is dependencies."""
    assert FREE_LINK.time_s(num_bytes) == 0.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"latency_s": -1e-6}, "latency_s=-1e-06: must be finite and not negative; use 0 for a link without latency"),
        ({"latency_s": math.nan}, "latency_s=nan: must be finite and not negative; use 0 for a link without latency"),
        ({"latency_s": math.inf}, "latency_s=inf: must be finite and not negative; use 0 for a link without latency"),
        (
            {"bandwidth_bytes_per_s": 0},
            "bandwidth_bytes_per_s=0: must be positive; use float('inf') for a link that only has latency",
        ),
        (
            {"bandwidth_bytes_per_s": math.nan},
            "bandwidth_bytes_per_s=nan: must be positive; use float('inf') for a link that only has latency",
        ),
    ],
)
def test_an_impossible_link_is_refused(arguments: dict[str, float], message: str):
    """The message says which number, the rule, and what to write instead."""
    with pytest.raises(InvalidInputError) as error:
        Link(**arguments)
    assert str(error.value) == message
