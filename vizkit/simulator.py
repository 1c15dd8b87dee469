"""What a pipeline schedule takes with a device for each rank, computed: nothing runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from vizkit.activations import ACTIVATIONS, PER_RANK
from vizkit.durations import LONGEST_S, Durations, Seconds
from vizkit.errors import InvalidInputError
from vizkit.hardware import FREE_LINK, Link
from vizkit.schedules.actions import ACTION_KINDS
from vizkit.schedules.checker import numbering
from vizkit.schedules.dependencies import Dependencies
from vizkit.schedules.schedule import Schedule
from vizkit.timing import Costs, run
from vizkit.trace import NONE, NS_PER_S, Clock, Counter, SpanKind, Trace

LARGEST_PAYLOAD_BYTES = 1e18
_NUM_CODES = max(kind.code for kind in ACTION_KINDS) + 1


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
      are asynchronous; with `blocking_sends` the sender idles until its message has arrived, whether or not its
      receiver is ready for it.
    - Overlapped cells: the forward, then the backward, and what they send leaves when both are done, as torch's runtime
      does it. With `overlap_s` the two share the rank for that many seconds.
    - `trace.counters` hold each rank's activation memory over time: a forward adds `activation_bytes` (one number, or
      one for each stage) when it starts; a backward frees them when it ends. Of a split backward, I frees the share
      1 − `kept_for_weights`, and W the rest. Without `activation_bytes` the unit is what one microbatch leaves on all
      stages of a rank.

    Raises `InvalidInputError` for a schedule that cannot run, with what `Schedule.check` finds first, for arguments
    that do not fit it, and where everything together takes over 146 years, too long for nanoseconds in 64 bits.

    >>> from vizkit.schedules import schedule
    >>> from vizkit.grid import as_grid
    >>> print(*as_grid(simulate(schedule("GPipe", num_ranks=2, num_microbatches=2), Durations(F=1, B=2))), sep="\\n")
    F0 F1 .  .  .  B0 B0 B1 B1
    .  F0 F1 B0 B0 B1 B1 .  .
    """
    link = FREE_LINK if link is None else link
    _refuse_other_types(schedule, link)
    given = Durations.of(durations)
    if any(numbering(schedule)):
        raise _cannot_run(schedule)
    needs = Dependencies.of(schedule)
    _refuse_what_cannot_run(schedule, needs)
    edges = directed_edges(schedule, needs)
    payloads = _payloads(schedule, edges, payload_bytes)
    duration_ns, overlap_ns = _durations_ns(schedule, given), _overlap_ns(overlap_s)
    wire_ns = np.rint(payloads * (NS_PER_S / link.bandwidth_bytes_per_s))
    messages_s = float(wire_ns.sum()) / NS_PER_S + link.latency_s * int((edges >= 0).sum())
    compute_s = duration_ns.sum(dtype=float) / NS_PER_S + (overlap_s or 0.0) * int(schedule.joined.sum())
    _refuse_more_than_fits(compute_s, messages_s)
    costs = Costs(
        input=needs.input,
        edge=edges,
        duration_ns=duration_ns,
        wire_ns=wire_ns.astype(np.int64),
        latency_ns=round(link.latency_s * NS_PER_S),
        blocking_sends=blocking_sends,
        overlap_ns=overlap_ns,
    )
    times = run(schedule, costs)
    if not times.finished:
        raise _cannot_run(schedule)
    columns: dict[str, Any] = {
        "rank": schedule.rank,
        "kind": schedule.kind,
        "start_ns": times.start,
        "end_ns": times.end,
        "stage": schedule.stage,
        "microbatch": schedule.microbatch,
    }
    if link != FREE_LINK or payloads.any():
        columns = _with_messages(schedule, columns, costs, payloads, times.ready)
    return Trace.from_columns(
        clock=Clock.IDEAL,
        world_size=schedule.num_ranks,
        counters=_activations(schedule, times.start, times.end, activation_bytes, kept_for_weights),
        notes={
            "schedule": schedule.name,
            "link": str(link),
            "sends": "blocking" if blocking_sends else "asynchronous",
        },
        **columns,
    )


