"""Files of ranks: what was written comes back, and what is missing, doubled, cut off or foreign is named."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

import vizkit as vk
from vizkit.fingerprints import Fingerprint
from vizkit.formats.rank_file import (
    FORMAT_VERSION,
    Body,
    Header,
    Outcome,
    Reading,
    file_name,
    read_header,
    read_rank_file,
    write_rank_file,
)
from vizkit.formats.rank_folder import read_run
from vizkit.lanes import Label
from vizkit.memory_samples import MemorySamples
from vizkit.record import Call, Event, Fingerprinted, RankRecord, SpanClosed, SpanOpened, Wait
from vizkit.runtime.attempts import Proposal, Seen, decide, seen_in
from vizkit.runtime.saving import save_run

MS = 1_000_000
HOUR_NS = 3_600_000 * MS


def at(ms: float, until_ms: float | None = None, offset_ns: int = 0) -> dict[str, int]:
    """The stamps of an event, on a clock that is `offset_ns` ahead."""
    start, end = (int(time * MS) for time in (ms, ms if until_ms is None else until_ms))
    return {"before_ns": start, "after_ns": start, "start_wall_ns": start + offset_ns, "end_wall_ns": end + offset_ns}


def rank_record(rank: int, world_size: int = 2, offset_ns: int = 0, start_ms: float = 0, steps: int = 3) -> RankRecord:
    """A rank that computes, and meets the others in an all-reduce, again and again; odd ranks come 1 ms later."""
    events: list[Event] = []
    late = rank % 2
    for step in range(steps):
        begin = start_ms + 10 * step
        events += [
            SpanOpened(label=Label(vk.SpanKind.FORWARD, "forward", 0, step), **at(begin, None, offset_ns)),
            SpanClosed(**at(begin + 3 + late, None, offset_ns)),
            Call(
                call=step,
                kind=vk.SpanKind.ALL_REDUCE,
                group="0",
                members=tuple(range(world_size)),
                payload_bytes=1000,
                done_wall_ns=int((begin + 5 + 0.1 * rank) * MS) + offset_ns,
                **at(begin + 3 + late, None, offset_ns),
            ),
            Wait(calls=(step,), **at(begin + 3 + late, begin + 5 + 0.1 * rank, offset_ns)),
        ]
    start, end = int(start_ms * MS), int((start_ms + 10 * steps) * MS)
    return RankRecord(
        rank=rank,
        events=tuple(events),
        start_ns=start,
        end_ns=end,
        start_wall_ns=start + offset_ns,
        end_wall_ns=end + offset_ns,
    )


def write(
    folder: Path,
    rank: int,
    world_size: int = 2,
    *,
    attempt: int = 0,
    outcome: Outcome | None = Outcome.RETURNED,
    offset_ns: int = 0,
    start_ms: float = 0,
    run: str = "r1",
    host: str | None = None,
    more: tuple[Event, ...] = (),
) -> Path:
    """The file of a rank on a host of its own; `outcome=None`: it was killed before it wrote what it did."""
    record = rank_record(rank, world_size, offset_ns, start_ms)
    record = replace(record, events=record.events + more)
    began = Reading(unix_ns=int(start_ms * MS), monotonic_ns=record.start_wall_ns)
    header = Header(
        run=run,
        rank=rank,
        world_size=world_size,
        attempt=attempt,
        host=host or f"node{rank}",
        clock=host or f"clock{rank}",
        began=began,
        notes={"backend": "gloo", "device": "cpu"},
    )
    body = None
    if outcome is not None:
        body = Body(
            outcome=outcome, detail="planted" * (outcome is Outcome.RAISED), ended=began, record=record, result=rank
        )
    return write_rank_file(folder, header, body)


def test_a_record_comes_back_as_it_was(tmp_path: Path):
    """Every kind of event, with memory samples and fingerprints."""
    stamps = at(1, 2)
    events = (
        Call(
            call=0,
            kind=vk.SpanKind.ALL_TO_ALL,
            group="dp",
            members=(0, 3),
            payload_bytes=8,
            split_bytes=(3, 5),
            **stamps,
        ),
        Call(call=1, kind=vk.SpanKind.SEND, group="pp", members=(0, 1), payload_bytes=9, peer=1, tag=7, **stamps),
        Wait(calls=(0, 1), implicit=True, **stamps),
        SpanOpened(label=Label(vk.SpanKind.BACKWARD, "b", 1, 2), **stamps),
        SpanClosed(**stamps),
        Fingerprinted(fingerprint=Fingerprint("model", 3, -(2**63) + 1, same=True, members=(0, 1)), **stamps),
    )
    tensors = MemorySamples(np.array([1, 5]), np.array([[1, 2, 3, 4], [5, 6, 7, 8]]))
    record = replace(rank_record(0), events=events, memory_wall_ns=(1, 2), memory_bytes=(2**40, 3), tensors=tensors)
    header = Header(
        run="r", rank=0, world_size=4, attempt=2, host="a", clock="c", began=Reading(1, 2), notes={"k": "v"}
    )
    body = Body(outcome=Outcome.RETURNED, ended=Reading(3, 4), record=record, result={"loss": [0.5, None]})
    path = write_rank_file(tmp_path, header, body)
    assert path.name == "rank00000-attempt02.jsonl.gz"
    found = read_rank_file(path)
    assert found.header == read_header(path) == header
    assert replace(found.body.record, tensors=None) == replace(record, tensors=None)
    assert found.body.record.tensors.num_bytes.tolist() == tensors.num_bytes.tolist()
    assert found.body.result == {"loss": [0.5, None]}


def test_a_rank_alone_may_call_collectives(tmp_path: Path):
    """In a world of one, a collective without a root has no peer: −1, as anywhere."""
    call = Call(call=0, kind=vk.SpanKind.ALL_REDUCE, group="dp", members=(0,), payload_bytes=4, **at(1, 2))
    header = Header(run="r", rank=0, world_size=1, attempt=0, host="a", clock="c", began=Reading(1, 2), notes={})
    record = replace(rank_record(0), events=(call,))
    path = write_rank_file(tmp_path, header, Body(outcome=Outcome.RETURNED, ended=Reading(3, 4), record=record))
    assert read_rank_file(path).body.record.events == (call,)


def test_a_folder_is_one_trace_on_one_axis(tmp_path: Path):
    """Clocks an hour apart: each collective ends after its last member entered; the notes say how sure that is."""
    write(tmp_path, 0)
    write(tmp_path, 1, offset_ns=HOUR_NS)
    trace = vk.read_trace(tmp_path)
    assert (trace.world_size, trace.clock, trace.duration_ns) == (2, "wall", pytest.approx(30 * MS, abs=2 * MS))
    reduces = trace.filter(kind="all_reduce")
    for operation in range(3):
        spans = [span for span in reduces if span.operation == operation]
        assert sorted(span.rank for span in spans) == [0, 1]
        assert min(span.end_ns for span in spans) >= max(span.start_ns for span in spans)
    error_s = float(trace.notes["clock_error_s"])
    # rank 0 ends 1 ms after rank 1 entered, rank 1 ends 2.1 ms after rank 0 entered
    assert error_s == pytest.approx((1e-3 + 2.1e-3) / 2, rel=0.05)
    true_start, shown_start = 4 * MS, next(span.start_ns for span in reduces if span.rank == 1)
    assert (
        abs(shown_start - next(span.start_ns for span in reduces if span.rank == 0) + 3 * MS - true_start)
        <= error_s * 1e9
    )
    assert trace.notes["hosts"] == "node0, node1"
    assert f"clock_error_s {trace.notes['clock_error_s']}" in vk.describe(trace)


def test_ranks_of_one_host_share_its_clock(tmp_path: Path):
    """No error at all, unless they are treated as strangers on purpose."""
    for rank in range(2):
        write(tmp_path, rank, host="node")
    run = read_run(tmp_path)
    assert (run.clock_error_s, run.hosts) == (0.0, ("node",))
    assert run.results == [0, 1]
    assert "one host, one clock" in run.summary()
    assert read_run(tmp_path, trust_hosts=False).clock_error_s > 1e-3


def test_a_restart_shows_as_a_gap(tmp_path: Path):
    """Two attempts on one axis; between them each rank waits, and the trace says for what."""
    for rank in range(2):
        write(tmp_path, rank, outcome=Outcome.RAISED, offset_ns=rank * HOUR_NS)
        write(tmp_path, rank, attempt=1, start_ms=100, offset_ns=rank * HOUR_NS)
    run = read_run(tmp_path)
    gaps = [span for span in run.trace if span.name == "restart 1"]
    assert [span.rank for span in gaps] == [0, 1]
    assert {span.kind for span in gaps} == {vk.SpanKind.WAIT}
    assert [span.duration_ns for span in gaps] == pytest.approx([70 * MS] * 2, abs=run.clock_error_s * 1e9)
    assert run.trace.notes["attempts"] == "2"
    assert len(run.trace.filter(kind="all_reduce")) == 12
    assert len(set(run.trace.filter(kind="all_reduce").operation.tolist())) == 6
    assert run.replay().duration_ns < 50 * MS  # the last attempt alone
    assert "attempt 0: 2 ranks, 30.5 ms; ranks 0-1 raised planted" in run.summary()


def test_a_gap_begins_when_the_last_collective_has_ended(tmp_path: Path):
    """A bucket in flight outlives the function that raised, by what the other ranks need to notice."""
    ranks = {"group": "0", "members": (0, 1), "payload_bytes": 1000}
    in_flight = Call(call=3, kind=vk.SpanKind.ALL_REDUCE, done_wall_ns=45 * MS, **ranks, **at(29))
    for rank in range(2):
        write(tmp_path, rank, outcome=Outcome.RAISED, host="node", more=(in_flight,))
        write(tmp_path, rank, attempt=1, start_ms=100, host="node")
    gaps = [span for span in read_run(tmp_path).trace if span.name == "restart 1"]
    assert [(span.start_ns, span.end_ns) for span in gaps] == [(45 * MS, 100 * MS)] * 2


def test_a_killed_rank_of_an_earlier_attempt_is_a_fact_and_no_error(tmp_path: Path):
    """It left its name and nothing else, or nothing at all."""
    write(tmp_path, 0, outcome=Outcome.STOPPED)
    write(tmp_path, 1, outcome=None)
    for rank in range(2):
        write(tmp_path, rank, attempt=1, start_ms=100)
    run = read_run(tmp_path)
    assert [attempt.number for attempt in run.attempts] == [0, 1]
    assert run.left_out == (f"{file_name(1, 0)}: rank 1 on node1 has written nothing yet (attempt 0)",)
    assert [span.rank for span in run.trace if span.name == "restart 1"] == [0]
    assert "left out" in run.trace.notes


def missing(folder: Path) -> str:
    (folder / file_name(1, 0)).unlink()
    return "rank 1 of 2 is missing (attempt 0); copy its file from the node where it ran, or partial=True"


def doubled(folder: Path) -> str:
    copy = folder / "rank00001-attempt00 (copy).jsonl.gz"
    copy.write_bytes((folder / file_name(1, 0)).read_bytes())
    return "rank 1 of attempt 0 is in rank00001-attempt00 (copy).jsonl.gz too; keep one of the two, or partial=True"


def cut_off(folder: Path) -> str:
    path = folder / file_name(1, 0)
    path.write_bytes(path.read_bytes()[:-40])
    return "copy it again from the node where rank 1, attempt 0 ran, or read the others with partial=True"


def foreign(folder: Path) -> str:
    other = write(folder, 2, 3, run="r2")
    return f"{other}: rank 2 of another run (r2; the other files are of r1); move it to a folder of its own"


def of_another_size(folder: Path) -> str:
    other = write(folder, 2, world_size=4)
    return f"{other}: rank 2 of 4 ranks, and the others are of 2; move it to a folder of its own"


def still_running(folder: Path) -> str:
    path = write(folder, 1, outcome=None)
    return f"{path}: rank 1 on node1 has written nothing yet (attempt 0): it still runs, or was killed; wait for it"


def no_file_of_a_rank(folder: Path) -> str:
    path = folder / "rank00009-attempt00.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"hello": 1}\n'))
    return f"{path}: is no file of a rank (no 'vizkit rank' in its first line)"


def damaged(folder: Path) -> str:
    path = folder / file_name(1, 0)
    text = gzip.decompress(path.read_bytes()).replace(b'"payload_bytes":1000', b'"payload_bytes":"many"')
    path.write_bytes(gzip.compress(text))
    return "holds a damaged record (ValidationError: Expected `int`, got `str`"


FAULTS = [missing, doubled, cut_off, foreign, of_another_size, still_running, no_file_of_a_rank, damaged]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_is_wrong_is_named(fault, tmp_path: Path):
    """The file, what is wrong with it, and what to do; `partial=True` reads all the rest and says what it left out."""
    for rank in range(2):
        write(tmp_path, rank)
    message = fault(tmp_path)
    with pytest.raises(vk.UnreadableTraceError) as refused:
        vk.read_trace(tmp_path)
    assert message in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    trace = vk.read_trace(tmp_path, partial=True)
    assert len(trace.filter(rank=0, kind="all_reduce")) == 3
    assert trace.world_size == 2
    (left_out,) = trace.notes["left out"].split("; ")[:1]
    assert left_out


def test_nothing_usable_is_an_error_even_then(tmp_path: Path):
    """An empty folder, a folder of killed ranks, and a file of a newer vizkit."""
    with pytest.raises(vk.UnreadableTraceError, match=r"no \.json, \.json\.gz or \.jsonl\.gz file in this folder"):
        vk.read_trace(tmp_path)
    write(tmp_path, 0, 1, outcome=None)
    with pytest.raises(vk.UnreadableTraceError, match="no rank has written what it did"):
        vk.read_trace(tmp_path, partial=True)
    path = tmp_path / file_name(0, 0)
    newer = gzip.decompress(path.read_bytes()).replace(f'"version":{FORMAT_VERSION}'.encode(), b'"version":99')
    path.write_bytes(gzip.compress(newer))
    with pytest.raises(
        vk.UnreadableTraceError, match=r"written by a newer vizkit \(format 99, this one reads 1\); update"
    ):
        vk.read_trace(tmp_path)


def test_one_file_alone_is_what_that_rank_did(tmp_path: Path):
    """Nobody expects the others."""
    write(tmp_path, 0)
    trace = vk.read_trace(write(tmp_path, 1))
    assert sorted(set(trace.rank.tolist())) == [1]


def test_other_traces_in_the_folder_are_left_alone(tmp_path: Path):
    """A profiler's traces may lie beside those of the ranks."""
    for rank in range(2):
        write(tmp_path, rank)
    (tmp_path / "profile.json").write_text("{}")
    assert len(vk.read_trace(tmp_path).filter(kind="all_reduce")) == 6


