"""What a run tells about durations and links, from records whose every number is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

import vizkit as vk
from vizkit.lanes import Label
from vizkit.record import Call, RankRecord, Record, SpanClosed, SpanOpened, Wait
from vizkit.trace import SpanKind

MS = 1_000_000


class Script:
    """Writes a rank's record: passes that take given times, messages, stretches outside spans."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.now = self.calls = 0
        self.events: list[Any] = []

    def _stamp(self) -> dict[str, int]:
        return {"before_ns": self.now, "after_ns": self.now, "start_wall_ns": self.now, "end_wall_ns": self.now}

    def pass_(self, kind: str, stage: int, ms: float, microbatch: int = 0) -> Script:
        self.events.append(SpanOpened(label=Label(SpanKind(kind), kind, stage, microbatch), **self._stamp()))
        self.idle(ms)
        self.events.append(SpanClosed(**self._stamp()))
        return self

    def idle(self, ms: float) -> Script:
        self.now += round(ms * MS)
        return self

    def message(self, kind: SpanKind, peer: int, payload_bytes: int) -> Script:
        members = tuple(sorted((self.rank, peer)))
        self.events.append(
            Call(
                call=self.calls,
                kind=kind,
                group="0",
                members=members,
                payload_bytes=payload_bytes,
                peer=peer,
                **self._stamp(),
            )
        )
        self.calls += 1
        return self

    def waits_until(self, ms: float) -> Script:
        stamp = self._stamp() | {"end_wall_ns": round(ms * MS)}
        self.events.append(Wait(calls=(self.calls - 1,), **stamp))
        return self

    def record(self) -> RankRecord:
        extent = {"start_ns": 0, "end_ns": self.now, "start_wall_ns": 0, "end_wall_ns": self.now}
        return RankRecord(rank=self.rank, events=tuple(self.events), **extent)


def record_of(*ranks: Script) -> Record:
    return Record(tuple(rank.record() for rank in ranks))


def test_known_durations_come_back_exactly() -> None:
    """Median over microbatches for each kind and stage, whatever rank holds it, in the simulator's terms."""
    known = {"F": (2.0, 3.0), "I": (1.5, 2.5), "W": (1.0, 0.5)}
    ranks = [Script(0), Script(1)]
    for stage, rank in enumerate(ranks):
        for microbatch in range(3):
            for kind, values in known.items():
                rank.pass_(kind, stage, values[stage], microbatch)
    fit = vk.fit_durations(record_of(*ranks))
    for stage in range(2):
        for kind, values in known.items():
            assert fit.of_ns(kind, stage) == values[stage] * MS
        assert fit.of_ns("B", stage) == (known["I"][stage] + known["W"][stage]) * MS
    assert fit.is_split
    assert fit.between_s == 0
    schedule = vk.schedule("ZB-H1", num_ranks=2, num_microbatches=4)
    given = vk.Durations(**{kind: [v / 1e3 for v in values] for kind, values in known.items()})
    assert list(vk.simulate(schedule, fit)) == list(vk.simulate(schedule, given))


def test_the_first_microbatch_is_reported_and_left_out() -> None:
    """It allocates and warms up; the median of the others stands, and quartiles say how much they vary."""
    rank = Script(0)
    for ms in (50, 2, 4, 6):
        rank.pass_("F", 0, ms)
    (time,) = vk.fit_durations(record_of(rank)).stage_times
    assert (time.count, time.first_s, time.median_s) == (4, 0.050, 0.004)
    assert (time.low_s, time.high_s) == (0.003, 0.005)


def test_one_microbatch_is_all_there_is() -> None:
    fit = vk.fit_durations(record_of(Script(0).pass_("F", 0, 5)))
    assert fit.of_ns("F", 0) == 5 * MS


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ((("B", 4),), {"B": 4, "I": 2, "W": 2}),
        ((("I", 3), ("W", 1)), {"B": 4, "I": 3, "W": 1}),
        ((("B", 5), ("I", 3), ("W", 1)), {"B": 5, "I": 3, "W": 1}),
        ((), {"B": 0, "I": 0, "W": 0}),
    ],
)
def test_parts_of_the_backward_follow_from_each_other(
    passes: Sequence[tuple[str, float]], expected: dict[str, float]
) -> None:
    """B = I + W where it was split, halves where it was not, and what was measured where both were."""
    rank = Script(0).pass_("F", 0, 1)
    for kind, ms in passes:
        rank.pass_(kind, 0, ms)
    fit = vk.fit_durations(record_of(rank))
    assert {kind: fit.of_ns(kind, 0) / MS for kind in expected} == expected
    assert fit.is_split == any(kind == "W" for kind, _ in passes)


def test_each_stage_may_have_split_backwards_or_not() -> None:
    """A schedule that splits some stages' backwards only: every stage gets all four."""
    rank = Script(0).pass_("F", 0, 1).pass_("B", 0, 6).pass_("F", 1, 1).pass_("I", 1, 2).pass_("W", 1, 1)
    fit = vk.fit_durations(record_of(rank))
    assert [[fit.of_ns(kind, stage) / MS for kind in "BIW"] for stage in (0, 1)] == [[6, 3, 3], [3, 2, 1]]


def test_time_of_a_span_holds_the_spans_inside_it() -> None:
    """A module may label its own parts: they are part of the pass."""
    rank = Script(0)
    rank.events.append(SpanOpened(label=Label(SpanKind.FORWARD, "F", 0, 0), **rank._stamp()))
    rank.idle(1).pass_("compute", -1, 2).idle(3)
    rank.events.append(SpanClosed(**rank._stamp()))
    fit = vk.fit_durations(record_of(rank))
    assert fit.of_ns("F", 0) == 6 * MS


