"""Reads from a run how long each stage and each message took, to predict runs that have not been made."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vizkit.durations import Durations, Seconds
from vizkit.errors import InvalidInputError
from vizkit.hardware import Link
from vizkit.lanes import Label
from vizkit.record import Call, RankRecord, Record, SpanClosed, SpanOpened, Wait, operation_keys
from vizkit.trace import NONE, NS_PER_S, SpanKind
from vizkit.workload import work_before_events

if TYPE_CHECKING:
    import pandas as pd

_F, _B, _I, _W = SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.BACKWARD_INPUT, SpanKind.BACKWARD_WEIGHT
_PASSES = (_F, _B, _I, _W)


class HasRecord(Protocol):
    """A `Run`, or whatever else has a record."""

    @property
    def record(self) -> Record: ...


@dataclass(frozen=True)
class StageTime:
    """How long one kind of work took on one stage: seconds of compute on the virtual clock, one value a microbatch.

    `median_s`, and the quartiles `low_s` and `high_s`, leave out the first of `count`, which took `first_s`: it also
    allocates memory and picks kernels. Where several ranks ran the stage, the first of each is left out. `stage` is −1
    for work that belongs to none.
    """

    kind: SpanKind
    stage: int
    count: int
    median_s: float
    low_s: float
    high_s: float
    first_s: float


@dataclass(frozen=True, init=False, repr=False)
class FittedDurations(Durations):
    """`Durations` read from a run, with what is known of how sure they are.

    - `stage_times`: a `StageTime` for each kind and stage that the run had; `table()` shows them.
    - `link`: α and β of the messages that could be timed, None where there were none. Messages of one size only tell
      what one such message costs: all of it is then α, and β is infinite.
    - `between_s`: the median of compute between one span and the next: what the pipeline's runtime itself needs from
      action to action. A prediction leaves it out.
    - `is_split`: whether I and W were measured; if not, half of B is assumed for each.
    """

    stage_times: tuple[StageTime, ...] = ()
    link: Link | None = None
    between_s: float = 0.0
    is_split: bool = False

    def __init__(
        self,
        seconds: Mapping[SpanKind, Seconds],
        *,
        stage_times: Iterable[StageTime] = (),
        link: Link | None = None,
        between_s: float = 0.0,
        is_split: bool = False,
    ) -> None:
        super().__init__(**{kind.value: value for kind, value in seconds.items()})
        known = {"stage_times": tuple(stage_times), "link": link, "between_s": between_s, "is_split": is_split}
        for name, value in known.items():
            object.__setattr__(self, name, value)

    def scaled(self, factor: float) -> Durations:
        """Durations times `factor`: for microbatches of so many times the samples, if time grows with them.

        >>> FittedDurations({SpanKind.FORWARD: [1.0, 2.0]}).scaled(0.5).of_ns("F", stage=1)
        1000000000
        """
        if not (math.isfinite(factor) and factor > 0):
            raise InvalidInputError.because("factor", factor, "must be positive and finite", "use 0.5 to halve it")
        return Durations(
            **{
                kind.value: [factor * s for s in value] if isinstance(value, Sequence) else factor * value
                for kind, value in self.seconds.items()
            }
        )

    def table(self) -> pd.DataFrame:
        """One row for each kind and stage: how many, median, quartiles and the first one, in seconds."""
        import pandas as pd

        columns = ["kind", "stage", "count", "median s", "lower quartile s", "upper quartile s", "first s"]
        rows = [(t.kind.value, t.stage, t.count, t.median_s, t.low_s, t.high_s, t.first_s) for t in self.stage_times]
        return pd.DataFrame(rows, columns=columns)


def fit_durations(run: HasRecord | Record) -> FittedDurations:
    """Durations of F, B, I and W for each stage, from the spans of a run: for `vk.simulate(schedule, fit)`.

    Times are compute of the rank's thread on the virtual clock (CPU time; on CUDA the device's), so waiting and the
    other ranks of a crowded machine do not count. Each is the median over microbatches and steps, without the first.
    Where a stage had B alone, I and W get half each; where it had I and W, B is their sum. Torch computes nothing in
    the I of stage 0 and the whole backward in its W: their sum is right, their parts are as measured.

    `vk.simulate(schedule, fit)` is the passes of one step. `run.replay()` is longer: it has all steps, the set-up, the
    optimizer and what lies between passes (`between_s`); `run.replay(durations=fit)` has the spans of all steps alone.

    A run without backwards predicts none: their time counts as 0. A run of several models mixes their stages.

    Raises `InvalidInputError` for a run without labelled passes, and where a stage has no forward.

    >>> from vizkit.lanes import Label
    >>> at = lambda ns: dict(before_ns=ns, after_ns=ns, start_wall_ns=ns, end_wall_ns=ns)
    >>> forward = SpanOpened(label=Label(SpanKind.FORWARD, stage=0, microbatch=0), **at(0)), SpanClosed(**at(300))
    >>> extent = dict(start_ns=0, end_ns=300, start_wall_ns=0, end_wall_ns=300)
    >>> fit_durations(Record((RankRecord(rank=0, events=forward, **extent),))).of_ns("F", stage=0)
    300
    """
    record = run if isinstance(run, Record) else run.record
    found: dict[tuple[SpanKind, int], list[list[int]]] = defaultdict(list)
    between_ns: list[int] = []
    for rank in record.ranks:
        spans = [span for outermost in _span_trees(rank) for span in _counted(outermost)]
        of_rank: dict[tuple[SpanKind, int], list[int]] = defaultdict(list)
        for span in spans:
            of_rank[span.label.kind, span.label.stage].append(span.end_ns - span.start_ns)
        for key, values in of_rank.items():
            found[key].append(values)
        between_ns += [after.start_ns - before.end_ns for before, after in pairwise(spans)]
    times = {key: _stage_time(*key, values) for key, values in sorted(found.items(), key=_by_stage_and_kind)}
    if not any(kind in _PASSES for kind, _ in times):
        raise InvalidInputError.because(
            "run",
            sorted({kind.value for kind, _ in times}),
            "has no labelled forward or backward",
            'run a vk.pipeline, or label the passes with vk.span(kind="F", stage=0)',
        )
    return FittedDurations(
        _seconds(times),
        stage_times=times.values(),
        link=_fit_link(record),
        between_s=float(np.median(between_ns)) / NS_PER_S if between_ns else 0.0,
        is_split=any(kind is _W for kind, _ in times),
    )


def _by_stage_and_kind(item: tuple[tuple[SpanKind, int], object]) -> tuple[int, int]:
    (kind, stage), _ = item
    return stage, kind.code


@dataclass
class _Spanned:
    """A span, the nanoseconds that the rank had computed at its start and end, and the spans inside it."""

    label: Label
    start_ns: int
    end_ns: int = 0
    inside: list[_Spanned] = field(default_factory=list)


def _span_trees(rank: RankRecord) -> list[_Spanned]:
    done = [0, *accumulate(work_before_events(rank))]
    outermost: list[_Spanned] = []
    stack: list[_Spanned] = []
    for position, event in enumerate(rank.events):
        if isinstance(event, SpanOpened):
            stack.append(_Spanned(event.label, done[position + 1]))
        elif isinstance(event, SpanClosed):
            span = stack.pop()
            span.end_ns = done[position + 1]
            (stack[-1].inside if stack else outermost).append(span)
    return outermost


def _counted(span: _Spanned) -> list[_Spanned]:
    """The span as a whole, or those inside one that is no pass but holds passes, such as a span around a step."""
    inner = [] if span.label.kind in _PASSES else [counted for part in span.inside for counted in _counted(part)]
    return inner if any(part.label.kind in _PASSES for part in inner) else [span]


def _stage_time(kind: SpanKind, stage: int, by_rank: Sequence[Sequence[int]]) -> StageTime:
    """Each rank's first one warms up that rank."""
    later = [ns for values in by_rank for ns in (values[1:] or values)]
    low, median, high = (float(q) / NS_PER_S for q in np.quantile(later, (0.25, 0.5, 0.75)))
    return StageTime(kind, stage, sum(map(len, by_rank)), median, low, high, by_rank[0][0] / NS_PER_S)


