"""Views that a kernel drives, with controls that the keyboard reaches."""

from __future__ import annotations

from vizkit.widgets.mesh_explorer import MeshExplorer, mesh_explorer
from vizkit.widgets.pipeline_explorer import PipelineExplorer, pipeline_explorer
from vizkit.widgets.plan_explorer import PlanExplorer, planner
from vizkit.widgets.player import Player, player
from vizkit.widgets.what_if import Explorer, explorer

__all__ = [
    "Explorer",
    "MeshExplorer",
    "PipelineExplorer",
    "PlanExplorer",
    "Player",
    "explorer",
    "mesh_explorer",
    "pipeline_explorer",
    "planner",
    "player",
]
