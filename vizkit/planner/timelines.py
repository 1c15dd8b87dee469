"""A predicted layout's pipeline as a trace: when each rank does what."""

from __future__ import annotations

import math

import numpy as np

from vizkit.hardware.cluster import Cluster
from vizkit.hardware.link import Link
from vizkit.layout import Layout
from vizkit.planner.program import Program
from vizkit.planner.stages import StageTime, check, stage_times
from vizkit.schedules.catalogue import schedule
from vizkit.simulator import simulate
from vizkit.sizes import whole_number
from vizkit.trace import Trace
from vizkit.transformer import Transformer


def timeline(
    model: Transformer,
    layout: Layout,
    cluster: Cluster,
    *,
    program: Program | None = None,
    most_microbatches: int | None = None,
) -> Trace:
    """The pipeline of one replica in one step, on the clock "ideal": `vk.simulate` of what `predict` computes.

    Forward and backward contain the communication that is exposed on the way, a hop takes what `predict` says; the
    optimizer and what replicas say to each other come after, and are not in the trace. `most_microbatches` shows a
    shorter step of so many: a multiple of pp, so that every schedule has it. Raises `InvalidInputError` as `predict`.

    >>> from vizkit.hardware import dgx_a100
    >>> gpt = Transformer(num_layers=32, hidden=4096, heads=32, vocab=51200, seq=2048)
    >>> trace = timeline(gpt, Layout(pp=4, dp=2, num_microbatches=64), dgx_a100(), most_microbatches=8)
    >>> trace.world_size, trace.clock.value
    (4, 'ideal')
    """
    program = Program() if program is None else program
    check(model, layout, cluster, program)
    p, m, v = layout.pp, layout.num_microbatches, layout.local_stages
    if most_microbatches is not None:
        most = whole_number("most_microbatches", most_microbatches)
        m = min(m, max(most // p, 1) * p)
    places = stage_times(model, layout, cluster, program)
    first, middle, last = (_times(place) for place in (places[0], places[1 if p > 2 else 0], places[-1]))
    times = np.tile(middle / v, (p * v, 1))
    times[0] += first - middle
    if p * v > 1:
        times[-1] += last - middle
    forward, backward, weights = times.T.tolist()
    hop_s = max(place.traffic.hop_s for place in places)
    durations = {"F": forward, "B": backward}
    if layout.schedule in _SPLIT:
        durations = {"F": forward, "I": (times[:, 1] - times[:, 2]).tolist(), "W": weights}
    return simulate(
        schedule(layout.schedule, num_ranks=p, num_microbatches=m, stages_per_rank=v),
        durations,
        Link(hop_s, math.inf) if hop_s else None,
        blocking_sends=not program.asynchronous_sends,
    )


def _times(place: StageTime) -> np.ndarray:
    """Seconds of a forward, a backward, and in it of the products for the weights."""
    return np.array([place.forward_s, place.backward_s, place.passes.matrix_forward])


_SPLIT = ("ZB-H1",)
"""Schedules that have the backward's two parts apart."""
