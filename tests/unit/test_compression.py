"""Quantised numbers, messages and linear layers: error bounds, bytes, round trips, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from vizkit.errors import InvalidInputError
from vizkit.runtime.compression import (
    DynamicLinear,
    Quantized,
    dynamic_int8,
    message_bytes,
    model_bytes,
    quantize,
    received,
    shard,
    to_message,
    weight_only,
)
from vizkit.runtime.gpt import GPT, TINY

FINITE = st.floats(-(2.0**99), 2.0**99, width=32)
ROUNDING = 1e-5
"""Of float32, as a share of the largest number of a group."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(width: int = 24, out: int = 12, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(width, out, bias=bias).requires_grad_(False)


@given(st.lists(FINITE, min_size=4, max_size=24), st.integers(2, 8), st.sampled_from([1, 2, 4, None]))
def test_each_number_comes_back_within_half_a_scale(numbers: list[float], bits: int, group: int | None) -> None:
    """Whatever the numbers, the bits and the groups; codes stay within their bits."""
    row = torch.tensor(numbers[: len(numbers) // 4 * 4])
    q = quantize(row, bits, group)
    width = group or len(row)
    error = (q.dequantize() - row).abs().view(-1, width)
    largest = row.abs().view(-1, width).amax(-1)
    assert bool((error.amax(-1) <= q.error_bound() + ROUNDING * largest).all())
    assert int(q.codes.abs().max()) <= 2 ** (bits - 1) - 1


@given(st.lists(FINITE, min_size=1, max_size=16), st.integers(2, 8))
def test_quantising_twice_changes_nothing(numbers: list[float], bits: int) -> None:
    """Codes of what came back are the same codes."""
    q = quantize(torch.tensor(numbers), bits)
    assert torch.equal(quantize(q.dequantize(), bits).codes, q.codes)


@given(st.lists(FINITE, min_size=1, max_size=16))
def test_negative_numbers_have_negative_codes(numbers: list[float]) -> None:
    """Symmetric: no sign is preferred, and zero stays zero."""
    row = torch.tensor(numbers)
    assert torch.equal(quantize(-row).codes, -quantize(row).codes)
    assert quantize(torch.cat([row, torch.zeros(1)])).dequantize()[-1] == 0


@pytest.mark.parametrize(
    "shape, bits, group, num_bytes",
    [
        ((64, 256), 8, None, 64 * 256 + 64 * 4),
        ((64, 256), 4, None, 64 * 128 + 64 * 4),
        ((64, 256), 4, 32, 64 * 128 + 64 * 8 * 4),
        ((64, 256), 2, 64, 64 * 64 + 64 * 4 * 4),
        ((3,), 4, None, 2 + 4),
        ((3, 5), 3, None, 6 + 12),
        ((0, 5), 8, None, 0),
    ],
)
def test_bytes_are_codes_and_scales(shape: tuple[int, ...], bits: int, group: int | None, num_bytes: int) -> None:
    """`bits` for each code, rounded up to whole bytes in all, and 4 bytes for each scale."""
    assert quantize(drawn(*shape), bits, group).num_bytes == num_bytes


def test_an_outlier_spoils_only_its_own_group() -> None:
    """One number of 1,000 among ones costs its neighbours all their digits, and other groups nothing."""
    row = torch.ones(8)
    row[0] = 1000
    whole, halves = quantize(row).dequantize(), quantize(row, group=4).dequantize()
    assert whole[1:].tolist() == [0.0] * 7
    assert halves[1:4].tolist() == [0.0] * 3
    torch.testing.assert_close(halves[4:], torch.ones(4))


@pytest.mark.parametrize("numbers", [torch.zeros(3, 4), torch.full((2, 2), 1e-45), torch.empty(0, 4)])
def test_zeros_and_nothing_come_back(numbers: torch.Tensor) -> None:
    """A row of zeros has a scale too, and no division by zero; tiny numbers become zero."""
    q = quantize(numbers)
    assert torch.equal(q.dequantize(), torch.zeros_like(numbers))
    assert bool(q.scale.isfinite().all())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.ones(4), 1), "bits=1: must be a whole number from 2 to 8; use bits=8"),
        ((torch.ones(4), 9), "bits=9: must be a whole number from 2 to 8; use bits=8"),
        ((torch.ones(4), 8.0), "bits=8.0: must be a whole number from 2 to 8; use bits=8"),
        ((torch.ones(6), 8, 4), "group=4: does not divide the last dim=6; use group=3 or group=6"),
        ((torch.ones(6), 8, 0), "group=0: must be a whole number, at least 1; use group=6"),
        (([1.0], 8), "numbers='list': must be a floating-point tensor; use numbers.float()"),
        ((torch.arange(3), 8), "numbers='torch.int64': must be a floating-point tensor; use numbers.float()"),
        ((torch.tensor(1.0), 8), "numbers=(): must have a last dim of at least 1; give a row of numbers"),
        ((torch.ones(2, 0), 8), "numbers=(2, 0): must have a last dim of at least 1; give a row of numbers"),
        (
            (torch.tensor([1.0, torch.nan]), 8),
            "numbers='inf or nan': only finite numbers have a scale; look for the layer that overflows",
        ),
    ],
)
def test_what_cannot_be_quantised_is_refused(arguments: tuple, message: str) -> None:
    """Value, rule and remedy."""
    with pytest.raises(InvalidInputError) as refusal:
        quantize(*arguments)
    assert str(refusal.value) == message


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 99))
def test_a_message_has_a_byte_a_number_and_four_a_token(tokens: int, width: int, seed: int) -> None:
    """And arrives as what `quantize` makes of it, to the last bit, also in a part of a larger buffer."""
    numbers = drawn(tokens, width, seed=seed)
    message = to_message(numbers)
    assert message.nbytes == message_bytes(tokens, width) == tokens * (width + 4)
    assert torch.equal(received(message), quantize(numbers).dequantize())
    shifted = torch.cat([torch.zeros(1, dtype=torch.int8), message.flatten()])[1:].view_as(message)
    assert torch.equal(received(shifted), received(message))


