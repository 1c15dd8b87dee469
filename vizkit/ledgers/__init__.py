"""The ledger: bytes that ranks moved, by axis of the mesh and kind, beside what the formulas say of them."""

from __future__ import annotations

from vizkit.ledgers.book import Ledger, Row, ledger
from vizkit.ledgers.explanations import Cause, Explanation, ShardedMovement

__all__ = ["Cause", "Explanation", "Ledger", "Row", "ShardedMovement", "ledger"]
