"""Numbers with their units, for people."""

from __future__ import annotations

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
ROUNDS_UP = 0.9995
"""From this share of a unit on, three digits show 1000 of the unit below."""


def bytes_text(num_bytes: float) -> str:
    """Bytes in powers of 1000, with three digits.

    >>> [bytes_text(n) for n in (0, 999, 1_500, 999_999, 2.5e9)]
    ['0 B', '999 B', '1.5 kB', '1 MB', '2.5 GB']
    """
    return _three_digits(num_bytes, _BYTES, "0 B")


def seconds_text(seconds: float) -> str:
    """A duration with three digits.

    >>> [seconds_text(s) for s in (0, 4.5e-6, 0.0123, 0.99999, 2, 1234.5)]
    ['0 s', '4.5 µs', '12.3 ms', '1 s', '2 s', '1,234 s']
    """
    return _three_digits(seconds, _SECONDS, "0 s")


def _three_digits(value: float, units: tuple[tuple[float, str], ...], nothing: str) -> str:
    if value <= 0:
        return nothing
    size, unit = next((entry for entry in units if value >= entry[0] * ROUNDS_UP), units[-1])
    amount = value / size
    return f"{amount:,.0f} {unit}" if amount >= 1000 else f"{amount:.3g} {unit}"
