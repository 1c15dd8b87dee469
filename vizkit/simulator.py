"""What a pipeline schedule takes with a device for each rank, computed: nothing runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from vizkit.durations import Durations, Seconds
from vizkit.errors import InvalidInputError
from vizkit.hardware import FREE_LINK, Link
from vizkit.schedules.actions import ACTION_KINDS
from vizkit.schedules.dependencies import Dependencies
from vizkit.schedules.schedule import Schedule
from vizkit.trace import NONE, NS_PER_S, Clock, Counter, SpanKind, Trace

ACTIVATIONS = "activations"
"""Name of the counters of activation memory."""
PER_RANK = "microbatches of one rank's layers"
_UNKNOWN = -1


def simulate(
    schedule: Schedule,
    durations: Durations | Mapping[str, Seconds],
    link: Link | None = None,
    *,
    payload_bytes: float | Sequence[float] = 0,
    blocking_sends: bool = False,
    overlap_s: float | None = None,
    activation_bytes: float | Sequence[float] | None = None,
    kept_for_weights: float = 1.0,
) -> Trace:
    """When each rank does each action of a pipeline schedule; a `Trace` on the clock "ideal".

    - `durations`: seconds of F and B, or F, I and W, on each stage. Every action starts as soon as its rank has done
      the one before and its input is there.
    - `link`: what a message of `payload_bytes` (of one microbatch; one number, or one for what leaves each stage) costs
      between ranks; None: nothing. A directed edge sends one message at a time; inside a rank nothing is charged. Sends
      are asynchronous; with `blocking_sends` the sender idles until its message has arrived.
    - Overlapped cells: the forward, then the backward, and what they send leaves when both are done, as torch's runtime
      does it. With `overlap_s` the two share the rank for that many seconds.
    - `trace.counters` hold each rank's activation memory over time: a forward adds `activation_bytes` (one number, or
      one for each stage) when it starts; a backward frees them when it ends. Of a split backward, I frees the share
      1 − `kept_for_weights`, and W the rest. Without `activation_bytes` the unit is what one microbatch leaves on all
      stages of a rank.

    Raises `InvalidInputError` for a schedule that cannot run, with what `Schedule.check` finds first.

    >>> from vizkit.schedules import schedule
    >>> from vizkit.grid import as_grid
    >>> print(*as_grid(simulate(schedule("GPipe", num_ranks=2, num_microbatches=2), Durations(F=1, B=2))), sep="\\n")
    F0 F1 .  B0 B0 B1 B1
    .  F0 B0 B0 B1 B1 .
    """
    link = FREE_LINK if link is None else link
    given = durations if isinstance(durations, Durations) else Durations(**durations)
    needs = Dependencies.of(schedule)
    _refuse_what_cannot_run(schedule, needs)
    payloads = _by_stage("payload_bytes", payload_bytes, schedule)
    edges = _edges(schedule, needs)
    wire_ns = np.rint(payloads / link.bandwidth_bytes_per_s * NS_PER_S).astype(np.int64)[schedule.stage]
    start, end, left, ready = _run(
        schedule,
        needs.input.tolist(),
        _durations_ns(schedule, given).tolist(),
        edges.tolist(),
        wire_ns.tolist(),
        round(link.latency_s * NS_PER_S),
        blocking_sends,
        _UNKNOWN if overlap_s is None else Durations(F=overlap_s).of_ns("F"),
    )
    columns = {
        "rank": schedule.rank,
        "kind": schedule.kind,
        "start_ns": start,
        "end_ns": end,
        "stage": schedule.stage,
        "microbatch": schedule.microbatch,
    }
    if link != FREE_LINK or payloads.any():
        columns = _with_messages(schedule, columns, edges, payloads, left - wire_ns, left, ready)
    return Trace.from_columns(
        clock=Clock.IDEAL,
        world_size=schedule.num_ranks,
        counters=_activations(schedule, start, end, activation_bytes, kept_for_weights),
        notes={
            "schedule": schedule.name,
            "link": "free" if link == FREE_LINK else str(link),
            "sends": "blocking" if blocking_sends else "asynchronous",
        },
        **columns,
    )


def _refuse_what_cannot_run(schedule: Schedule, needs: Dependencies) -> None:
    here = np.arange(len(schedule))
    if (needs.input < NONE).any() or (needs.own < NONE).any() or (needs.own >= here).any():
        raise _cannot_run(schedule)


def _cannot_run(schedule: Schedule) -> InvalidInputError:
    findings = schedule.check()
    return InvalidInputError.because(
        "schedule", schedule.name, str(findings[0]), "see all findings with schedule.check()"
    )


def _durations_ns(schedule: Schedule, durations: Durations) -> np.ndarray:
    """Nanoseconds of each action; raises `InvalidInputError` where per-stage lists do not fit the stages."""
    table = np.zeros((max(kind.code for kind in ACTION_KINDS) + 1, schedule.num_stages), np.int64)
    for kind in ACTION_KINDS:
        value = durations.seconds.get(kind, 0.0)
        if isinstance(value, Sequence) and len(value) != schedule.num_stages:
            raise InvalidInputError.because(
                kind.value,
                value,
                f"{schedule.name} has {schedule.num_stages} stages, and these are durations for {len(value)}",
                "give one duration for each stage, or one for all",
            )
        table[kind.code] = np.rint(np.asarray(value) * NS_PER_S)
    return table[schedule.kind, schedule.stage]


def _by_stage(name: str, value: float | Sequence[float], schedule: Schedule) -> np.ndarray:
    values = np.asarray(value, float)
    if values.shape not in ((), (schedule.num_stages,)) or not (np.isfinite(values).all() and (values >= 0).all()):
        raise InvalidInputError.because(
            name,
            value,
            f"must be finite, not negative, and one number or one for each of {schedule.num_stages} stages",
            "give bytes of one microbatch",
        )
    return np.broadcast_to(values, schedule.num_stages)


def _edges(schedule: Schedule, needs: Dependencies) -> np.ndarray:
    """For each action, the number of the directed edge that its output takes to another rank; −1 where it takes none."""
    edges = np.full(len(schedule), NONE, np.int64)
    takers = np.flatnonzero(needs.input >= 0)
    makers = needs.input[takers]
    source, target = schedule.rank[makers].astype(np.int64), schedule.rank[takers]
    away = source != target
    edges[makers[away]] = source[away] * schedule.num_ranks + target[away]
    return edges


def _run(
    schedule: Schedule,
    needs: list[int],
    duration: list[int],
    edges: list[int],
    wire_ns: list[int],
    latency_ns: int,
    blocking: bool,
    overlap_ns: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Start and end of each action, when its message has left, and when its output is there for who needs it.

    Runs each rank until it needs something that is not there yet; whoever makes that wakes it.
    """
    size = len(duration)
    start, end, left = [0] * size, [0] * size, [0] * size
    ready = [_UNKNOWN] * size
    overlaps_next = [*schedule.joined[1:].tolist(), False]
    joined = schedule.joined.tolist()
    bounds = list(pairwise(schedule.offsets.tolist()))
    positions = [first for first, _ in bounds]
    clocks = [0] * len(bounds)
    edge_free = [0] * (len(bounds) ** 2)
    waiting: dict[int, int] = {}
    runnable = list(range(len(bounds) - 1, -1, -1))

    def release(action: int, now: int) -> int:
        """Lets go of an action's output; returns when its rank may go on."""
        left[action] = ready[action] = now
        edge = edges[action]
        if edge >= 0:
            free = edge_free[edge]
            edge_free[edge] = left[action] = gone = (now if now > free else free) + wire_ns[action]
            ready[action] = arrived = gone + latency_ns
            if blocking:
                now = arrived
        if action in waiting:
            runnable.append(waiting.pop(action))
        return now

    while runnable:
        rank = runnable.pop()
        i, stop, now = positions[rank], bounds[rank][1], clocks[rank]
        while i < stop:
            together = overlap_ns >= 0 and overlaps_next[i]
            needed = needs[i]
            if needed >= 0:
                there = ready[needed]
                if there < 0:
                    waiting[needed] = rank
                    break
                if there > now:
                    now = there
            if together and needs[i + 1] >= 0:
                there = ready[needs[i + 1]]
                if there < 0:
                    waiting[needs[i + 1]] = rank
                    break
                now = max(now, there)
            start[i] = now
            if together:
                start[i + 1] = now
                now += overlap_ns
                end[i] = end[i + 1] = now
                now = max(release(i, now), release(i + 1, now))
                i += 2
                continue
            now += duration[i]
            end[i] = now
            if not overlaps_next[i]:
                if joined[i]:
                    now = max(release(i - 1, now), release(i, now))
                else:
                    now = release(i, now)
            i += 1
        positions[rank], clocks[rank] = i, now
    if any(position < stop for position, (_, stop) in zip(positions, bounds, strict=True)):
        raise _cannot_run(schedule)
    return np.array(start), np.array(end), np.array(left), np.array(ready)


