"""Fewer bytes and shorter waits: ways to tune the communication of data-parallel training, each on real ranks."""

from __future__ import annotations

from vizkit.runtime.compression import scales
from vizkit.runtime.tuning.comparison import LINKS, WORK, Comparison, Row, compare
from vizkit.runtime.tuning.hierarchical import Levels, hierarchical_all_reduce, two_levels
from vizkit.runtime.tuning.hooks import averaging, register
from vizkit.runtime.tuning.quantised import (
    BLOCK,
    dequantise,
    quantise,
    quantised_all_gather,
    quantised_all_reduce,
)
from vizkit.runtime.tuning.training import ShardedSGD, Trained, Trainer, accumulate, train
from vizkit.runtime.tuning.tunings import TUNINGS, Exchange, Tuning

__all__ = [
    "BLOCK",
    "LINKS",
    "TUNINGS",
    "WORK",
    "Comparison",
    "Exchange",
    "Levels",
    "Row",
    "ShardedSGD",
    "Trained",
    "Trainer",
    "Tuning",
    "accumulate",
    "averaging",
    "compare",
    "dequantise",
    "hierarchical_all_reduce",
    "quantise",
    "quantised_all_gather",
    "quantised_all_reduce",
    "register",
    "scales",
    "train",
    "two_levels",
]
