"""Building and simulating schedules, against a plain simulator that walks over objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import vizkit as vk
from tests.benchmarks.conftest import Compare, Row
from vizkit.schedules import Action, Cell

DURATIONS = vk.Durations(F=1, B=2)
ACTIONS_A_MICROBATCH = 2


def simulate_objects(rows: list[list[Cell]], seconds: Mapping[str, float]) -> dict[Action, float]:
    """When each action ends: rank after rank does its next action once its input is there, as plain simulators do it.

    It gets the schedule ready made; building one is left out of its time.
    """
    ends: dict[Action, float] = {}
    clocks, positions = [0.0] * len(rows), [0] * len(rows)
    last = max(action.stage for row in rows for (action,) in row)
    going = True
    while going:
        going = False
        for rank, row in enumerate(rows):
            while positions[rank] < len(row):
                (action,) = row[positions[rank]]
                step = -1 if action.kind == "F" else 1
                start = clocks[rank]
                if 0 <= action.stage + step <= last:
                    needed = Action(action.stage + step, action.kind, action.microbatch)
                    if needed not in ends:
                        break
                    start = max(start, ends[needed])
                clocks[rank] = ends[action] = start + seconds[action.kind]
                positions[rank] += 1
                going = True
    return ends


def microseconds_an_action(make: Callable[[], object], num_actions: int, repeats: int) -> float:
    """The quickest of several, in CPU microseconds: whatever else the machine does only adds."""
    quickest = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        make()
        quickest = min(quickest, time.process_time() - started)
    return quickest / num_actions * 1e6


def one_forward_one_backward(num_ranks: int, num_microbatches: int, repeats: int) -> float:
    """Microseconds an action of 1F1B, built and simulated."""
    return microseconds_an_action(
        lambda: vk.simulate(vk.schedule("1F1B", num_ranks=num_ranks, num_microbatches=num_microbatches), DURATIONS),
        ACTIONS_A_MICROBATCH * num_ranks * num_microbatches,
        repeats,
    )


def test_build_and_simulate(compare: Compare) -> None:
    """Half the time of the plain simulator for 512 actions, and a fifth for half a million."""
    for num_ranks, num_microbatches, repeats, limit in ((8, 32, 50, 0.5), (64, 4096, 2, 0.2)):
        schedule = vk.schedule("1F1B", num_ranks=num_ranks, num_microbatches=num_microbatches)
        rows = schedule.rows
        peer = microseconds_an_action(
            lambda rows=rows: simulate_objects(rows, {"F": 1.0, "B": 2.0}), len(schedule), max(repeats // 10, 1)
        )
        ours = one_forward_one_backward(num_ranks, num_microbatches, repeats)
        compare(
            Row(f"1F1B, {num_ranks} x {num_microbatches}, an action", ours, peer, "a walk over objects", "us", limit)
        )


def test_time_grows_with_the_number_of_actions(compare: Compare) -> None:
    """Sixteen times the microbatches take no longer an action: linear."""
    many, few = one_forward_one_backward(64, 4096, 2), one_forward_one_backward(64, 256, 5)
    compare(Row("1F1B, 64 x 4096, an action", many, few, "1F1B, 64 x 256, an action", "us", 1.5))
