"""Bytes of keys and values that a rank keeps while it generates."""

from __future__ import annotations

from vizkit.errors import InvalidInputError
from vizkit.sizes import divides, whole_number
from vizkit.transformer import Transformer

_LONGEST_NUMBER_BYTES = 8


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
    requests = whole_number("batch", batch)
    length = whole_number("tokens", model.seq if tokens is None else tokens)
    divides("key-value heads", model.key_value_heads, "tp", whole_number("tp", tp))
    divides("num_layers", model.num_layers, "pp", whole_number("pp", pp))
    is_number = isinstance(number_bytes, (int, float)) and not isinstance(number_bytes, bool)
    if not is_number or not 0 < number_bytes <= _LONGEST_NUMBER_BYTES:
        raise InvalidInputError.because(
            "number_bytes", number_bytes, "must be over 0 and at most 8", "use 2 for 16-bit numbers"
        )
    heads, layers = model.key_value_heads // tp, model.num_layers // pp
    return 2 * layers * heads * (model.hidden // model.heads) * length * requests * number_bytes
