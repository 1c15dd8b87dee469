"""Drawing many spans, against Plotly's own timeline of the same spans."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import pandas as pd
import plotly.express as px

import vizkit as vk
from tests.benchmarks.conftest import Compare, Row
from vizkit.trace import COMPUTE_KINDS

MANY, A_MILLION = 10_000, 1_000_000


def trace_of(num_spans: int, world_size: int = 8) -> vk.Trace:
    """Back-to-back compute of all kinds on eight ranks, of uneven lengths."""
    random = np.random.default_rng(0)
    a_rank = num_spans // world_size
    ends = np.cumsum(random.integers(1_000, 100_000, (world_size, a_rank)), axis=1)
    starts = np.concatenate([np.zeros((world_size, 1), np.int64), ends[:, :-1]], axis=1)
    return vk.Trace.from_columns(
        clock="virtual",
        rank=np.repeat(np.arange(world_size), a_rank),
        kind=random.integers(0, len(COMPUTE_KINDS), num_spans),
        start_ns=starts.ravel(),
        end_ns=ends.ravel(),
    )


def timed(function: Callable[[], str], repeats: int) -> tuple[float, int]:
    """Median CPU seconds, and the length of what came."""
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        length = len(function())
        seconds.append(time.process_time() - started)
    return median(seconds), length


def plotlys_own(trace: vk.Trace) -> str:
    frame = trace.to_frame()
    frame["rank"] = frame["rank"].astype(str)
    for column in ("start_ns", "end_ns"):
        frame[column] = pd.to_datetime(frame[column])
    return px.timeline(frame, x_start="start_ns", x_end="end_ns", y="rank", color="kind").to_json()


def test_ten_thousand_spans(compare: Compare) -> None:
    """At most four times the time of Plotly's bare timeline and 2.5 times its bytes, with animation and hover."""
    trace = trace_of(MANY)
    ours_s, ours_bytes = timed(lambda: vk.timeline(trace).to_json(), 3)
    peer_s, peer_bytes = timed(lambda: plotlys_own(trace), 3)
    compare(Row("timeline of 10,000 spans, built and serialised", ours_s, peer_s, "plotly.express.timeline", "s", 4.0))
    what = "timeline of 10,000 spans, size of its JSON"
    compare(Row(what, ours_bytes / 1e6, peer_bytes / 1e6, "plotly.express.timeline", "MB", 2.5))


def test_a_million_spans(compare: Compare) -> None:
    """A hundred times as many spans as Plotly draws take at most fifteen times as long."""
    ours_s, _ = timed(lambda: vk.timeline(trace_of(A_MILLION)).to_json(), 2)
    peer_s, _ = timed(lambda: plotlys_own(trace_of(MANY)), 3)
    what = "timeline of 1,000,000 spans, built and serialised"
    compare(Row(what, ours_s, peer_s, "plotly.express.timeline of 10,000", "s", 15.0))
