"""Run parallel deep learning for real, and see what each device did.

Names resolve when they are first used, so that `import vizkit` loads neither torch nor plotly nor ipywidgets.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__version__ = "0.4.0"

_HOME_OF = {
    "Clock": "trace",
    "Counter": "trace",
    "Role": "trace",
    "Span": "trace",
    "SpanKind": "trace",
    "Trace": "trace",
    "as_grid": "grid",
    "Link": "hardware",
    "FREE_LINK": "hardware",
    "Durations": "durations",
    "Mesh": "mesh",
    "Action": "schedules.actions",
    "Schedule": "schedules.schedule",
    "schedule": "schedules.catalogue",
    "schedule_names": "schedules.catalogue",
    "simulate": "simulator",
    "Transformer": "transformer",
    "Experts": "transformer",
    "fit_durations": "calibration",
    "FittedDurations": "calibration",
    "VizkitError": "errors",
    "InvalidInputError": "errors",
    "RankFailedError": "errors",
    "RanksStuckError": "errors",
    "RunStoppedError": "errors",
    "RankReport": "errors",
    "CollectiveMismatchError": "errors",
    "TransportError": "errors",
    "UnreadableTraceError": "errors",
    "read_trace": "formats.chrome",
    "write_chrome_trace": "formats.chrome",
    "launch": "runtime.launcher",
    "Run": "runtime.run",
    "span": "runtime.recorder",
    "device": "runtime.device",
    "pipeline": "runtime.pipeline",
    "Pipeline": "runtime.pipeline",
    "StepResult": "runtime.pipeline",
    "split_layers": "runtime.layers",
    "parity": "runtime.parity",
    "ledger": "ledgers",
    "Layout": "layout",
    "plan": "planner",
    "predict": "planner",
    "Plan": "planner",
    "Prediction": "planner",
    "plan_figure": "figures.plan",
    "diagnose": "findings",
    "Diagnosis": "findings",
    "Finding": "findings",
    "FindingKind": "findings",
    "fingerprint": "runtime.fingerprints",
    "log": "runtime.progress",
    "export": "exporting",
    "read_run": "formats.rank_folder",
    "save_run": "runtime.saving",
    "track_memory": "runtime.tensor_memory",
    "mesh_map": "figures.mesh_map",
    "sharding_map": "figures.sharding_map",
    "memory_figure": "figures.memory",
    "progress": "runtime.progress",
    "fitness": "runtime.fitness",
    "timeline": "figures.timeline",
    "compare": "figures.comparison",
    "pipeline_figure": "figures.pipeline",
    "traffic_map": "figures.traffic",
    "collective_steps": "figures.rings",
    "describe": "figures.describe",
    "to_html": "figures.html",
    "check": "exercises",
}
_MODULES = (
    "balance",
    "cluster_files",
    "collectives",
    "exercises",
    "figures",
    "hardware",
    "memory",
    "metrics",
    "replay",
    "runtime",
    "schedules",
    "volume",
    "widgets",
)

__all__ = sorted([*_HOME_OF, *_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"vizkit.{name}")
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"vizkit.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'vizkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


if "ipykernel" in sys.modules:  # the first launch in a notebook then does not wait for torch to be imported
    from vizkit.runtime.nursery import nursery

    nursery().warm_in_background()