def _with_messages(
    schedule: Schedule,
    columns: Mapping[str, np.ndarray],
    edges: np.ndarray,
    payloads: np.ndarray,
    sent: np.ndarray,
    left: np.ndarray,
    arrived: np.ndarray,
) -> dict[str, np.ndarray]:
    """The columns with two spans more for each message: its send and its receive."""
    makers = np.flatnonzero(edges >= 0)
    source, target = edges[makers] // schedule.num_ranks, edges[makers] % schedule.num_ranks
    stage = schedule.stage[makers]
    step = np.where(schedule.kind[makers] == SpanKind.FORWARD.code, 1, -1)
    # a gradient is as large as the activation that came over the same edge
    size = np.rint(payloads[np.minimum(stage, stage + step)]).astype(np.int64)
    microbatch, numbers = schedule.microbatch[makers], np.arange(len(makers))
    none = np.full(len(schedule), NONE)
    parts = {
        "rank": (columns["rank"], source, target),
        "kind": (
            columns["kind"],
            np.full(len(makers), SpanKind.SEND.code),
            np.full(len(makers), SpanKind.RECEIVE.code),
        ),
        "start_ns": (columns["start_ns"], sent[makers], sent[makers]),
        "end_ns": (columns["end_ns"], left[makers], arrived[makers]),
        "stage": (columns["stage"], stage, stage + step),
        "microbatch": (columns["microbatch"], microbatch, microbatch),
        "payload_bytes": (0 * none, size, size),
        "peer": (none, target, source),
        "operation": (none, numbers, numbers),
    }
    return {name: np.concatenate(values) for name, values in parts.items()}


