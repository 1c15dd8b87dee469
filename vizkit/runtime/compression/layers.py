"""Linear layers with quantised weights, models that are made of them, and their shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Self

import torch
from torch import nn
from torch.nn import functional

from vizkit.errors import InvalidInputError
from vizkit.runtime.compression.quantized import MOST_BITS, Quantized, quantize
from vizkit.runtime.storages import bytes_by_storage
from vizkit.sizes import divides, whole_number

CODES_OF_A_BYTE = {4: 2}
"""For which bits several codes share a byte; other codes take a byte each."""


class WeightOnlyLinear(nn.Module):
    """Weights as codes, turned into float32 at each use; products are float32, and outputs have their inputs' dtype.

    Saves the memory that weights take, and the bytes that a decode reads where a fused kernel turns codes into numbers
    (this one writes them out). `weight` is the float32 weight that it computes with.

    >>> layer = weight_only(nn.Linear(64, 32), bits=4, group=32)
    >>> layer(torch.randn(5, 64)).shape, model_bytes(layer)  # half a byte a weight, 2 scales a row, the bias
    (torch.Size([5, 32]), 1408)
    """

    stored: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: Quantized, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.bits, (self.out_features, self.in_features) = weight.bits, weight.codes.shape
        self.register_buffer("stored", _packed(weight.codes, weight.bits))
        self.register_buffer("scale", weight.scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    @property
    def quantized(self) -> Quantized:
        """Codes of shape (out, in), a byte each, and their scales."""
        return Quantized(_unpacked(self.stored, self.bits, self.in_features), self.scale, self.bits)

    @property
    def weight(self) -> torch.Tensor:
        return self.quantized.dequantize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(x.float(), self.weight.float(), bias).to(x.dtype)

    def shard(self, dim: int, index: int, parts: int) -> Self:
        """Rows (dim 0) or columns (dim 1) of the same codes; scales belong to the whole, so all shards share them."""
        whole, bias = self.quantized, self.bias
        if dim == 1 and whole.scale.shape[1] > 1:
            divides("groups", whole.scale.shape[1], "parts", parts)
        by_column = dim == 1 and whole.scale.shape[1] == 1
        scale = whole.scale if by_column else whole.scale.chunk(parts, dim)[index]
        codes = whole.codes.chunk(parts, dim)[index]
        part = Quantized(codes.clone(), scale.clone(), self.bits)
        return type(self)(part, _bias_of_shard(bias, dim, index, parts))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bits={self.bits}, bias={self.bias is not None}"


class DynamicLinear(WeightOnlyLinear):
    """Weights and inputs as int8: whole numbers are multiplied and added, in 32 bits, and scaled at the end.

    For inference: no gradient passes. Each token's scale is found when it comes ("dynamic"). `over_ranks(largest)` may
    replace each token's largest absolute value, of shape (…, 1), by that of all ranks, where each has a shard of the
    inputs.

    >>> linear, x = nn.Linear(64, 32), torch.randn(5, 64)
    >>> bool((dynamic_int8(linear)(x) - linear(x)).abs().max() < 0.02)
    True
    """

    over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 1:
            return self(x.unsqueeze(0)).squeeze(0)
        tokens = self._quantized_input(x)
        sums = torch._int_mm(tokens.codes.flatten(0, -2), self.stored.t())
        out = sums.unflatten(0, x.shape[:-1]) * tokens.scale * self.scale.t().float()
        return (out if self.bias is None else out + self.bias.float()).to(x.dtype)

    def _quantized_input(self, x: torch.Tensor) -> Quantized:
        if self.over_ranks is None:
            return quantize(x)
        largest = self.over_ranks(x.detach().abs().amax(-1, keepdim=True))
        # the token's largest value of all ranks stands in as one more number, which sets the scale
        with_largest = quantize(torch.cat([x, largest], dim=-1))
        return Quantized(with_largest.codes[..., :-1].contiguous(), with_largest.scale)


def weight_only(module: nn.Module, bits: int = MOST_BITS, group: int | None = None) -> nn.Module:
    """A copy of a linear layer, or of a model with all its linear layers replaced, with weights in `bits` bits.

    One scale for each row of a weight, or for each `group` neighbours in it. A layer in several places stays one.
    Raises `InvalidInputError` as `quantize` does, for a module without linear layers, and for one that cannot be
    copied, such as one with pruning that is not permanent yet.

    >>> weight_only(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), bits=4)
    Sequential(
      (0): WeightOnlyLinear(8, 4, bits=4, bias=True)
      (1): ReLU()
    )
    """
    return _replaced(
        module, lambda linear: WeightOnlyLinear(quantize(linear.weight.detach(), bits, group), linear.bias)
    )


def dynamic_int8(module: nn.Module) -> nn.Module:
    """A copy of a linear layer, or of a model with all its linear layers replaced, that multiplies int8 by int8.

    One scale for each row of a weight and for each token. Raises `InvalidInputError` as `weight_only` does.
    """
    return _replaced(module, lambda linear: DynamicLinear(quantize(linear.weight.detach()), linear.bias))


def model_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared storages once.

    >>> model_bytes(nn.Linear(8, 4)), model_bytes(dynamic_int8(nn.Linear(8, 4)))
    (144, 64)
    """
    return sum(bytes_by_storage([*module.parameters(), *module.buffers()]).values())


