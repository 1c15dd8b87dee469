"""Bytes of keys and values that a rank keeps while it generates."""

from __future__ import annotations

from vizkit.sizes import divides, number_width, whole_number
from vizkit.transformer import Transformer, check_model


def key_value_cache(
    model: Transformer, *, batch: int = 1, tokens: int | None = None, tp: int = 1, pp: int = 1, number_bytes: float = 2
) -> float:
    """Bytes on one rank: 2 · layers · key-value heads · head width · tokens · batch · `number_bytes` / (tp · pp).

    The 2 is for keys and values (Pope et al., 2022, arXiv:2211.05102, section 2.2). `tokens` are those of one request
    so far, prompt and generated (default: the model's `seq`). `tp` shards the heads, `pp` the layers; replicas share
    nothing. `number_bytes` is 2 for 16 bits, 4 for 32, 0.5 for 4. Raises `InvalidInputError` where `tp` does not divide
    the key-value heads or `pp` the layers.

    >>> llama_2_7b = Transformer(num_layers=32, hidden=4096, heads=32, vocab=32000, seq=4096)
    >>> key_value_cache(llama_2_7b, tokens=1) / 2**10, key_value_cache(llama_2_7b, batch=8, tp=4) / 2**30  # KiB, GiB
    (512.0, 4.0)
    """
    check_model(model)
    requests = whole_number("batch", batch)
    length = whole_number("tokens", model.seq if tokens is None else tokens)
    tp, pp, number_bytes = whole_number("tp", tp), whole_number("pp", pp), number_width("number_bytes", number_bytes)
    divides("key-value heads", model.key_value_heads, "tp", tp)
    divides("num_layers", model.num_layers, "pp", pp)
    heads, layers = model.key_value_heads // tp, model.num_layers // pp
    return 2 * layers * heads * (model.hidden // model.heads) * length * requests * number_bytes
