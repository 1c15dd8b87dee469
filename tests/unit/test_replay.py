"""Replay runs a record on virtual devices: by hand, and by laws that hold for any record."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.handmade import Step, gpipe, record
from vizkit import Durations, InvalidInputError, Link, Trace, as_grid
from vizkit.collectives import time_s
from vizkit.memory_samples import CATEGORIES, MemorySamples
from vizkit.record import Record
from vizkit.replay import replay
from vizkit.trace import COLLECTIVE_KINDS, Role, SpanKind

SECOND = 1_000_000_000
LINK = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9)
"""A microsecond, and a nanosecond a byte."""


def lane(trace: Trace, rank: int) -> list[tuple[str, int, int]]:
    """Compute and waits of a rank, in order of time."""
    spans = [span for span in trace.filter(rank=rank) if span.kind.role is not Role.COMMUNICATION]
    return [(span.kind.value, span.start_ns, span.end_ns) for span in sorted(spans, key=lambda span: span.start_ns)]


def communications(trace: Trace, rank: int) -> list[tuple[str, int, int]]:
    spans = [span for span in trace.filter(rank=rank) if span.kind.role is Role.COMMUNICATION]
    return [(span.kind.value, span.start_ns, span.end_ns) for span in spans]


def test_a_collective_starts_when_its_last_member_has_arrived() -> None:
    """Rank 0 arrives at 100 and waits for rank 1, which arrives at 250; both go on when the link says."""
    program = [("post", "sum", "all_reduce", {"payload_bytes": 1000, "algorithm": "ring"}), ("wait", "sum")]
    trace = replay(record([("work", 100), *program], [("work", 250), *program, ("work", 5)]), LINK)
    end = 250 + round(time_s("all_reduce", "ring", 2, 1000, LINK) * SECOND)
    assert lane(trace, 0) == [("compute", 0, 100), ("wait", 100, end)]
    assert lane(trace, 1) == [("compute", 0, 250), ("wait", 250, end), ("compute", end, end + 5)]
    assert communications(trace, 0) == communications(trace, 1) == [("all_reduce", 250, end)]
    assert trace.clock.value == "virtual"
    assert trace.notes["link"] == "1 µs + bytes / 1 GB/s"


def test_a_group_runs_one_collective_at_a_time_and_other_groups_run_beside_it() -> None:
    """The second all-reduce of a group waits for the first; one of another group does not."""
    sizes = {"payload_bytes": 1000, "algorithm": "ring"}
    program = [
        ("post", "a", "all_reduce", sizes),
        ("post", "b", "all_reduce", sizes),
        ("post", "c", "all_reduce", {**sizes, "group": "1"}),
        ("wait", "a", "b", "c"),
    ]
    one = round(time_s("all_reduce", "ring", 2, 1000, LINK) * SECOND)
    trace = replay(record(program, program), LINK)
    assert communications(trace, 0) == [
        ("all_reduce", 0, one), ("all_reduce", one, 2 * one), ("all_reduce", 0, one)
    ]  # fmt: skip


def test_a_message_leaves_arrives_and_is_waited_for() -> None:
    """100 bytes leave in 100 ns; 1 µs later they are there: a wait on the send ends first."""
    sender = [("work", 50), ("post", "x", "send", {"peer": 1, "payload_bytes": 100}), ("wait", "x"), ("work", 1)]
    receiver = [("post", "x", "receive", {"peer": 0, "payload_bytes": 100}), ("wait", "x"), ("work", 1)]
    trace = replay(record(sender, receiver), LINK)
    assert lane(trace, 0) == [("compute", 0, 50), ("wait", 50, 150), ("compute", 150, 151)]
    assert lane(trace, 1) == [("wait", 0, 1150), ("compute", 1150, 1151)]
    assert communications(trace, 0) == [("send", 50, 150)]
    assert communications(trace, 1) == [("receive", 50, 1150)]
    assert len(set(trace.filter(kind=["send", "receive"]).operation)) == 1


def test_messages_share_their_edge_and_a_late_receive_finds_its_bytes() -> None:
    """Two messages on one edge leave one after the other; whoever receives later than they arrive does not wait."""
    post = {"peer": 1, "payload_bytes": 100}
    sender = [("post", "x", "send", post), ("post", "y", "send", {**post, "tag": 7})]
    receiver = [
        ("work", 5000),
        ("post", "y", "receive", {"peer": 0, "payload_bytes": 100, "tag": 7}),
        ("post", "x", "receive", {"peer": 0, "payload_bytes": 100}),
        ("wait", "x", "y"),
    ]
    trace = replay(record(sender, receiver), LINK)
    assert communications(trace, 0) == [("send", 0, 100), ("send", 100, 200)]
    assert communications(trace, 1) == [("receive", 5000, 5000), ("receive", 5000, 5000)]
    assert lane(trace, 1) == [("compute", 0, 5000)]


def test_all_send_first_does_not_hang() -> None:
    """Sends are eager: a ring in which everyone sends before receiving ends."""
    programs = [
        [
            ("post", "out", "send", {"peer": (rank + 1) % 3}),
            ("wait", "out"),
            ("post", "in", "receive", {"peer": (rank - 1) % 3}),
            ("wait", "in"),
        ]
        for rank in range(3)
    ]
    trace = replay(record(*programs), LINK)
    assert {end for rank in range(3) for _, _, end in communications(trace, rank)} == {8, 1008}


def test_posting_does_not_interrupt_a_span_and_waiting_does() -> None:
    """An asynchronous collective overlaps the span that posted it: one span, until the thread blocks."""
    program = [
        ("open", "B"),
        ("work", 10),
        ("post", "a", "all_reduce", {"payload_bytes": 1000, "algorithm": "ring"}),
        ("work", 10),
        ("wait_implicit", "a"),
        ("close",),
    ]
    trace = replay(record(program, program), LINK)
    assert lane(trace, 0)[0] == ("B", 0, 20)
    assert [kind for kind, *_ in lane(trace, 0)] == ["B", "wait"]
    assert communications(trace, 0)[0][:2] == ("all_reduce", 10)


def test_the_innermost_span_labels_the_compute() -> None:
    """Outer, inner, outer again; an outer span with nothing of its own leaves no span; an empty one leaves a mark."""
    program = [
        ("open", "F"), ("work", 1), ("open", "data"), ("work", 2), ("close",), ("work", 3), ("close",),
        ("open", "compute"), ("open", "W"), ("work", 4), ("close",), ("close",),
        ("open", "optimizer"), ("close",),
    ]  # fmt: skip
    assert lane(replay(record(program)), 0) == [
        ("F", 0, 1), ("data", 1, 3), ("F", 3, 6), ("W", 6, 10), ("optimizer", 10, 10)
    ]  # fmt: skip


@pytest.mark.parametrize("num_ranks, num_microbatches", [(1, 1), (2, 3), (4, 4), (4, 8), (8, 5)])
def test_gpipe_with_unit_durations_has_the_published_bubble(num_ranks: int, num_microbatches: int) -> None:
    """(p − 1) / (m + p − 1) of the total is idle (GPipe, Huang et al. 2019), exactly, when F = B."""
    trace = replay(gpipe(num_ranks, num_microbatches), link=None, durations={"F": 1.0, "B": 1.0})
    total = num_ranks * trace.duration_ns
    busy = sum(span.duration_ns for span in trace if span.kind.role is Role.COMPUTE)
    assert trace.duration_ns == 2 * (num_microbatches + num_ranks - 1) * SECOND
    assert (total - busy) * (num_microbatches + num_ranks - 1) == total * (num_ranks - 1)


def test_gpipe_as_a_grid() -> None:
    """Two stages and two microbatches, drawn."""
    assert as_grid(replay(gpipe(2, 2), link=None, durations=Durations(F=1, B=2))) == [
        "F0 F1 .  .  .  B0 B0 B1 B1",
        ".  F0 F1 B0 B0 B1 B1 .  .",
    ]


def test_durations_by_stage_and_kinds_left_out() -> None:
    """A sequence gives each stage its own time; a kind that is not named, and compute outside spans, take none."""
    programs = [
        [("work", 99), ("open", "F", {"stage": stage}), ("work", 5), ("close",), ("open", "data"), ("close",)]
        for stage in range(2)
    ]
    trace = replay(record(*programs), durations={"F": [1.0, 3.0]})
    assert lane(trace, 0) == [("F", 0, SECOND), ("data", SECOND, SECOND)]
    assert lane(trace, 1) == [("F", 0, 3 * SECOND), ("data", 3 * SECOND, 3 * SECOND)]


def test_tensor_samples_lie_at_the_same_times_in_every_run_of_given_durations() -> None:
    """Two samples between a forward's events lie at 1/3 and 2/3 of it, however long each took on this machine."""

    def times_ns(*wall_ns: int, durations: Durations | None) -> list[int]:
        program = [("open", "F"), ("work", 300), ("close",), ("work", 50)]  # wall: 1000 to 1010, to 1310, to 1320
        (rank,) = record(program).ranks
        samples = MemorySamples(np.array(wall_ns), np.arange(4 * len(wall_ns)).reshape(-1, 4))
        trace = replay(Record((dataclasses.replace(rank, tensors=samples),)), durations=durations)
        assert [counter.name for counter in trace.counters] == list(CATEGORIES)
        return trace.counters[0].times_ns.tolist()

    given = Durations(F=3)
    slow, fast = (1005, 1011, 1300, 1330, 1360), (1001, 1030, 1031, 1321, 1322)
    assert times_ns(*slow, durations=given) == times_ns(*fast, durations=given)
    assert times_ns(*slow, durations=given) == [0, SECOND, 2 * SECOND, 3 * SECOND, 3 * SECOND]
    assert times_ns(*slow, durations=None) != times_ns(*fast, durations=None)


