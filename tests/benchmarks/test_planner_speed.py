"""A hundred thousand layouts a second: arrays against asking for one layout at a time."""

from __future__ import annotations

import time

import numpy as np
import pytest

import vizkit as vk
from tests.benchmarks.conftest import Compare, Row
from vizkit.hardware import dgx_a100
from vizkit.planner import Program, plan, predict
from vizkit.planner.columns import Columns
from vizkit.planner.places import memory_bytes
from vizkit.planner.space import Space
from vizkit.planner.steps import steps

GPT_175B = vk.Transformer(num_layers=96, hidden=12288, heads=96, vocab=51200, seq=2048)
CLUSTER = dgx_a100(num_nodes=64)
BATCH = 1536
EVERY = 2000
"""One in so many layouts is asked for by itself."""


def quickest(work, repeats: int = 3) -> float:
    """Seconds of CPU time: whatever else the machine does only adds."""
    found = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


@pytest.fixture(scope="module")
def rows() -> Columns:
    """Different layouts, in the order in which a plan goes through them."""
    chunks = Space().chunks(GPT_175B, CLUSTER.num_devices, BATCH)
    return Columns.join([chunk for chunk, _ in zip(chunks, range(3), strict=False)])


def test_time_and_memory_by_arrays(compare: Compare, rows: Columns) -> None:
    """Arrays take under a hundredth of the time of one prediction after another; both in microseconds a layout."""
    some = [rows.layout(at) for at in range(0, len(rows), EVERY)]
    program = Program()
    one = quickest(lambda: [predict(GPT_175B, layout, CLUSTER, program=program) for layout in some]) / len(some)
    many = quickest(lambda: steps(GPT_175B, rows, CLUSTER, program)) / len(rows)
    compare(Row(f"planner, {len(rows):,} layouts by arrays", many * 1e6, one * 1e6, "predict, one by one", "us", 0.01))
    expected = [predict(GPT_175B, layout, CLUSTER, program=program).step_s for layout in some]
    assert steps(GPT_175B, rows, CLUSTER, program).step_s[::EVERY] == pytest.approx(np.array(expected), rel=1e-9)


def test_memory_alone_by_arrays(compare: Compare, rows: Columns) -> None:
    """Where only what fits is asked for."""
    some = [rows.layout(at) for at in range(0, len(rows), EVERY)]
    one = quickest(lambda: [vk.memory.per_rank(GPT_175B, layout) for layout in some], 5) / len(some)
    many = quickest(lambda: memory_bytes(GPT_175B, rows, True)) / len(rows)
    compare(Row("planner, bytes by arrays", many * 1e6, one * 1e6, "vk.memory.per_rank", "us", 0.1))


def test_a_whole_plan(compare: Compare, rows: Columns) -> None:
    """Listing, predicting and ranking take no more than three times the prediction by arrays."""
    many = quickest(lambda: steps(GPT_175B, rows, CLUSTER, Program())) / len(rows)
    found = plan(GPT_175B, CLUSTER, BATCH)
    whole = quickest(lambda: plan(GPT_175B, CLUSTER, BATCH)) / found.considered
    compare(Row(f"planner, {found.considered:,} layouts ranked", whole * 1e6, many * 1e6, "arrays alone", "us", 3.0))
