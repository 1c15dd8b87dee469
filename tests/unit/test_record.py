"""A record is plain data; its wall trace says what happened, and its table what was communicated."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from tests.handmade import gpipe, record
from vizkit.errors import InvalidInputError
from vizkit.lanes import Lane
from vizkit.record import Call, Record, Wait, collectives_table, finished_part, operation_keys, wall_trace
from vizkit.replay import replay
from vizkit.trace import Role, Span


def wall_lane(recorded: Record, rank: int = 0) -> list[tuple[str, int, int]]:
    spans = [span for span in wall_trace(recorded).filter(rank=rank) if span.kind.role is not Role.COMMUNICATION]
    return [(span.kind.value, span.start_ns, span.end_ns) for span in spans]


def test_wall_time_begins_with_the_first_rank_and_leaves_no_gap() -> None:
    """A rank's lane is compute and waits, end to end; events take the 10 ns that they took."""
    program = [("work", 100), ("post", "a", "all_reduce"), ("open", "F"), ("work", 50), ("wait", "a"), ("close",)]
    recorded = record(program, program)
    expected = [("compute", 0, 110), ("F", 110, 170), ("wait", 170, 180), ("compute", 180, 190)]
    assert wall_lane(recorded) == expected
    early, late = recorded.ranks[0], replace(recorded.ranks[1], start_wall_ns=1_005)
    assert wall_lane(Record((early, late)), rank=1) == [("compute", 5, 110), *expected[1:]]


def test_a_communication_lasts_until_it_was_seen_to_be_over() -> None:
    """From its posting to its completion; where nobody saw that, to the end of its posting."""
    recorded = record([("work", 5), ("post", "a", "all_reduce"), ("work", 500)])
    assert [(s.start_ns, s.end_ns) for s in wall_trace(recorded).filter(kind="all_reduce")] == [(5, 15)]
    rank = recorded.ranks[0]
    events = tuple(replace(e, done_wall_ns=1_300) if isinstance(e, Call) else e for e in rank.events)
    seen = wall_trace(Record((replace(rank, events=events),)))
    assert [(s.start_ns, s.end_ns) for s in seen.filter(kind="all_reduce")] == [(5, 300)]


def test_a_wait_inside_a_backward_is_found_by_the_time_that_was_not_computed() -> None:
    """Torch waits for DDP's buckets out of sight: 400 ns passed after the post, of which 60 were computed."""
    program = [("open", "B"), ("post", "a", "all_reduce"), ("work", 400), ("wait_implicit", "a"), ("close",)]
    rank = record(program).ranks[0]
    events = list(rank.events)
    events[1] = replace(events[1], done_wall_ns=events[2].start_wall_ns - 20)
    events[2] = replace(events[2], before_ns=events[1].after_ns + 60, end_wall_ns=events[2].start_wall_ns)
    lane = wall_lane(Record((replace(rank, events=tuple(events)),)))
    assert ("wait", 20 + 60, 420) in lane
    on_time = replace(events[1], done_wall_ns=events[1].end_wall_ns)
    events[1] = on_time
    assert "wait" not in [kind for kind, *_ in wall_lane(Record((replace(rank, events=tuple(events)),)))]


def test_calls_of_one_operation_share_its_key() -> None:
    """The n-th collective of a group, or the n-th message on an edge with a tag, on whichever rank it was posted."""
    ring = [
        [("post", "s", "send", {"peer": 1}), ("post", "r", "receive", {"peer": 1, "tag": 3}), ("post", "c", "barrier")],
        [("post", "s", "send", {"peer": 0, "tag": 3}), ("post", "c", "barrier"), ("post", "r", "receive", {"peer": 0})],
    ]
    recorded = record(*ring)
    first, second = (operation_keys(rank) for rank in recorded.ranks)
    assert first == [("0", 0, 1, 0, 0), ("0", 1, 0, 3, 0), ("0", (0, 1), 0)]
    assert set(first) == set(second)
    numbers = [sorted(wall_trace(recorded).filter(rank=rank).operation.tolist()) for rank in (0, 1)]
    assert [n for n in numbers[0] if n >= 0] == [n for n in numbers[1] if n >= 0] == [0, 1, 2]


