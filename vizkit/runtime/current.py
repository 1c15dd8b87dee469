"""The rank that this process is; empty everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Rank:
    """What code inside a rank may ask for."""

    board: Any = None
    live: Any = None


_THIS = Rank()


def board() -> Any:
    """This rank's board, or None outside a rank."""
    return _THIS.board


def live() -> Any:
    """What this rank tells the live view, or None where nobody watches and outside a rank."""
    return _THIS.live


def become(board: Any, live: Any = None) -> None:
    """Called once by the worker: this process is a rank from now on."""
    _THIS.board = board
    _THIS.live = live
