"""Numbers in eight bits: blocks of int8 with a scale each, and collectives that send those in place of fp32."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from vizkit.collectives.exchanges import SCALE_BYTES
from vizkit.errors import InvalidInputError
from vizkit.runtime.compression import received, to_message
from vizkit.sizes import whole_number

BLOCK = 256


def quantise(x: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """`x` in int8: one row for each block of `block` numbers, with its fp32 scale in the last four bytes.

    Rows are messages of `vizkit.runtime.compression`: no number is off by more than half its block's scale. A block
    with an infinity or a NaN comes back as NaNs, so that a loss scaler sees it. The last block is filled up with zeros.
    Raises `InvalidInputError` for what is no floating-point tensor.

    >>> rows = quantise(torch.tensor([0.0, 1.0, -254.0, 100.4]), block=4)
    >>> rows.shape, dequantise(rows)
    (torch.Size([1, 8]), tensor([   0.,    0., -254.,  100.]))
    """
    whole_number("block", block)
    if not x.is_floating_point():
        raise InvalidInputError.because("x", x.dtype, "only floating-point numbers are quantised", "use x.float()")
    flat = x.detach().flatten().float()
    blocks = pad(flat, (0, -len(flat) % block)).view(-(-len(flat) // block), block)
    is_finite = blocks.isfinite().all(dim=1)
    rows = to_message(torch.where(is_finite[:, None], blocks, 0.0))
    rows[~is_finite, -SCALE_BYTES:] = torch.tensor([torch.nan], device=rows.device).view(torch.int8)
    return rows


def dequantise(rows: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers of `quantise`'s rows, one after the other; what filled the last block is at the end."""
    return received(rows).flatten()


def quantised_all_gather(
    part: torch.Tensor, group: dist.ProcessGroup | None = None, block: int = BLOCK
) -> torch.Tensor:
    """The parts of all ranks, one after the other and each within half a scale, from an all-gather of int8.

    Parts are flat and equally long. What comes back is the same on each rank, also where it holds the rank's own part.
    Bytes: `vizkit.collectives.exchanges.quantised_all_gather`; the quantised weight communication of ZeRO++ (Wang et
    al., 2023, arXiv:2306.10209) is this.
    """
    rows = quantise(part, block)
    ranks = dist.get_world_size(group)
    gathered = rows.new_empty(ranks * len(rows), rows.shape[1])
    dist.all_gather_single(gathered, rows, group=group)
    return dequantise(gathered).view(ranks, -1)[:, : part.numel()].flatten().to(part.dtype)


def quantised_all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None = None, block: int = BLOCK) -> None:
    """Puts the sum over the ranks into `x`, within rounding: each rank's numbers, and their sums, go out as int8.

    An all-to-all brings each rank its share of everybody's numbers, which it adds in fp32, and an all-gather brings
    back the sums; numbers are quantised once before each, not in every step of a ring. The result is the same on each
    rank, and off by at most half of every rank's scale there plus half of the sum's. Bytes:
    `vizkit.collectives.exchanges.quantised_all_reduce`.
    """
    x, ranks = x.detach(), dist.get_world_size(group)
    flat = x.flatten()
    share = -(-len(flat) // ranks)
    rows = torch.cat([quantise(part, block) for part in pad(flat, (0, ranks * share - len(flat))).view(ranks, share)])
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    mine = dequantise(received).view(ranks, -1)[:, :share].sum(dim=0)
    x.copy_(quantised_all_gather(mine, group, block)[: len(flat)].view_as(x))
