"""Bytes of a key-value cache: the formula, what real caches hold, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vizkit as vk
from vizkit.memory import key_value_cache
from vizkit.runtime.gpt import GPT, TINY, KeyValueCache

LLAMA_2_7B = vk.Transformer(num_layers=32, hidden=4096, heads=32, vocab=32000, seq=4096)
LLAMA_2_70B = vk.Transformer(num_layers=80, hidden=8192, heads=64, kv_heads=8, vocab=32000, seq=4096)
PALM_540B = vk.Transformer(num_layers=118, hidden=18432, heads=48, kv_heads=1, vocab=256000, seq=2048)

KNOWN = [  # model, batch, tokens, bytes of 16-bit keys and values, by hand
    (LLAMA_2_7B, 1, 1, 524_288),  # 2 · 32 · 4096 · 2: half a MiB a token
    (LLAMA_2_7B, 1, 4096, 2 * 2**30),
    (LLAMA_2_70B, 1, 1, 327_680),  # 2 · 80 · 8 · 128 · 2: less than the small one needs
    (LLAMA_2_70B, 16, 4096, 20 * 2**30),
    (PALM_540B, 1, 1, 181_248),  # multi-query: one head of 384 for all 48 of the queries
]


@pytest.mark.parametrize(("model", "batch", "tokens", "expected"), KNOWN)
def test_bytes_by_hand(model: vk.Transformer, batch: int, tokens: int, expected: int) -> None:
    """Two tensors a layer, of key-value heads × head width for each token of each request."""
    assert key_value_cache(model, batch=batch, tokens=tokens) == expected


@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_a_real_cache_holds_just_that(kv_heads: int) -> None:
    """The tiny GPT's own cache, in 32 bits, with as many key-value heads as queries or fewer."""
    sizes = vk.Transformer(num_layers=3, hidden=64, heads=8, kv_heads=kv_heads, vocab=128, seq=32)
    cache = KeyValueCache()
    GPT(sizes)(torch.zeros(2, 7, dtype=torch.int64), cache)
    assert cache.num_bytes == key_value_cache(sizes, batch=2, tokens=7, number_bytes=4)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 64), st.integers(1, 64))
def test_shards_add_up(tp: int, pp: int, batch: int, tokens: int) -> None:
    """tp · pp ranks together hold what one process holds, and the cache grows with batch × tokens."""
    whole = key_value_cache(TINY, batch=batch, tokens=tokens)
    assert key_value_cache(TINY, batch=batch, tokens=tokens, tp=tp, pp=pp) * tp * pp == whole
    assert whole == batch * tokens * key_value_cache(TINY, tokens=1)


def test_the_length_is_the_models_unless_given() -> None:
    """A full cache has `seq` tokens."""
    assert key_value_cache(TINY) == key_value_cache(TINY, tokens=TINY.seq)


REFUSED = [
    ({"tp": 3}, "tp=3: does not divide key-value heads=8; use tp=2 or tp=4"),
    ({"pp": 3}, "pp=3: does not divide num_layers=4; use pp=2 or pp=4"),
    ({"batch": 0}, "batch=0: must be a whole number, at least 1; use batch=1"),
    ({"tokens": 1.5}, "tokens=1.5: must be a whole number, at least 1; use tokens=1"),
    ({"number_bytes": 0}, "number_bytes=0: must be over 0 and at most 8; use 2 for 16-bit numbers"),
    ({"number_bytes": True}, "number_bytes=True: must be over 0 and at most 8; use 2 for 16-bit numbers"),
]


@pytest.mark.parametrize(("sizes", "said"), REFUSED)
def test_what_cannot_be_is_refused(sizes: dict[str, float], said: str) -> None:
    """With the value, the rule and the nearest that works."""
    with pytest.raises(vk.InvalidInputError) as caught:
        key_value_cache(TINY, **sizes)  # type: ignore[arg-type]
    assert str(caught.value) == said


def test_grouped_queries_limit_the_ranks() -> None:
    """Eight key-value heads go round eight ranks and no further, however many query heads there are."""
    with pytest.raises(vk.InvalidInputError, match="tp=16: does not divide key-value heads=8; use tp=8"):
        key_value_cache(LLAMA_2_70B, tp=16)
