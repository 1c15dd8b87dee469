"""Numbers as whole codes of 2 to 8 bits, with one scale for many of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vizkit.collectives.exchanges import SCALE_BYTES
from vizkit.errors import InvalidInputError
from vizkit.sizes import divides, is_whole

MOST_BITS = 8
FEWEST_BITS = 2
BITS_OF_A_BYTE = 8
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class Quantized:
    """`codes` × `scale` ≈ the numbers: int8 codes of their shape, and a float32 scale a group along the last dim.

    `scale` has the shape of `codes` but for the last dim, which holds the groups: one, where a row has one scale.

    >>> q = quantize(torch.tensor([[1.0, -2.0], [100.0, 3.0]]))
    >>> q.codes.tolist(), q.num_bytes  # 4 codes and 2 scales
    ([[64, -127], [127, 4]], 12)
    """

    codes: torch.Tensor
    scale: torch.Tensor
    bits: int = MOST_BITS

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, packed to `bits` each and rounded up to whole bytes in all, and of scales."""
        code_bits = self.codes.numel() * self.bits
        return -(-code_bits // BITS_OF_A_BYTE) + self.scale.numel() * SCALE_BYTES

    def dequantize(self) -> torch.Tensor:
        """The numbers again, in float32: each within half a scale of what it was."""
        if not self.codes.numel():
            return self.codes.float()
        grouped = self.codes.unflatten(-1, (self.scale.shape[-1], -1)) * self.scale.unsqueeze(-1)
        return grouped.flatten(-2)

    def error_bound(self) -> torch.Tensor:
        """The largest possible error of each group: half a scale, rounding of float32 apart; the shape of `scale`."""
        return self.scale / 2


def quantize(numbers: torch.Tensor, bits: int = MOST_BITS, group: int | None = None) -> Quantized:
    """Symmetric quantisation: the largest absolute value of each group becomes the largest code, 2^(bits−1) − 1.

    `numbers` are floating point of shape (…, width). Groups are `group` neighbours along the last dim, by default the
    whole of it: one scale for each row of a weight, or for each token of an activation. One scale for all numbers:
    `quantize(numbers.flatten())`. A group of zeros has scale 1. Raises `InvalidInputError` for bits outside 2 to 8, a
    group that does not divide the last dim, and numbers that are whole, not finite, or a scalar.

    >>> quantize(torch.tensor([0.6, -1.0, 0.3, 0.01]), bits=4).codes.tolist()  # a scale of 1/7
    [4, -7, 2, 0]
    >>> quantize(torch.ones(4, 64), group=32).scale.shape
    torch.Size([4, 2])
    """
    width = _checked(numbers, bits)
    group = width if group is None else group
    if not is_whole(group) or group < 1:
        raise InvalidInputError.because("group", group, "must be a whole number, at least 1", f"use group={width}")
    divides("the last dim", width, "group", group)
    grouped = numbers.float().unflatten(-1, (width // group, group))
    largest_code = 2 ** (bits - 1) - 1
    largest = grouped.abs().amax(-1, keepdim=True)
    if not largest.isfinite().all():
        raise InvalidInputError.because(
            "numbers", "inf or nan", "only finite numbers have a scale", "look for the layer that overflows"
        )
    scale = (largest / largest_code).clamp(_SMALLEST_SCALE, _largest_scale(largest_code))
    scale = torch.where(largest == 0, 1.0, scale)
    codes = (grouped / scale).round().clamp(-largest_code, largest_code).to(torch.int8)
    return Quantized(codes.flatten(-2), scale.squeeze(-1), bits)


def _largest_scale(largest_code: int) -> float:
    """The largest float32 that is still finite when it is multiplied by the code."""
    scale = torch.tensor(torch.finfo(torch.float32).max) / largest_code
    return (scale if (scale * largest_code).isfinite() else scale.nextafter(torch.zeros(()))).item()


def _checked(numbers: torch.Tensor, bits: int) -> int:
    """The last dim of what can be quantised."""
    if not is_whole(bits) or not FEWEST_BITS <= bits <= MOST_BITS:
        raise InvalidInputError.because(
            "bits", bits, f"must be a whole number from {FEWEST_BITS} to {MOST_BITS}", "use bits=8"
        )
    if not isinstance(numbers, torch.Tensor) or not numbers.is_floating_point():
        kind = str(numbers.dtype) if isinstance(numbers, torch.Tensor) else type(numbers).__name__
        raise InvalidInputError.because("numbers", kind, "must be a floating-point tensor", "use numbers.float()")
    if not numbers.dim() or not numbers.shape[-1]:
        raise InvalidInputError.because(
            "numbers", tuple(numbers.shape), "must have a last dim of at least 1", "give a row of numbers"
        )
    return numbers.shape[-1]
