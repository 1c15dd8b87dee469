"""What one device can do: operations a second, bytes, bytes a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.sizes import is_finite, is_number
from vizkit.units import bytes_text

Size = TypeVar("Size", float, np.ndarray)
_16_BITS = 2


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one processor, as its data sheet describes it, and how much of that programs get.

    - `peak_flops_per_s`: operations a second of matrix products of 16-bit numbers, dense; `peak_32bit_flops_per_s` of
      32-bit ones (None: half as many).
    - `memory_bytes`, and `memory_bandwidth_bytes_per_s` to and from that memory.
    - `matrix_ceiling`: the share of the peak that the largest matrix products reach; `memory_ceiling`: the share of the
      bandwidth that element by element operations reach.

    Raises `InvalidInputError` for what is not positive, and for shares over 1.

    >>> mine = Device(name="mine", peak_flops_per_s=100e12, memory_bytes=24e9, memory_bandwidth_bytes_per_s=1e12)
    >>> print(mine)
    mine: 100 TFLOP/s at 16 bits, 24 GB at 1 TB/s
    """

    name: str
    peak_flops_per_s: float
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    peak_32bit_flops_per_s: float | None = None
    matrix_ceiling: float = 0.85
    memory_ceiling: float = 0.8

    def __post_init__(self) -> None:
        for name in ("peak_flops_per_s", "memory_bytes", "memory_bandwidth_bytes_per_s", "peak_32bit_flops_per_s"):
            value = getattr(self, name)
            if name == "peak_32bit_flops_per_s" and value is None:
                continue
            if not (is_finite(value) and value > 0):
                raise InvalidInputError.because(
                    name, value, "must be positive and finite", "use the data sheet's, such as 312e12 or 80e9"
                )
        for name in ("matrix_ceiling", "memory_ceiling"):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value <= 1):
                raise InvalidInputError.because(name, value, "is a share, over 0 and at most 1", f"use {name}=0.8")

    def peak(self, number_bytes: float = _16_BITS) -> float:
        """Operations a second at best, of numbers so wide: over 2 bytes, those of 32 bits."""
        if number_bytes <= _16_BITS:
            return self.peak_flops_per_s
        return self.peak_32bit_flops_per_s or self.peak_flops_per_s / 2

    def matrix_efficiency(self, m: Size, n: Size, k: Size, number_bytes: float = _16_BITS) -> Size:
        """Share of the peak that a product of an m × k and a k × n matrix reaches; numbers, or arrays of them.

        The additive roofline: its 2mnk operations take their time at `matrix_ceiling` of the peak, and its three
        matrices theirs at the memory's bandwidth. The share so depends on one size, 1/(1/m + 1/n + 1/k), the operations
        for each number that moves; it rises with the smallest of the three and saturates at the ceiling (after Williams
        et al., 2009, doi:10.1145/1498765.1498785).

        >>> a100 = Device(name="A100", peak_flops_per_s=312e12, memory_bytes=8e10, memory_bandwidth_bytes_per_s=2e12)
        >>> [round(a100.matrix_efficiency(size, size, size), 2) for size in (256, 2048, 16384)]
        [0.33, 0.71, 0.83]
        """
        numbers_per_operation = 0.5 * (1 / m + 1 / n + 1 / k)
        at_ceiling = self.matrix_ceiling * self.peak(number_bytes)
        operations_while_one_moves = at_ceiling * number_bytes / self.memory_bandwidth_bytes_per_s
        return self.matrix_ceiling / (1 + numbers_per_operation * operations_while_one_moves)

    def matrix_s(self, m: Size, n: Size, k: Size, number_bytes: float = _16_BITS) -> Size:
        """Seconds of a product of an m × k and a k × n matrix."""
        return 2 * m * n * k / (self.peak(number_bytes) * self.matrix_efficiency(m, n, k, number_bytes))

    def moving_s(self, num_bytes: Size) -> Size:
        """Seconds that operations take which do little but read and write so many bytes."""
        return num_bytes / (self.memory_ceiling * self.memory_bandwidth_bytes_per_s)

    def __str__(self) -> str:
        peak = f"{self.peak_flops_per_s / 1e12:.3g} TFLOP/s at 16 bits"
        return f"{self.name}: {peak}, {bytes_text(self.memory_bytes)} at {_per_s(self.memory_bandwidth_bytes_per_s)}"


def _per_s(bandwidth_bytes_per_s: float) -> str:
    return f"{bytes_text(bandwidth_bytes_per_s)}/s"
