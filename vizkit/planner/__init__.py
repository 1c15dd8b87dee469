"""Which layout a model should train with on a cluster: how long a step takes, where the time goes, and why."""

from vizkit.planner.choices import Choice, Plan
from vizkit.planner.prediction import Prediction, predict
from vizkit.planner.program import Program
from vizkit.planner.search import plan
from vizkit.planner.timelines import timeline

__all__ = ["Choice", "Plan", "Prediction", "Program", "plan", "predict", "timeline"]
