"""Traces whose ranks are called otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vizkit.trace import Trace


def renumbered(trace: Trace, new: np.ndarray) -> Trace:
    """The same trace, in which rank r is called `new[r]`."""
    spans = [
        replace(
            span,
            rank=int(new[span.rank]),
            peer=int(new[span.peer]) if span.peer >= 0 else span.peer,
            group=tuple(int(new[member]) for member in span.group),
        )
        for span in trace
    ]
    counters = [replace(counter, rank=int(new[counter.rank])) for counter in trace.counters]
    return Trace.from_spans(
        spans, clock=trace.clock, world_size=trace.world_size, counters=counters, notes=dict(trace.notes)
    )