def test_a_span_around_a_step_does_not_hide_the_passes_in_it() -> None:
    """Nor the optimizer's span beside them; the step itself is none of the durations."""
    rank = Script(0)
    rank.events.append(SpanOpened(label=Label(SpanKind.COMPUTE, "step"), **rank._stamp()))
    rank.idle(1).pass_("F", 0, 2).idle(1).pass_("B", 0, 4).pass_("optimizer", -1, 3)
    rank.events.append(SpanClosed(**rank._stamp()))
    fit = vk.fit_durations(record_of(rank))
    assert [(time.kind.value, time.median_s) for time in fit.stage_times] == [
        ("optimizer", 0.003),
        ("F", 0.002),
        ("B", 0.004),
    ]


def test_every_rank_that_runs_a_stage_warms_up_by_itself() -> None:
    """Two pipelines side by side: the first pass of each is left out."""
    ranks = [Script(number).pass_("F", 0, 90).pass_("F", 0, ms).pass_("F", 0, ms) for number, ms in enumerate((2, 4))]
    (time,) = vk.fit_durations(record_of(*ranks)).stage_times
    assert (time.count, time.median_s, time.high_s, time.first_s) == (6, 0.003, 0.004, 0.090)


def test_time_between_spans_is_told_but_predicts_nothing() -> None:
    """What a runtime needs from one action to the next: the median; what comes before and after does not count."""
    rank = Script(0).idle(50).pass_("F", 0, 2).idle(1).pass_("F", 0, 2).idle(9).pass_("F", 0, 2).idle(2)
    rank.pass_("F", 0, 2).idle(70)
    fit = vk.fit_durations(record_of(rank))
    assert fit.between_s == 0.002
    assert fit.of_ns("F", 0) == 2 * MS


def test_spans_without_a_stage_give_one_duration_for_all() -> None:
    """A data-parallel run fits too, with its optimizer."""
    rank = Script(0).pass_("F", -1, 2).pass_("B", -1, 4).pass_("optimizer", -1, 1)
    fit = vk.fit_durations(record_of(rank))
    assert [fit.of_ns(kind) / MS for kind in ("F", "B", "optimizer")] == [2, 4, 1]


def two_ranks(messages: Sequence[tuple[int, float]], is_waiting: bool = True) -> Record:
    """Messages of so many bytes that take so long, from rank 0 to rank 1, each 100 ms after the last."""
    sender, receiver = Script(0).pass_("F", 0, 1), Script(1).pass_("F", 1, 1)
    for number, (payload_bytes, ms) in enumerate(messages, 1):
        for rank, time in ((sender, 100 * number), (receiver, 100 * number + (-50 if is_waiting else 50))):
            rank.idle(time - rank.now / MS)
        sender.message(SpanKind.SEND, 1, payload_bytes)
        receiver.message(SpanKind.RECEIVE, 0, payload_bytes).waits_until(100 * number + max(ms, 50 * (not is_waiting)))
    return record_of(sender, receiver)


@pytest.mark.parametrize(
    ("messages", "link"),
    [
        ([(1000, 3), (1000, 5), (1000, 4)], vk.Link(0.004, math.inf)),
        ([(1000, 3), (3000, 5), (2000, 4)], vk.Link(0.002, 1e6)),
        ([(1000, 5), (3000, 3)], vk.Link(0.004, math.inf)),
        ([(1000, 1), (3000, 9)], vk.Link(0.0, 1e6 / 4)),
    ],
)
def test_a_link_is_fitted_to_messages_that_were_waited_for(
    messages: Sequence[tuple[int, float]], link: vk.Link
) -> None:
    """One size: all is latency. Two or more: least squares through their medians, neither α nor 1/β negative."""
    found = vk.fit_durations(two_ranks(messages)).link
    assert found is not None
    assert found.latency_s == pytest.approx(link.latency_s)
    assert found.bandwidth_bytes_per_s == pytest.approx(link.bandwidth_bytes_per_s)


def test_a_message_that_nobody_waited_for_tells_nothing() -> None:
    """It arrived at some time before the receiver looked."""
    assert vk.fit_durations(two_ranks([(1000, 3)], is_waiting=False)).link is None


def test_scaled_durations_are_plain_ones() -> None:
    """Half the samples in half the time, for each stage; a fit's facts do not carry over."""
    fit = vk.fit_durations(record_of(Script(0).pass_("F", 0, 4).pass_("F", 1, 2)))
    half = fit.scaled(0.5)
    assert type(half) is vk.Durations
    assert [half.of_ns("F", stage) / MS for stage in (0, 1)] == [2, 1]
    with pytest.raises(vk.InvalidInputError, match=r"factor=0: must be positive and finite; use 0\.5 to"):
        fit.scaled(0)


def test_the_table_has_a_row_for_each_kind_and_stage() -> None:
    fit = vk.fit_durations(record_of(Script(0).pass_("F", 0, 4).pass_("F", 1, 2).pass_("B", 0, 8)))
    table = fit.table()
    assert table[["kind", "stage", "count", "median s"]].values.tolist() == [
        ["F", 0, 1, 0.004],
        ["B", 0, 1, 0.008],
        ["F", 1, 1, 0.002],
    ]


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (Script(0), "run=[]: has no labelled forward or backward; run a vk.pipeline, or label"),
        (Script(0).pass_("optimizer", -1, 1), "run=['optimizer']: has no labelled forward or backward"),
        (Script(0).pass_("F", 1, 1), "run='stage 0': has no forward in this run; fit a run in which each stage runs"),
    ],
)
def test_a_run_that_tells_nothing_is_refused(rank: Script, message: str) -> None:
    with pytest.raises(vk.InvalidInputError) as caught:
        vk.fit_durations(record_of(rank))
    assert str(caught.value).startswith(message)