def test_a_launch_saves_the_same_files(tmp_path: Path):
    """What `vk.launch` recorded comes back as the same trace."""

    def add_up() -> float:
        import torch
        import torch.distributed as dist

        x = torch.ones(100)
        with vk.span("step", kind="F"):
            dist.all_reduce(x)
        return x.sum().item()

    run = vk.launch(add_up, world_size=2, device="cpu")
    back = read_run(save_run(run, tmp_path / "traces", target="lesson:add_up"))
    assert back.results == run.results == [200.0, 200.0]
    assert [s for s in back.trace] == [s for s in run.trace]  # noqa: C416 - spans, not columns
    assert vk.as_grid(back.replay(durations={"F": 1}, link=None)) == vk.as_grid(
        run.replay(durations={"F": 1}, link=None)
    )
    with pytest.raises(vk.InvalidInputError, match="holds files of another run; give a new folder, or empty this one"):
        save_run(run, tmp_path / "traces")


def proposal(agent: str, seen: list[Seen] | None = None, backend: str = "gloo", job: str = "") -> Proposal:
    return Proposal(job=job, agent=agent, backend=backend, host=f"host-of-{agent}", folder="/traces", seen=seen or [])


def test_a_run_finds_its_attempts_again():
    """By the agent that goes on, or by the job's name where every agent is new; the next number is free everywhere."""
    fresh = decide([proposal("a"), proposal("b")])
    assert (fresh.attempt, fresh.refusal) == (0, ())
    before = Seen(run="r7", job="", agent="a", attempt=1)
    again = decide([proposal("new"), proposal("a", [before])])
    assert (again.run, again.attempt) == ("r7", 2)
    named = decide([proposal("x", [Seen("r7", "job9", "gone", 0)], job="job9"), proposal("y", job="job9")])
    assert (named.run, named.attempt) == ("r7", 1)