def _refuse_other_types(schedule: object, link: object) -> None:
    if not isinstance(schedule, Schedule):
        raise InvalidInputError.because(
            "schedule", schedule, "is not a Schedule", "get one from vk.schedule or vk.Schedule.from_rows"
        )
    if not isinstance(link, Link):
        raise InvalidInputError.because("link", link, "is not a Link", "give vk.Link(latency_s=1e-6), or None")


def _refuse_more_than_fits(compute_s: float, messages_s: float) -> None:
    """A sum of everything, which no time of the trace exceeds."""
    for name, seconds, remedy in (
        ("durations", compute_s, "give seconds, such as 1e-3"),
        ("link", compute_s + messages_s, "give seconds, bytes and bytes a second"),
    ):
        if seconds > LONGEST_S:
            raise InvalidInputError.because(
                name, f"{seconds:.3g} s", "is what everything together takes, and 146 years are the most", remedy
            )


def _refuse_what_cannot_run(schedule: Schedule, needs: Dependencies) -> None:
    """Raises what `check` finds, after a quick look whether there is something to find; deadlocks show later."""
    here = np.arange(len(schedule))
    doubtful = (
        (np.diff(schedule.offsets) == 0).any()
        or (needs.input < NONE).any()
        or (needs.own < NONE).any()
        or (needs.own >= here).any()
        or (np.asarray(schedule.stage_ranks)[schedule.stage] != schedule.rank).any()
        or not _once_each(schedule)
    )
    if doubtful and schedule.check():
        raise _cannot_run(schedule)


def _once_each(schedule: Schedule) -> bool:
    """Whether each stage has as many actions of each kind as microbatches, none twice."""
    a_kind = schedule.num_stages * schedule.num_microbatches
    place = schedule.stage.astype(np.int64) * schedule.num_microbatches + schedule.microbatch
    counts = np.bincount(schedule.kind.astype(np.int64) * a_kind + place, minlength=_NUM_CODES * a_kind)
    if counts.max() > 1:
        return False
    by_kind = counts.reshape(_NUM_CODES, a_kind)
    forward, full, inputs, weights = (by_kind[kind.code] for kind in ACTION_KINDS)
    backward = full + inputs
    return (
        forward.sum() * schedule.num_pipelines == a_kind
        and np.array_equal(inputs, weights)
        and (not schedule.has_backward or np.array_equal(backward, forward))
    )


def _cannot_run(schedule: Schedule) -> InvalidInputError:
    findings = schedule.check()
    return InvalidInputError.because(
        "schedule", schedule.name, str(findings[0]), "see all findings with schedule.check()"
    )


def _durations_ns(schedule: Schedule, durations: Durations) -> np.ndarray:
    """Nanoseconds of each action; raises `InvalidInputError` where per-stage lists do not fit the stages."""
    table = np.zeros((_NUM_CODES, schedule.num_stages), np.int64)
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


def _overlap_ns(overlap_s: float | None) -> int:
    if overlap_s is None:
        return -1
    if not (_is_finite(overlap_s) and overlap_s >= 0):
        raise InvalidInputError.because(
            "overlap_s", overlap_s, "is finite and not negative", "give the seconds of one overlapped cell"
        )
    return round(overlap_s * NS_PER_S)


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _by_stage(name: str, value: float | Sequence[float], schedule: Schedule) -> np.ndarray:
    given = np.asarray(value)
    values = given.astype(float) if given.dtype.kind in "biuf" else np.array(np.nan)
    if values.shape not in ((), (schedule.num_stages,)) or not (np.isfinite(values).all() and (values >= 0).all()):
        raise InvalidInputError.because(
            name,
            value,
            f"must be finite, not negative, and one number or one for each of {schedule.num_stages} stages",
            "give bytes of one microbatch",
        )
    return np.broadcast_to(values, schedule.num_stages)


