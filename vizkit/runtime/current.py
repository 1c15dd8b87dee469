"""The rank that this process is; empty everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Rank:
    """What code inside a rank may ask for."""

    board: Any = None


_THIS = Rank()


def board() -> Any:
    """This rank's board, or None outside a rank."""
    return _THIS.board


def become(board: Any) -> None:
    """Called once by the worker: this process is a rank from now on."""
    _THIS.board = board
