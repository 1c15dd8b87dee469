"""Text to learn from that comes with Python: its language reference, character by character."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from vizkit.errors import InvalidInputError
from vizkit.sizes import whole_number

ASCII = 128
"""Token numbers are ASCII codes, so that the vocabulary divides by 2, 4 and 8; other characters read as "?"."""


@dataclass(frozen=True, eq=False)
class Text:
    """Characters as token numbers from 0 to `vocab` − 1, in one tensor of int64.

    >>> text = topics()
    >>> x, y = text.batch(step=0, batch=2, seq=8)
    >>> x.shape, bool((x[:, 1:] == y[:, :-1]).all())
    (torch.Size([2, 8]), True)
    """

    tokens: torch.Tensor
    vocab: int = ASCII

    def batch(self, step: int, batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`batch` pieces of `seq` tokens, and for each token the one that follows: both of shape (batch, seq).

        The same on every rank for the same step. Raises `InvalidInputError` for a piece longer than the text.
        """
        whole_number("batch", batch)
        starts = len(self.tokens) - whole_number("seq", seq)
        if starts < 1:
            raise InvalidInputError.because(
                "seq", seq, f"the text has {len(self.tokens)} tokens", f"use seq={len(self.tokens) - 1} at most"
            )
        chosen = torch.randint(starts, (batch,), generator=torch.Generator().manual_seed(step))
        pieces = self.tokens[chosen[:, None] + torch.arange(seq + 1)]
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()

    def decode(self, tokens: torch.Tensor) -> str:
        """The characters of one row of token numbers."""
        return "".join(map(chr, tokens.tolist()))

    @staticmethod
    def encode(characters: str) -> torch.Tensor:
        """
        >>> Text.encode("ab…").tolist()
        [97, 98, 63]
        """
        return torch.tensor(list(characters.encode("ascii", "replace")), dtype=torch.int64)


@functools.lru_cache(maxsize=1)
def topics() -> Text:
    """The help topics of Python (`pydoc_data.topics`), half a million characters; they differ with its version."""
    from pydoc_data.topics import topics as by_name

    return Text(Text.encode("\n".join(by_name[name] for name in sorted(by_name))))
