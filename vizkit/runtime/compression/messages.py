"""Activations in 8 bits on the wire: codes and scales of each token in one message of bytes."""

from __future__ import annotations

import torch

from vizkit.collectives.exchanges import SCALE_BYTES
from vizkit.errors import InvalidInputError
from vizkit.runtime.compression.quantized import Quantized, quantize
from vizkit.sizes import whole_number


def message_bytes(num_tokens: int, width: int) -> int:
    """Bytes of a message: for each token `width` codes of one byte and a scale of four.

    >>> message_bytes(num_tokens=8, width=64), 8 * 64 * 4  # in place of float32
    (544, 2048)
    """
    return whole_number("num_tokens", num_tokens) * (whole_number("width", width) + SCALE_BYTES)


def to_message(numbers: torch.Tensor) -> torch.Tensor:
    """What to send in place of `numbers` of shape (…, width): int8 of shape (…, width + 4), a scale for each token.

    Raises `InvalidInputError` as `quantize` does.

    >>> to_message(torch.randn(2, 8, 64)).shape
    torch.Size([2, 8, 68])
    """
    quantized = quantize(numbers)
    scale = quantized.scale.flatten().view(torch.int8).view(*numbers.shape[:-1], SCALE_BYTES)
    return torch.cat([quantized.codes, scale], dim=-1)


def received(message: torch.Tensor) -> torch.Tensor:
    """The numbers of a message, in float32: of shape (…, width), each within half its token's scale.

    Raises `InvalidInputError` for what is no message.

    >>> received(to_message(torch.tensor([[127.0, -3.0]]))).tolist()
    [[127.0, -3.0]]
    """
    if message.dtype is not torch.int8 or not message.dim() or message.shape[-1] <= SCALE_BYTES:
        raise InvalidInputError.because(
            "message",
            f"{message.dtype} of shape {tuple(message.shape)}",
            f"must be int8, with {SCALE_BYTES} bytes of scale after the codes",
            "give what to_message returned",
        )
    return Quantized(message[..., :-SCALE_BYTES], scales(message).unsqueeze(-1)).dequantize()


def scales(message: torch.Tensor) -> torch.Tensor:
    """The scale of each token, in float32: half of it is by how much a number of that token may be off."""
    aligned = message[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)  # float32 must be aligned
    return aligned.flatten().view(torch.float32).view(message.shape[:-1])