@pytest.mark.parametrize(
    "message, said",
    [
        (torch.ones(2, 8), "message='torch.float32 of shape (2, 8)'"),
        (torch.ones(2, 4, dtype=torch.int8), "message='torch.int8 of shape (2, 4)'"),
        (torch.tensor(1, dtype=torch.int8), "message='torch.int8 of shape ()'"),
    ],
)
def test_what_is_no_message_is_refused(message: torch.Tensor, said: str) -> None:
    """Scales stand behind the codes, four bytes a token."""
    with pytest.raises(InvalidInputError) as refusal:
        received(message)
    rule = "must be int8, with 4 bytes of scale after the codes; give what to_message returned"
    assert str(refusal.value) == f"{said}: {rule}"


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("width, group", [(24, None), (24, 8), (7, None)])
def test_weight_only_computes_with_the_weights_that_it_stores(bits: int, width: int, group: int | None) -> None:
    """The result is that of a plain linear layer with the weights that came back; odd widths too."""
    plain, x = linear(width), drawn(5, width)
    layer = weight_only(plain, bits, group)
    assert torch.equal(layer.weight, quantize(plain.weight, bits, group).dequantize())
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, plain.bias))


def test_dynamic_multiplies_codes_by_codes() -> None:
    """Exactly the sum of products of whole numbers, times both scales."""
    plain, x = linear(), drawn(2, 3, 24)
    tokens, weight = quantize(x), quantize(plain.weight)
    sums = (tokens.codes.long() @ weight.codes.long().t()).float()
    torch.testing.assert_close(dynamic_int8(plain)(x), sums * tokens.scale * weight.scale.t() + plain.bias)
    assert dynamic_int8(plain)(x[:, :0]).shape == (2, 0, 12)


