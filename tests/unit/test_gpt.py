"""The model and the text that the lessons share."""

from __future__ import annotations

import math

import pytest
import torch

import vizkit as vk
from vizkit.runtime.gpt import GPT, TINY, KeyValueCache, generate, loss
from vizkit.runtime.text import Text, topics

SIZES = [
    TINY,
    vk.Transformer(num_layers=2, hidden=32, heads=4, vocab=128, seq=16),
    vk.Transformer(num_layers=1, hidden=32, heads=4, kv_heads=2, vocab=128, seq=16, final_norm=True, bias=False),
    vk.Transformer(num_layers=1, hidden=24, heads=3, kv_heads=1, vocab=50, seq=16, ffn_hidden=40),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_has_just_the_parameters_that_its_sizes_say(sizes: vk.Transformer) -> None:
    """The formula and the module count the same."""
    assert sum(p.numel() for p in GPT(sizes).parameters()) == sizes.num_params()


def test_tiny_is_what_its_docstring_says() -> None:
    """Enough to learn a little, and to see in memory."""
    assert TINY.num_params() == 220_544


@pytest.mark.parametrize("sizes", SIZES)
def test_a_cache_changes_nothing(sizes: vk.Transformer) -> None:
    """Token by token with a cache, in pieces, or all at once: the same logits."""
    model, ids = GPT(sizes), torch.randint(sizes.vocab, (2, 9), generator=torch.Generator().manual_seed(1))
    cache = KeyValueCache()
    pieces = [model(piece, cache) for piece in ids.split([4, 1, 3, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids))
    assert cache.num_tokens == 9
    assert cache.num_bytes == sizes.num_layers * 2 * 2 * 9 * sizes.key_value_width * 4


def test_no_token_sees_a_later_one() -> None:
    """Another last token changes the last logits only."""
    model, ids = GPT(TINY), torch.arange(10)[None]
    other = ids.clone()
    other[0, -1] = 99
    assert torch.equal(model(ids)[:, :-1], model(other)[:, :-1])
    assert not torch.equal(model(ids)[:, -1], model(other)[:, -1])


def test_the_seed_alone_decides_the_weights() -> None:
    """And the caller's random numbers stay as they were."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = GPT(TINY, seed=1)
    assert torch.equal(torch.rand(3), expected)
    same, other = GPT(TINY, seed=1), GPT(TINY, seed=2)
    assert torch.equal(first.head.logits.weight, same.head.logits.weight)
    assert not torch.equal(first.head.logits.weight, other.head.logits.weight)


def test_the_loss_falls_on_real_text() -> None:
    """From about ln 128 = 4.85 nats a character, by a nat and a half in 60 steps."""
    text, model = topics(), GPT(TINY)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for step in range(60):
        x, y = text.batch(step, batch=8, seq=32)
        value = loss(model(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[0] == pytest.approx(math.log(128), abs=0.4)
    assert sum(losses[-10:]) / 10 < losses[0] - 1.5


def test_sequence_has_the_same_modules() -> None:
    """For pipelines: the whole model in a row."""
    model, ids = GPT(TINY), torch.arange(8)[None]
    assert torch.equal(model.sequence()(ids), model(ids))


def test_generates_what_no_cache_generates() -> None:
    """Greedy decoding with a cache takes the likeliest token of the whole sequence each time."""
    model, ids = GPT(TINY), torch.arange(6)[None]
    slow = ids
    for _ in range(5):
        slow = torch.cat([slow, model(slow)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generate(model, ids, 5), slow)


def test_what_the_model_lacks_is_said() -> None:
    """Formulas know more transformers than this one."""
    with pytest.raises(vk.InvalidInputError, match="gated=True: this model has gated=False; leave it"):
        GPT(vk.Transformer(num_layers=1, hidden=8, heads=1, vocab=8, seq=8, gated=True))


def test_text_reads_back() -> None:
    """Characters become numbers and characters again; the targets are the text one later."""
    text = topics()
    assert text.decode(Text.encode("for x in y:")) == "for x in y:"
    assert int(text.tokens.max()) < text.vocab
    x, y = text.batch(3, batch=4, seq=10)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(x, text.batch(3, batch=4, seq=10)[0])
    with pytest.raises(vk.InvalidInputError, match="the text has 3 tokens; use seq=2 at most"):
        Text(Text.encode("abc")).batch(0, batch=1, seq=3)
