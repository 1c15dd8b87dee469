"""Views that a kernel drives, with controls that the keyboard reaches."""

from __future__ import annotations

from vizkit.widgets.pipeline_explorer import PipelineExplorer, pipeline_explorer
from vizkit.widgets.player import Player, player

__all__ = ["PipelineExplorer", "Player", "pipeline_explorer", "player"]
