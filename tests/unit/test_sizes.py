"""Sizes that do not divide: the nearest that do are named, at once whatever the size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vizkit.errors import InvalidInputError
from vizkit.sizes import divides


@pytest.mark.parametrize(
    ("value", "divisor", "remedy"),
    [
        (16, 5, "use heads=4 or heads=8"),
        (7, 3, "use heads=1 or heads=7"),
        (16, 10**12, "use heads=16"),
        (10**18 + 9, 7, "use heads=1"),
        (10**30, 10**29 + 1, f"use heads={10**29}"),
    ],
)
def test_the_nearest_are_named(value: int, divisor: int, remedy: str) -> None:
    """Below and above; far away, the greatest common divisor."""
    with pytest.raises(InvalidInputError) as refusal:
        divides("hidden", value, "heads", divisor)
    assert str(refusal.value) == f"heads={divisor}: does not divide hidden={value}; {remedy}"


@given(st.integers(1, 500), st.integers(1, 600))
def test_what_is_named_divides(value: int, divisor: int) -> None:
    """Each remedy, when followed, is accepted."""
    try:
        divides("hidden", value, "heads", divisor)
    except InvalidInputError as refusal:
        for named in str(refusal).split("; use ")[1].split(" or "):
            assert value % int(named.removeprefix("heads=")) == 0
    else:
        assert value % divisor == 0