def test_ddp_buckets_are_posted_evenly_over_a_backward_of_given_duration() -> None:
    """Three buckets in a backward of 3 s leave after 1, 2 and 3 s, wherever they were posted in reality."""
    steps: list[Step] = [("open", "B"), ("work", 2), ("post", "a", "all_reduce"), ("post", "b", "all_reduce")]
    steps += [("work", 50), ("post", "c", "all_reduce"), ("wait_implicit", "a", "b", "c"), ("close",)]
    trace = replay(record(steps, steps), link=None, durations={"B": 3.0})
    assert communications(trace, 0) == [("all_reduce", n * SECOND, n * SECOND) for n in (1, 2, 3)]
    assert lane(trace, 1) == [("B", 0, 3 * SECOND)]


def test_where_communications_fall_in_a_span_of_given_duration() -> None:
    """Before sends and collectives, and after a last wait that is not one for a send; else at the end."""
    receive, send = ("post", "in", "receive", {"peer": 1}), ("post", "out", "send", {"peer": 1})
    other = [("post", "in", "send", {"peer": 0}), ("post", "out", "receive", {"peer": 0}), ("wait", "out")]

    def sent_at(*steps: Step) -> list[int]:
        trace = replay(record([("open", "F"), *steps, ("close",)], other), link=None, durations={"F": 6.0})
        return [start // SECOND for kind, start, _ in communications(trace, 0) if kind != "receive"]

    assert sent_at(receive, ("wait", "in"), send) == [6]
    assert sent_at(receive, ("wait", "in"), send, ("wait", "out")) == [6]
    assert sent_at(send, receive, ("wait", "in")) == [3]
    assert sent_at(send, receive) == [6]


@pytest.mark.parametrize(
    "programs, message",
    [
        (
            [[("post", "a", "all_reduce"), ("wait", "a")], [("work", 3)], [("post", "a", "all_reduce")]],
            "record='all_reduce of group (0, 1, 2)': cannot finish: rank 1 never entered it; "
            "replay the record of a run that ended on all ranks",
        ),
        (
            [[("post", "a", "receive", {"peer": 1}), ("wait", "a")], []],
            "record='receive on rank 0': rank 1 never sent what rank 0 receives; "
            "replay the record of a run that ended on all ranks",
        ),
        (
            [[("post", "a", "all_reduce")], [("post", "a", "broadcast")]],
            "record=['all_reduce', 'broadcast']: the members of group (0, 1) posted different collectives as number 1; "
            "post the same collectives in the same order on each rank",
        ),
    ],
)
def test_a_record_that_cannot_finish_is_refused_by_name(programs: list[list[Step]], message: str) -> None:
    """Replay never loops: it says which rank is missing from what."""
    with pytest.raises(InvalidInputError) as caught:
        replay(record(*programs))
    assert str(caught.value) == message


def test_a_circle_of_receives_is_refused() -> None:
    """Two ranks that receive before they send would wait for ever."""
    programs = [
        [("post", "in", "receive", {"peer": peer}), ("wait", "in"), ("post", "out", "send", {"peer": peer})]
        for peer in (1, 0)
    ]
    with pytest.raises(InvalidInputError, match=r"never sent|waits for"):
        replay(record(*programs))


@st.composite
def programs(draw: st.DrawFn) -> Record:
    """Records of runs that ended: the same communications in the same order on each rank, work and waits anywhere."""
    world_size = draw(st.integers(1, 4))
    lanes: list[list[Step]] = [[] for _ in range(world_size)]
    pending: list[list[str]] = [[] for _ in range(world_size)]
    for number in range(draw(st.integers(0, 12))):
        name, payload = str(number), draw(st.integers(0, 5000))
        if world_size > 1 and draw(st.booleans()):
            source, destination = draw(st.permutations(range(world_size)))[:2]
            posts = {source: ("send", destination), destination: ("receive", source)}
        else:
            kind = draw(st.sampled_from(COLLECTIVE_KINDS))
            posts = dict.fromkeys(range(world_size), (kind.value, -1))
        for rank, (kind_name, peer) in posts.items():
            steps = lanes[rank]
            label = draw(st.sampled_from(["F", "B", "optimizer", ""]))
            steps += [("open", label)] if label else []
            steps.append(("work", draw(st.integers(0, 3000))))
            steps.append(("post", name, kind_name, {"peer": peer, "payload_bytes": payload}))
            pending[rank].append(name)
            if draw(st.booleans()):
                steps.append(("wait", *pending[rank]))
                pending[rank].clear()
            steps += [("close",)] if label else []
            steps.append(("work", draw(st.integers(0, 3000))))
    return record(*lanes)


@settings(max_examples=150, deadline=None)
@given(programs(), st.sampled_from([None, LINK, Link(0.0, 1e6), Link(1e-5, math.inf)]))
def test_laws_of_replay(record: Record, link: Link | None) -> None:
    """Work is conserved, no byte is lost or invented, lanes never run backwards, members agree, and it repeats."""
    trace = replay(record, link)
    assert list(trace) == list(replay(record, link))
    assert int(trace.payload_bytes.sum()) == record.payload_bytes
    assert int(trace.is_role(Role.COMMUNICATION).sum()) == sum(1 for rank in record.ranks for _ in rank.calls)
    for rank in record.ranks:
        assert sum(end - start for kind, start, end in lane(trace, rank.rank) if kind != "wait") == sum(
            event.before_ns - before for event, before in zip(rank.events, _left(rank), strict=False)
        ) + (rank.end_ns - _left(rank)[-1])
        steps = lane(trace, rank.rank)
        assert all(first[2] <= second[1] for first, second in pairwise(steps))
    times = defaultdict(set)
    for span in trace:
        if span.kind in COLLECTIVE_KINDS:
            times[span.operation].add((span.kind, span.start_ns, span.end_ns))
        if span.kind is SpanKind.RECEIVE:
            assert span.end_ns >= span.start_ns
    assert all(len(versions) == 1 for versions in times.values())


def _left(rank) -> list[int]:
    return [rank.start_ns, *(event.after_ns for event in rank.events)]


@settings(max_examples=60, deadline=None)
@given(programs(), st.integers(0, 2000), st.integers(0, 2000))
def test_given_durations_are_exact_in_any_record(record: Record, forward_ms: int, backward_ms: int) -> None:
    """Each kind's total is its duration times its number of spans, to the nanosecond."""
    from vizkit.record import SpanOpened

    trace = replay(record, None, {"F": forward_ms / 1000, "B": backward_ms / 1000})
    for kind, milliseconds in (("F", forward_ms), ("B", backward_ms), ("optimizer", 0), ("compute", 0)):
        opened = sum(
            isinstance(event, SpanOpened) and event.label.kind.value == kind
            for rank in record.ranks
            for event in rank.events
        )
        total = sum(span.duration_ns for span in trace.filter(kind=kind))
        assert total == opened * milliseconds * (SECOND // 1000)


def test_replay_time_grows_no_faster_than_the_record() -> None:
    """Four times the events take about four times as long: no search through what is already done."""

    def seconds(num_microbatches: int) -> float:
        big = gpipe(4, num_microbatches)
        start = time.process_time()
        replay(big, LINK)
        return time.process_time() - start

    seconds(50)
    assert min(seconds(400) for _ in range(3)) < 12 * min(seconds(100) for _ in range(3))


def test_an_inner_span_that_posts_comes_after_what_the_outer_one_computed() -> None:
    """A hook of 3 s in a backward of 6 s: all of the backward, a second of the hook, its first all-reduce, and on."""
    steps: list[Step] = [("open", "B"), ("open", "compute")]
    for name in "ab":
        steps += [("post", name, "all_reduce"), ("wait", name)]
    steps += [("close",), ("close",)]
    trace = replay(record(steps, steps), link=None, durations={"B": 6.0, "compute": 3.0})
    assert [start // SECOND for _, start, _ in communications(trace, 0)] == [7, 8]
    assert lane(trace, 0)[0] == ("B", 0, 6 * SECOND)
    assert trace.duration_ns == 9 * SECOND