def shard(linear: nn.Module, dim: int, index: int, parts: int) -> nn.Module:
    """Part `index` of `parts` of a linear layer, plain or quantised: its rows (dim 0) or its columns (dim 1).

    Column-wise parallelism keeps rows, as `nn.Linear` stores its weight transposed; row-wise parallelism keeps columns,
    and its results are summands: part 0 has the bias. Raises `InvalidInputError` where `parts` does not divide.

    >>> shard(nn.Linear(8, 4), dim=1, index=1, parts=2)
    Linear(in_features=4, out_features=4, bias=False)
    """
    parts = whole_number("parts", parts)
    if dim not in (0, 1):
        raise InvalidInputError.because("dim", dim, "a weight has rows and columns", "use dim=0 or dim=1")
    if not isinstance(linear, (nn.Linear, WeightOnlyLinear)):
        raise InvalidInputError.because("linear", type(linear).__name__, "is no linear layer", "give an nn.Linear")
    sizes = {0: ("out_features", linear.out_features), 1: ("in_features", linear.in_features)}
    divides(*sizes[dim], "parts", parts)
    if index not in range(parts):
        raise InvalidInputError.because("index", index, f"there are {parts} parts", f"use 0 to {parts - 1}")
    if isinstance(linear, WeightOnlyLinear):
        return linear.shard(dim, index, parts)
    weight = linear.weight.detach().chunk(parts, dim)[index].clone()
    bias = _bias_of_shard(linear.bias, dim, index, parts)
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    part.weight = nn.Parameter(weight, linear.weight.requires_grad)
    if bias is not None:
        part.bias = nn.Parameter(bias, linear.weight.requires_grad)
    return part


def _bias_of_shard(bias: torch.Tensor | None, dim: int, index: int, parts: int) -> torch.Tensor | None:
    """Rows have their part of it; columns are summands, and it must be added once."""
    if bias is None or (dim == 1 and index > 0):
        return None
    return (bias.detach().chunk(parts)[index] if dim == 0 else bias.detach()).clone()


def _replaced(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    if isinstance(module, nn.Linear):
        return make(module)
    new = _copied(module)
    # a layer may be in several places, and all of them get the same new one
    linears = [(name, p) for name, p in new.named_modules(remove_duplicate=False) if isinstance(p, nn.Linear)]
    if not linears:
        raise InvalidInputError.because(
            "module", type(module).__name__, "has no nn.Linear to quantise", "give a model of linear layers"
        )
    made = {linear: make(linear) for linear in dict.fromkeys(linear for _, linear in linears)}
    for name, linear in linears:
        new.set_submodule(name, made[linear])
    return new


def _copied(module: nn.Module) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise InvalidInputError.because("module", type(module).__name__, "is no nn.Module", "give a model")
    for name, part in module.named_modules():
        computed = [key for key, value in vars(part).items() if isinstance(value, torch.Tensor) and not value.is_leaf]
        if computed:
            raise InvalidInputError.because(
                "module",
                f"{name}.{computed[0]}".lstrip("."),
                "is computed anew before each forward, and cannot be copied",
                f"make it permanent first, after pruning by prune.remove(layer, {computed[0]!r})",
            )
    return copy.deepcopy(module)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Two codes of 4 bits in a byte, the first in the lower half; a last code without neighbour has its own byte."""
    if bits not in CODES_OF_A_BYTE:
        return codes.contiguous()
    pairs = functional.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return (pairs[..., 0] & 0x0F) | (pairs[..., 1] << 4)


def _unpacked(stored: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    if bits not in CODES_OF_A_BYTE:
        return stored
    lower, upper = (stored << 4) >> 4, stored >> 4  # shifts of int8 keep the sign
    return torch.stack([lower, upper], dim=-1).flatten(-2)[:, :width]