def directed_edges(schedule: Schedule, needs: Dependencies) -> np.ndarray:
    """The directed edge that each action's output takes to another rank, source × ranks + target; −1 where none."""
    edges = np.full(len(schedule), NONE, np.int64)
    takers = np.flatnonzero(needs.input >= 0)
    makers = needs.input[takers]
    source, target = schedule.rank[makers].astype(np.int64), schedule.rank[takers]
    away = source != target
    edges[makers[away]] = source[away] * schedule.num_ranks + target[away]
    return edges


def _payloads(schedule: Schedule, edges: np.ndarray, payload_bytes: float | Sequence[float]) -> np.ndarray:
    """Bytes of the message that each action sends; a gradient is as large as the activation that came that way."""
    by_stage = _by_stage("payload_bytes", payload_bytes, schedule)
    if by_stage.max() > LARGEST_PAYLOAD_BYTES:
        raise InvalidInputError.because(
            "payload_bytes", payload_bytes, "is over an exabyte", "give bytes of one microbatch"
        )
    if not by_stage.any():
        return np.zeros(len(edges))
    boundary = np.where(schedule.kind == SpanKind.FORWARD.code, schedule.stage, schedule.stage - 1)
    return np.where(edges >= 0, by_stage[boundary], 0.0)


def _with_messages(
    schedule: Schedule, columns: Mapping[str, np.ndarray], costs: Costs, payloads: np.ndarray, ready: np.ndarray
) -> dict[str, np.ndarray]:
    """The columns with two spans more for each message: its send and its receive."""
    makers = np.flatnonzero(costs.edge >= 0)
    source, target = np.divmod(costs.edge[makers], schedule.num_ranks)
    arrived = ready[makers]
    left = arrived - costs.latency_ns
    sent = left - costs.wire_ns[makers]
    stage = schedule.stage[makers]
    next_stage = stage + np.where(schedule.kind[makers] == SpanKind.FORWARD.code, 1, -1)
    size = np.rint(payloads[makers]).astype(np.int64)
    microbatch, numbers = schedule.microbatch[makers], np.arange(len(makers))
    none = np.full(len(schedule), NONE)
    parts = {
        "rank": (columns["rank"], source, target),
        "kind": (
            columns["kind"],
            np.full(len(makers), SpanKind.SEND.code),
            np.full(len(makers), SpanKind.RECEIVE.code),
        ),
        "start_ns": (columns["start_ns"], sent, sent),
        "end_ns": (columns["end_ns"], left, arrived),
        "stage": (columns["stage"], stage, next_stage),
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
    if not (_is_finite(kept) and 0 <= kept <= 1):
        raise InvalidInputError.because(
            "kept_for_weights", kept, "is the share of activations that W needs", "give a number from 0 to 1"
        )
    if activation_bytes is None:
        sizes = np.full(schedule.num_stages, schedule.num_ranks / schedule.stages_per_pipeline)
    else:
        sizes = _by_stage("activation_bytes", activation_bytes, schedule)
    shares = np.zeros(_NUM_CODES)
    shares[[kind.code for kind in ACTION_KINDS]] = (1, -1, kept - 1, -kept)
    change = (shares[:, None] * sizes)[schedule.kind, schedule.stage]
    times = np.where(schedule.kind == SpanKind.FORWARD.code, start, end)
    if not schedule.has_backward:  # nothing is kept beyond the forward
        change = np.stack([change, -change], axis=1).ravel()
        times = np.stack([start, end], axis=1).ravel()
    per_action = len(times) // len(schedule)
    bounds = schedule.offsets * per_action
    total = np.cumsum(change)
    before = np.append(0.0, total)[bounds[:-1]]
    held = (total - np.repeat(before, np.diff(bounds))).round(9)
    unit = PER_RANK if activation_bytes is None else "bytes"
    return [
        Counter(ACTIVATIONS, rank, times[first:last], held[first:last], unit)
        for rank, (first, last) in enumerate(pairwise(bounds.tolist()))
        if first < last
    ]
