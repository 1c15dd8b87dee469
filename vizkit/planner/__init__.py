"""Which layout a model should train with on a cluster: how long a step takes, where the time goes, and why."""

from vizkit.planner.prediction import Prediction, predict
from vizkit.planner.program import Program

__all__ = ["Prediction", "Program", "predict"]