def test_the_table_has_one_row_for_each_distinct_communication() -> None:
    """Collectives count once whatever their number of members, messages once as sends."""
    program = [("post", str(n), "all_reduce", {"payload_bytes": 64}) for n in range(3)]
    program.append(("post", "b", "broadcast", {"payload_bytes": 8, "group": "1", "members": (0, 1)}))
    table = collectives_table(record([*program, ("post", "s", "send", {"peer": 1})],
                                     [*program, ("post", "s", "receive", {"peer": 0})]))  # fmt: skip
    assert table.columns.tolist() == ["op", "group ranks", "payload bytes", "times seen"]
    assert table.values.tolist() == [
        ["all_reduce", [0, 1], 64, 3],
        ["broadcast", [0, 1], 8, 1],
        ["send", [0, 1], 8, 1],
    ]
    assert len(collectives_table(Record(()))) == 0


def test_bytes_are_those_of_all_calls() -> None:
    """The wall trace has a communication span for each call, with its bytes."""
    recorded = gpipe(3, 4)
    assert int(wall_trace(recorded).payload_bytes.sum()) == recorded.payload_bytes == 2 * 2 * 2 * 4 * 8


def test_memory_samples_become_counters() -> None:
    """Bytes over time, from the run's beginning."""
    rank = replace(record([("work", 100)]).ranks[0], memory_wall_ns=(1_000, 1_050), memory_bytes=(7, 9))
    (counter,) = wall_trace(Record((rank,))).counters
    assert (counter.name, counter.unit, counter.rank) == ("memory", "bytes", 0)
    assert counter.times_ns.tolist() == [0, 50]
    np.testing.assert_array_equal(counter.values, [7, 9])


def test_a_record_travels() -> None:
    """Plain data: it pickles to an equal value."""
    recorded = gpipe(2, 2)
    assert pickle.loads(pickle.dumps(recorded)) == recorded


def test_an_empty_record_has_an_empty_trace() -> None:
    assert len(wall_trace(Record(()))) == 0


@pytest.mark.parametrize("start_ns, end_ns", [(5, 5), (7, 3)])
def test_a_lane_draws_no_time_that_did_not_pass(start_ns: int, end_ns: int) -> None:
    spans: list[Span] = []
    lane = Lane(0, spans.append)
    lane.compute(start_ns, end_ns)
    lane.wait(start_ns, end_ns, "wait")
    lane.finish()
    assert spans == []


def test_waits_for_calls_before_the_record_are_ignored() -> None:
    """A wait for something that was posted before the user's function began names no call of the record."""
    rank = record([("post", "a", "all_reduce"), ("wait", "a")]).ranks[0]
    waits = tuple(event for event in rank.events if isinstance(event, Wait))
    assert [kind for kind, *_ in wall_lane(Record((replace(rank, events=waits),)))] == ["compute", "wait"]


def test_of_a_run_that_was_stopped_what_all_ranks_finished_can_be_replayed() -> None:
    """Rank 0 never came to the second collective: neither what follows it on rank 1 counts, nor what waits for that."""
    first = [("work", 100), ("post", "a", "all_reduce"), ("wait", "a"), ("open", "F"), ("work", 50)]
    behind = [*first, ("post", "r", "receive", {"peer": 1}), ("wait", "r"), ("close",)]
    ahead = [*first, ("post", "b", "all_reduce"), ("wait", "b"), ("close",), ("post", "s", "send", {"peer": 0})]
    stopped = record(behind, ahead)
    with pytest.raises(InvalidInputError, match="rank 1 never sent what rank 0 receives"):
        replay(stopped, link=None)
    part = finished_part(stopped)
    assert [[call.kind.value for call in rank.calls] for rank in part.ranks] == [["all_reduce"], ["all_reduce"]]
    assert replay(part, link=None).duration_ns == 150
    assert {span.kind.value for span in wall_trace(part)} == {"compute", "all_reduce", "wait", "F"}
    assert finished_part(part) == part
