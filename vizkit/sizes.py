"""Rules that arguments keep: whole numbers, numbers that divide, bytes, yes or no."""

from __future__ import annotations

import sys
from math import gcd
from typing import Any, TypeGuard

import numpy as np

from vizkit.errors import InvalidInputError

_FARTHEST = 100_000
"""How far from a wrong divisor right ones are looked for."""
_LONGEST_NUMBER_BYTES = 8


def whole_number(name: str, value: object) -> int:
    """`value` as an int; raises `InvalidInputError` where it is no whole number, of Python or numpy, of at least 1.

    >>> whole_number("num_ranks", np.int64(4))
    4
    >>> whole_number("num_ranks", 2.0)
    Traceback (most recent call last):
    vizkit.errors.InvalidInputError: num_ranks=2.0: must be a whole number, at least 1; use num_ranks=2
    """
    if not is_whole(value) or value < 1:
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


def yes_or_no(name: str, value: object) -> bool:
    """`value` as a bool, of Python or numpy; raises `InvalidInputError` for anything else.

    >>> yes_or_no("gated", "no")
    Traceback (most recent call last):
    vizkit.errors.InvalidInputError: gated='no': must be True or False; use gated=True
    """
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidInputError.because(name, value, "must be True or False", f"use {name}=True")
    return bool(value)


def not_negative(name: str, value: object, remedy: str) -> float:
    """`value` as a number of Python; raises `InvalidInputError` where it is none, not finite or below 0.

    >>> not_negative("num_params", np.float32(0.5), "use 7.5e9 or such")
    0.5
    """
    if is_finite(value) and value >= 0:
        return value.item() if isinstance(value, np.number) else value
    raise InvalidInputError.because(name, value, "must be finite and not negative", remedy)


def number_width(name: str, value: object) -> float:
    """Bytes of one number, as a number of Python; raises `InvalidInputError` outside 0 to 8.

    >>> number_width("number_bytes", np.int64(2))
    2
    """
    if is_number(value) and 0 < value <= _LONGEST_NUMBER_BYTES:
        return value.item() if isinstance(value, np.number) else value
    raise InvalidInputError.because(
        name, value, f"must be over 0 and at most {_LONGEST_NUMBER_BYTES}", "use 2 for 16-bit numbers"
    )


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number by its type, of Python or numpy, and no bool."""
    return is_whole(value) or isinstance(value, (float, np.floating))


def is_finite(value: object) -> TypeGuard[float]:
    """Whether it is a number that a float can hold, and neither infinite nor undefined.

    >>> is_finite(10**308), is_finite(10**309), is_finite(float("nan")), is_finite(True)
    (True, False, False, False)
    """
    return is_number(value) and abs(value.item() if isinstance(value, np.number) else value) <= sys.float_info.max


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number by its type, of Python or numpy, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _nearest_whole(value: Any) -> int:
    """The whole number that somebody who gave this may have meant."""
    try:
        return max(int(value), 1)
    except (TypeError, ValueError, OverflowError):
        return 1