def _seconds(times: Mapping[tuple[SpanKind, int], StageTime]) -> dict[SpanKind, Seconds]:
    """One number for each stage, or one for all where spans have no stage."""
    stages = sorted({stage for kind, stage in times if kind in _PASSES and stage != NONE})
    seconds: dict[SpanKind, Seconds] = {
        kind: time.median_s for (kind, stage), time in times.items() if kind not in _PASSES and stage == NONE
    }
    by_stage = [_passes(times, stage) for stage in (range(stages[-1] + 1) if stages else (NONE,))]
    for kind in _PASSES:
        if any(kind in passes for passes in by_stage):
            values = [passes.get(kind, 0.0) for passes in by_stage]
            seconds[kind] = values if stages else values[0]
    return seconds


def _passes(times: Mapping[tuple[SpanKind, int], StageTime], stage: int) -> dict[SpanKind, float]:
    """Seconds of F, B, I and W of one stage, as far as measured parts tell them."""
    known = {kind: times[kind, stage].median_s for kind in _PASSES if (kind, stage) in times}
    if _F not in known and stage != NONE:
        raise InvalidInputError.because(
            "run", f"stage {stage}", "has no forward in this run", "fit a run in which each stage runs"
        )
    if _I in known and _W in known:
        known.setdefault(_B, known[_I] + known[_W])
    elif _B in known:
        known[_I] = known[_W] = known[_B] / 2
    return known


def _fit_link(record: Record) -> Link | None:
    """α and β from the messages whose receiver was waiting when they set off, on the wall clock.

    Only of those is it known when they arrived. Sizes count alike: the medians of each are fitted, by least squares.
    """
    seconds: dict[int, list[float]] = defaultdict(list)
    sent: dict[object, Call] = {}
    for rank in record.ranks:
        sent.update(
            (key, call)
            for call, key in zip(rank.calls, operation_keys(rank), strict=True)
            if call.kind is SpanKind.SEND
        )
    for rank in record.ranks:
        keys = {call.call: key for call, key in zip(rank.calls, operation_keys(rank), strict=True)}
        received = {call.call: call for call in rank.calls if call.kind is SpanKind.RECEIVE}
        for event in rank.events:
            if isinstance(event, Wait) and len(event.calls) == 1 and event.calls[0] in received:
                send = sent.get(keys[event.calls[0]])
                if send is not None and event.start_wall_ns < send.start_wall_ns < event.end_wall_ns:
                    seconds[send.payload_bytes].append((event.end_wall_ns - send.start_wall_ns) / NS_PER_S)
    if not seconds:
        return None
    sizes = sorted(seconds)
    medians = [float(np.median(seconds[size])) for size in sizes]
    if len(sizes) == 1:
        return Link(medians[0], math.inf)
    slope, latency = (float(x) for x in np.polyfit(sizes, medians, 1))
    if slope <= 0:  # larger messages took no longer: what they cost is not in their size
        return Link(float(np.median(medians)), math.inf)
    return Link(max(latency, 0.0), 1 / slope)
