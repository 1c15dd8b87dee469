"""Numbers with their units, for people."""

from __future__ import annotations

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def bytes_text(num_bytes: float) -> str:
    """Bytes in powers of 1000.

    >>> bytes_text(0), bytes_text(999), bytes_text(1_500), bytes_text(2.5e9)
    ('0 B', '999 B', '1.5 kB', '2.5 GB')
    """
    for size, unit in _BYTES:
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """A duration with three digits.

    >>> seconds_text(2), seconds_text(0.0123), seconds_text(4.5e-6), seconds_text(0)
    ('2 s', '12.3 ms', '4.5 µs', '0 s')
    """
    for size, unit in _SECONDS:
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"
