"""Rules that sizes keep: whole numbers, and numbers that divide."""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np

from vizkit.errors import InvalidInputError


_FARTHEST = 100_000
"""How far from a wrong divisor right ones are looked for."""


def whole_number(name: str, value: object) -> int:
    """`value` as an int; raises `InvalidInputError` where it is no whole number, of Python or numpy, of at least 1.

    >>> whole_number("num_ranks", np.int64(4))
    4
    >>> whole_number("num_ranks", 2.0)
    Traceback (most recent call last):
    vizkit.errors.InvalidInputError: num_ranks=2.0: must be a whole number, at least 1; use num_ranks=2
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InvalidInputError.because(
            name, value, "must be a whole number, at least 1", f"use {name}={_nearest_whole(value)}"
        )
    return int(value)


def divides(name: str, value: int, by: str, divisor: int) -> None:
    """Raises `InvalidInputError`, with the nearest divisors, where `divisor` does not divide `value`.

    >>> divides("hidden", 16, "heads", 5)
    Traceback (most recent call last):
    vizkit.errors.InvalidInputError: heads=5: does not divide hidden=16; use heads=4 or heads=8
    """
    if value % divisor:
        start = min(divisor, value)
        below = next((d for d in range(start, max(start - _FARTHEST, 0), -1) if value % d == 0), gcd(value, divisor))
        above = next((d for d in range(divisor, min(value, divisor + _FARTHEST) + 1) if value % d == 0), None)
        nearest = " or ".join(f"{by}={d}" for d in (below, above) if d)
        raise InvalidInputError.because(by, divisor, f"does not divide {name}={value}", f"use {nearest}")


def _nearest_whole(value: Any) -> int:
    """The whole number that somebody who gave this may have meant."""
    try:
        return max(int(value), 1)
    except (TypeError, ValueError, OverflowError):
        return 1
