"""Building and simulating schedules, against a plain simulator that walks over objects."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import vizkit as vk
from tests.benchmarks.conftest import Compare, Row
from tests.benchmarks.test_figure_speed import plotlys_own, timed
from vizkit.figures.explorer import ExplorerSettings, explorer_json
from vizkit.schedules import Action
from vizkit.trace import SpanKind

DURATIONS = vk.Durations(F=1, B=2)
ACTIONS_A_MICROBATCH = 2


def plain(num_ranks: int, num_microbatches: int) -> dict[Action, float]:
    """When each action of 1F1B ends, as plain simulators do it: lists of objects, walked rank after rank."""
    rows = []
    for rank in range(num_ranks):
        warm_up = min(num_ranks - 1 - rank, num_microbatches)
        row = [Action(rank, SpanKind.FORWARD, microbatch) for microbatch in range(warm_up)]
        for microbatch in range(num_microbatches):
            if warm_up + microbatch < num_microbatches:
                row.append(Action(rank, SpanKind.FORWARD, warm_up + microbatch))
            row.append(Action(rank, SpanKind.BACKWARD, microbatch))
        rows.append(row)
    seconds = {SpanKind.FORWARD: 1.0, SpanKind.BACKWARD: 2.0}
    ends: dict[Action, float] = {}
    clocks, positions = [0.0] * num_ranks, [0] * num_ranks
    going = True
    while going:
        going = False
        for rank, row in enumerate(rows):
            while positions[rank] < len(row):
                action = row[positions[rank]]
                neighbour = action.stage + (-1 if action.kind is SpanKind.FORWARD else 1)
                start = clocks[rank]
                if 0 <= neighbour < num_ranks:
                    needed = Action(neighbour, action.kind, action.microbatch)
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


def test_both_end_at_the_same_time() -> None:
    """The peer does the same work: its last action ends when ours does."""
    assert (
        max(plain(4, 8).values())
        == vk.simulate(vk.schedule("1F1B", num_ranks=4, num_microbatches=8), DURATIONS).duration_ns / 1e9
    )


def test_build_and_simulate(compare: Compare) -> None:
    """Less time than the plain simulator for 512 actions, a quarter of it for half a million."""
    for num_ranks, num_microbatches, repeats, limit in ((8, 32, 50, 0.9), (64, 4096, 2, 0.25)):
        num_actions = ACTIONS_A_MICROBATCH * num_ranks * num_microbatches
        peer = microseconds_an_action(
            functools.partial(plain, num_ranks, num_microbatches), num_actions, max(repeats // 5, 1)
        )
        ours = one_forward_one_backward(num_ranks, num_microbatches, repeats)
        compare(
            Row(f"1F1B, {num_ranks} x {num_microbatches}, an action", ours, peer, "a walk over objects", "us", limit)
        )


def test_time_grows_with_the_number_of_actions(compare: Compare) -> None:
    """Sixteen times the microbatches take no longer an action: linear."""
    many, few = one_forward_one_backward(64, 4096, 2), one_forward_one_backward(64, 256, 5)
    compare(Row("1F1B, 64 x 4096, an action", many, few, "1F1B, 64 x 256, an action", "us", 2.0))


def test_explorer(compare: Compare) -> None:
    """From slider to the JSON of the picture of two schedules, against Plotly's own timeline of their spans."""
    settings = ExplorerSettings(schedule="1F1B", versus="GPipe", num_ranks=8, num_microbatches=32)
    simulated = [
        vk.simulate(vk.schedule(name, num_ranks=8, num_microbatches=32), DURATIONS) for name in ("1F1B", "GPipe")
    ]
    ours_s, _ = timed(lambda: explorer_json(settings), 10)
    peer_s, _ = timed(lambda: "".join(plotlys_own(trace) for trace in simulated), 3)
    compare(
        Row("explorer, two schedules, 8 x 32, slider to JSON", ours_s * 1e3, peer_s * 1e3, "plotly.express", "ms", 0.4)
    )
