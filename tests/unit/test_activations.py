"""Activations held, read from the passes of any trace: what the simulator counts, without its counters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vizkit as vk
from tests import handmade
from vizkit.activations import held_activations
from vizkit.metrics import peak_activations
from vizkit.replay import replay
from vizkit.trace import Counter, Trace

UNIT = vk.Durations(F=1, I=1, W=1)


def at(counter: Counter, times_ns: np.ndarray) -> np.ndarray:
    """What holds just after each of these times."""
    where = np.searchsorted(counter.times_ns, times_ns, side="right") - 1
    return np.where(where >= 0, counter.values[where], 0)


@pytest.mark.parametrize("name", [name for name in vk.schedule_names() if name != "DualPipe"])
def test_a_replay_of_ranks_holds_what_the_simulator_says(name: str) -> None:
    """DualPipe aside, whose ranks hold every layer they own twice and which only the simulator runs."""
    schedule = vk.schedule(name, num_ranks=4, num_microbatches=8)
    ideal = vk.simulate(schedule, UNIT)
    virtual = replay(handmade.pipeline(schedule), link=None, durations=UNIT)
    found = held_activations(virtual)
    times = np.arange(0, ideal.extent_ns[1], 500_000_000)
    assert peak_activations(virtual).tolist() == pytest.approx(peak_activations(ideal).tolist())
    assert len(found) == len(ideal.counters) == 4
    for derived, counted in zip(found, ideal.counters, strict=True):
        assert at(derived, times) == pytest.approx(at(counted, times))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(2, 4))
def test_steps_one_after_the_other_hold_no_more_than_one(p: int, m: int, steps: int) -> None:
    """The same microbatch numbers come again in each step, and begin anew."""
    one = vk.simulate(vk.schedule("1F1B", num_ranks=p, num_microbatches=m), UNIT)
    several = Trace.merge([one.shift(step * one.duration_ns) for step in range(steps)])
    bare = replace(several, counters=())
    peaks = [counter.values.max() for counter in held_activations(bare)]
    assert peaks == peak_activations(one).tolist()


def test_spans_that_belong_to_no_stage_hold_nothing() -> None:
    """Data parallel steps, optimizer steps and waits give no counter."""
    spans = [vk.Span(0, "F", 0, 1), vk.Span(0, "B", 1, 2), vk.Span(0, "optimizer", 2, 3, stage=0, microbatch=0)]
    assert held_activations(Trace.from_spans(spans, clock="virtual")) == []
