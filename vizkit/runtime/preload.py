"""Imported by the process from which ranks are born: all that a rank is likely to need, imported and never run.

An operation on threads here would make the ranks hang, and an exception would end the server, so each import is
guarded.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

NEEDED = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch._dynamo",  # without it each launch that touches DDP pays two seconds
    "cloudpickle",
    "vizkit.runtime.worker",
)

for _name in NEEDED:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

gc.collect()
gc.freeze()  # the collector then leaves these pages alone, and ranks go on sharing them
