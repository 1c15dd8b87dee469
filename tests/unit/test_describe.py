"""Summaries in words: every number that they tell is the metrics' own."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest

import vizkit as vk
from tests.handmade import gpipe
from tests.strategies import drawn
from vizkit.errors import InvalidInputError
from vizkit.replay import replay
from vizkit.trace import Span, Trace

MS = 1_000_000


def test_a_pipeline_tells_times_bytes_and_bubble():
    """GPipe, p = 2 stages, m = 2 microbatches: (p − 1)/(m + p − 1) = 1/3 of the total, (p − 1)/m = 1/2 of the ideal."""
    trace = drawn(["F0 F1 .  .  B1 B0", ".  F0 F1 B1 B0 . "])
    assert vk.describe(trace) == "\n".join(
        [
            "2 ranks, 8 spans, 6 s on the ideal clock: computed, nothing ran.",
            "Share of 6 s    compute  communication  exposed communication     idle",
            "rank 0            66.7%           0.0%                   0.0%    33.3%",
            "rank 1            66.7%           0.0%                   0.0%    33.3%",
            "No bytes moved between ranks.",
            "Bubble: 33.3% of the total time, 50.0% of the ideal time.",
        ]
    )


def test_bytes_on_the_wire_stand_beside_the_payload():
    """A ring all-reduce of 1,000 bytes on 4 ranks moves 2(n − 1)/n × n = 6 payloads."""
    trace = Trace.from_spans(
        [Span(r, "all_reduce", 0, MS, payload_bytes=1_000, operation=0) for r in range(4)], clock="virtual"
    )
    assert "On the wire: 6 kB for 1 kB of payload. 1 all-reduce (6 kB)." in vk.describe(trace)


def test_a_send_to_nobody_known_is_drawn_but_not_counted():
    """Profilers' files name no receiver: the figures stand, and the summary says what it leaves out."""
    spans = [Span(0, "send", 0, MS, payload_bytes=10), Span(0, "send", MS, 2 * MS, payload_bytes=5, peer=1)]
    trace = Trace.from_spans(spans, clock="wall", world_size=2)
    lines = vk.describe(vk.timeline(trace)).splitlines()
    assert "On the wire: 5 B for 5 B of payload. 1 send (5 B)." in lines
    assert "1 send without a known receiver not counted." in lines
    assert vk.traffic_map(trace).data[0].customdata.sum() == 5


def test_a_stage_that_waits_for_the_one_before_names_no_straggler():
    """In a pipeline messages are late because of the order of the stages; late collectives still count."""
    trace = replay(gpipe(4, 4), durations={"F": 1, "B": 2})
    assert vk.metrics.straggler(trace) is not None
    assert "Straggler" not in vk.describe(trace)


def test_straggler_is_named():
    """Rank 1 comes 8 ms late to an all-reduce; ranks 0 and 2 wait for it."""
    spans = [Span(r, "all_reduce", 9 * MS if r == 1 else MS, 10 * MS, operation=0) for r in range(3)]
    assert "Straggler: rank 1" in vk.describe(Trace.from_spans(spans, clock="wall"))


def test_no_bubble_without_a_pipeline_kind():
    """An optimizer step alone has no bubble to speak of, and a trace that takes no time has none that is a number."""
    assert "Bubble" not in vk.describe(Trace.from_spans([Span(0, "optimizer", 0, MS)], clock="wall"))
    assert "Bubble" not in vk.describe(Trace.from_spans([Span(0, "F", 5, 5)], clock="wall"))


def test_notes_are_facts_of_the_run():
    trace = Trace.from_spans([Span(0, "F", 0, MS)], clock="wall", notes={"backend": "gloo", "device": "cpu"})
    assert "backend gloo, device cpu." in vk.describe(trace).splitlines()


def test_many_ranks_are_summed_up():
    """Over 16 ranks: the least, the mean and the most in place of a line each."""
    trace = Trace.from_spans([Span(r, "F", 0, (r + 1) * MS) for r in range(20)], clock="ideal")
    lines = [line.split()[:2] for line in vk.describe(trace).splitlines()]
    assert [line for line in lines if line[0] in ("least", "mean", "most")] == [
        ["least", "5.0%"], ["mean", "52.5%"], ["most", "100.0%"],
    ]  # fmt: skip


def test_nothing_recorded():
    assert vk.describe(Trace.from_spans([], clock="wall", world_size=2)) == (
        "2 ranks, 0 spans: nothing was recorded (wall clock: what happened on this machine)."
    )


def test_figure_and_trace_tell_the_same():
    trace = Trace.from_spans([Span(0, "F", 0, MS)], clock="ideal")
    assert vk.describe(vk.timeline(trace)) == vk.describe(trace)


def test_a_foreign_figure_is_listed():
    fig = go.Figure([go.Scatter(y=[1], name="loss"), go.Bar(y=[1])]).update_layout(title="Training")
    assert vk.describe(fig) == "Training: loss (scatter), unnamed (bar)."
    assert vk.describe(go.Figure()) == "A figure without a title: nothing."


def test_refuses_anything_else():
    with pytest.raises(InvalidInputError, match=r"^fig_or_trace=3: is neither a trace nor a Plotly figure; give"):
        vk.describe(3)