@given(st.integers(1, 40), st.integers(0, 999))
def test_dynamic_errs_by_no_more_than_its_scales_allow(width: int, seed: int) -> None:
    """|error| ≤ Σ (|x| s_w + |w| s_x) / 2 + width · s_x s_w / 4, number by number."""
    x, plain = drawn(3, width, seed=seed), linear(width, 4, bias=False)
    s_x, s_w = quantize(x).scale, quantize(plain.weight).scale
    bound = x.abs().sum(1, keepdim=True) * s_w.t() / 2 + s_x * plain.weight.abs().sum(1) / 2 + width * s_x * s_w.t() / 4
    assert bool(((dynamic_int8(plain)(x) - plain(x)).abs() <= bound * 1.001 + 1e-6).all())


def test_a_whole_model_is_replaced_and_the_first_one_stays() -> None:
    """Each linear layer, by name, with a copy of what stands between; a quarter of the bytes, an eighth with 4 bits."""
    gpt = GPT(TINY)
    before = model_bytes(gpt)
    small, ids = dynamic_int8(gpt), torch.arange(8)[None]
    assert model_bytes(gpt) == before == 4 * TINY.num_params()
    assert isinstance(small.layers[3].feed_forward.down, DynamicLinear)
    assert not any(isinstance(part, nn.Linear) for part in small.modules())
    weights = [part.weight.numel() for part in gpt.modules() if isinstance(part, nn.Linear)]
    rows = sum(part.out_features for part in gpt.modules() if isinstance(part, nn.Linear))
    assert model_bytes(small) == before - 3 * sum(weights) + 4 * rows
    assert model_bytes(weight_only(gpt, bits=4)) == before - sum(weights) * 7 // 2 + 4 * rows
    assert (small(ids) - gpt(ids)).abs().max() < 0.1 * gpt(ids).abs().max()


MAKERS = {
    "plain": lambda layer: layer,
    "8 bits": weight_only,
    "4 bits": lambda layer: weight_only(layer, bits=4),
    "3 bits": lambda layer: weight_only(layer, bits=3),
    "4 bits in groups": lambda layer: weight_only(layer, bits=4, group=4),
}


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_shards_together_are_the_whole(make, parts: int) -> None:
    """Rows side by side, columns added up; the bias once."""
    whole, x = make(linear()), drawn(5, 24)
    rows = [shard(whole, 0, i, parts)(x) for i in range(parts)]
    torch.testing.assert_close(torch.cat(rows, dim=-1), whole(x))
    columns = [shard(whole, 1, i, parts)(x.chunk(parts, -1)[i]) for i in range(parts)]
    torch.testing.assert_close(sum(columns), whole(x))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_dynamic_shards_are_the_whole_where_scales_are(parts: int) -> None:
    """Rows exactly; columns once each shard knows the largest number of the whole token, and not before."""
    whole, x = dynamic_int8(linear()), drawn(5, 24)
    rows = [shard(whole, 0, i, parts)(x) for i in range(parts)]
    assert torch.equal(torch.cat(rows, dim=-1), whole(x))
    columns = [shard(whole, 1, i, parts) for i in range(parts)]
    own = sum(part(mine) for part, mine in zip(columns, x.chunk(parts, -1), strict=True))
    for part in columns:
        part.over_ranks = lambda largest: x.abs().amax(-1, keepdim=True)
    shared = sum(part(mine) for part, mine in zip(columns, x.chunk(parts, -1), strict=True))
    torch.testing.assert_close(shared, whole(x))
    assert torch.allclose(own, whole(x), atol=1e-6) == (parts == 1)


