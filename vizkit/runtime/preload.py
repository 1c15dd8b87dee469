"""Imported by the process from which ranks are born: all that a rank is likely to need, imported and never run.

An operation on threads here would make the ranks hang, and an exception would end the server, so each import is
guarded.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal

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


def end_ranks(server: int) -> None:
    """The notebook is gone: end each rank with all that it has started, before the system ends the rank alone."""
    if os.getpid() != server:
        return
    with contextlib.suppress(OSError), open(f"/proc/{server}/task/{server}/children") as file:
        for rank in map(int, file.read().split()):
            with contextlib.suppress(OSError):
                os.killpg(rank, signal.SIGKILL)


for _name in NEEDED:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

os.setpgid(0, 0)  # what kills the notebook's whole process group leaves this one time to see to the ranks
atexit.register(end_ranks, os.getpid())

gc.collect()
gc.freeze()  # the collector then leaves these pages alone, and ranks go on sharing them