def _activations(
    schedule: Schedule,
    start: np.ndarray,
    end: np.ndarray,
    activation_bytes: float | Sequence[float] | None,
    kept: float,
) -> list[Counter]:
    if not (math.isfinite(kept) and 0 <= kept <= 1):
        raise InvalidInputError.because(
            "kept_for_weights", kept, "is the share of activations that W needs", "give a number from 0 to 1"
        )
    if activation_bytes is None:
        sizes = np.full(schedule.num_stages, schedule.num_ranks / schedule.stages_per_pipeline)
    else:
        sizes = _by_stage("activation_bytes", activation_bytes, schedule)
    shares = np.zeros(max(kind.code for kind in ACTION_KINDS) + 1)
    shares[[kind.code for kind in ACTION_KINDS]] = (1, -1, kept - 1, -kept)
    change = shares[schedule.kind] * sizes[schedule.stage]
    times = np.where(schedule.kind == SpanKind.FORWARD.code, start, end)
    if not schedule.has_backward:  # nothing is kept beyond the forward
        change = np.stack([change, -change], axis=1).ravel()
        times = np.stack([start, end], axis=1).ravel()
    per_action = len(times) // max(len(schedule), 1)
    total = np.cumsum(change)
    counters = []
    for rank, (first, last) in enumerate(pairwise((schedule.offsets * per_action).tolist())):
        if first < last:
            before = total[first - 1] if first else 0.0
            held = np.round(total[first:last] - before, 9)
            unit = PER_RANK if activation_bytes is None else "bytes"
            counters.append(Counter(ACTIVATIONS, rank, times[first:last], held, unit))
    return counters