@pytest.mark.parametrize("make", [MAKERS["plain"], weight_only, dynamic_int8])
def test_a_shard_owns_its_bytes(make) -> None:
    """No view keeps the whole alive: parts of the weights are parts of the bytes."""
    whole = make(linear(bias=False))
    for dim in (0, 1):
        part = shard(whole, dim, 0, 2)
        scales = 0 if make is MAKERS["plain"] else (12 if dim == 1 else 6) * 4
        codes = model_bytes(whole) - (12 * 4 if scales else 0)
        assert model_bytes(part) == codes // 2 + scales


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((linear(), 0, 0, 5), "parts=5: does not divide out_features=12; use parts=4 or parts=6"),
        ((linear(), 1, 0, 5), "parts=5: does not divide in_features=24; use parts=4 or parts=6"),
        ((linear(), 2, 0, 2), "dim=2: a weight has rows and columns; use dim=0 or dim=1"),
        ((linear(), 0, 2, 2), "index=2: there are 2 parts; use 0 to 1"),
        ((linear(), 0, 0, 0), "parts=0: must be a whole number, at least 1; use parts=1"),
        ((nn.ReLU(), 0, 0, 2), "linear='ReLU': is no linear layer; give an nn.Linear"),
        (
            (weight_only(linear(), group=8), 1, 0, 2),
            "parts=2: does not divide groups=3; use parts=1 or parts=3",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(arguments: tuple, message: str) -> None:
    """Value, rule and remedy."""
    with pytest.raises(InvalidInputError) as refusal:
        shard(*arguments)
    assert str(refusal.value) == message


def test_a_model_without_linear_layers_is_refused() -> None:
    """Nothing would change, and nobody would notice."""
    with pytest.raises(InvalidInputError) as refusal:
        weight_only(nn.Sequential(nn.ReLU()))
    rule = "has no nn.Linear to quantise; give a model of linear layers"
    assert str(refusal.value) == f"module='Sequential': {rule}"


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_largest_float_comes_back_finite(bits: int) -> None:
    """Its code times a rounded scale would be infinite."""
    numbers = torch.tensor([torch.finfo(torch.float32).max, 1.0])
    assert torch.allclose(quantize(numbers, bits).dequantize()[0], numbers[0])


def test_a_layer_in_two_places_is_replaced_in_both() -> None:
    """By one and the same."""
    linear = nn.Linear(4, 4)
    small = dynamic_int8(nn.ModuleDict({"first": linear, "inner": nn.Sequential(nn.ReLU(), linear)}))
    assert isinstance(small["first"], DynamicLinear)
    assert small["inner"][1] is small["first"]


@pytest.mark.parametrize("make", [weight_only, dynamic_int8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_outputs_have_the_dtype_of_inputs(make, dtype: torch.dtype) -> None:
    """Whatever dtype the layer had, of a batch or of one token, as with `nn.Linear`."""
    linear, x = nn.Linear(5, 3), drawn(2, 5)
    out = make(linear.to(dtype))(x.to(dtype))
    assert out.dtype is dtype
    assert (out.float() - nn.functional.linear(x, linear.weight.float(), linear.bias.float())).abs().max() < 0.05
    assert torch.allclose(make(linear)(x[0].to(dtype)), out[0], rtol=1e-2)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    """Torch computes a pruned weight anew before each forward, until pruning is made permanent."""
    model = nn.Sequential(nn.Linear(4, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(InvalidInputError) as refusal:
        dynamic_int8(model)
    rule = "is computed anew before each forward, and cannot be copied"
    remedy = "make it permanent first, after pruning by prune.remove(layer, 'weight')"
    assert str(refusal.value) == f"module='0.weight': {rule}; {remedy}"
    prune.remove(model[0], "weight")
    assert (dynamic_int8(model)[0].weight == 0).sum() >= 8
    with pytest.raises(InvalidInputError, match=r"module='NoneType': is no nn\.Module; give a model"):
        dynamic_int8(None)


def test_scales_of_three_dims_follow_the_last() -> None:
    """A scale for each token of a batch of sequences."""
    q = quantize(drawn(2, 3, 8))
    assert q.scale.shape == (2, 3, 1)
    assert isinstance(q, Quantized)
    assert q.dequantize().shape == (2, 3, 8)