def test_a_folder_with_another_run_is_refused_before_the_start():
    """Value, rule, remedy, for every rank."""
    refused = decide([proposal("a"), proposal("b", [Seen("old", "", "gone", 0)])])
    assert str(vk.InvalidInputError.because(*refused.refusal)) == (
        "trace='/traces': holds files of another run (on host-of-b); give a new folder, or empty this one"
    )


def test_a_folder_that_cannot_be_written_is_refused_on_all_ranks():
    """One node's trouble is every rank's: the others would wait for it for ever."""
    refused = decide([proposal("a"), msgspec.structs.replace(proposal("b"), problem="Permission denied")])
    assert str(vk.InvalidInputError.because(*refused.refusal)) == (
        "trace='/traces': Permission denied (on host-of-b); name a folder that can be written on every node"
    )


def test_backends_have_to_agree():
    """One node has GPUs and another has not: said before the process group would hang."""
    refused = decide([proposal("a", backend="nccl"), proposal("b")])
    assert "gloo on host-of-b, nccl on host-of-a" in str(vk.InvalidInputError.because(*refused.refusal))


def test_what_a_folder_holds_is_seen_in_cut_off_files_too(tmp_path: Path):
    """The first line is enough."""
    path = write(tmp_path, 0, attempt=3)
    write(tmp_path, 1, attempt=3)
    path.write_bytes(path.read_bytes()[:-30])
    assert seen_in(tmp_path) == [Seen("r1", "", "", 3)]
