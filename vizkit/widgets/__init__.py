"""Views that a kernel drives, with controls that the keyboard reaches."""

from __future__ import annotations

from vizkit.widgets.player import Player, player

__all__ = ["Player", "player"]
