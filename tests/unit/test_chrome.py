"""Chrome traces: written so that Perfetto opens them, read back without loss, and refused with a reason."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.strategies import spans as any_span
from tests.strategies import traces
from vizkit.errors import InvalidInputError, UnreadableTraceError
from vizkit.formats.chrome import read_trace, write_chrome_trace
from vizkit.formats.rows import rows
from vizkit.metrics import breakdown
from vizkit.trace import COLUMNS, Clock, Counter, Span, SpanKind, Trace

K = SpanKind
KINETO = Path(__file__).parents[3] / "shared" / "data" / "kineto"
needs_kineto = pytest.mark.skipif(not KINETO.is_dir(), reason=f"other people's traces are not at {KINETO}")

RUN = Trace.from_spans(
    [
        Span(0, K.FORWARD, 1_001, 5_003, name="layer 1", stage=0, microbatch=3),
        Span(0, K.SEND, 5_003, 9_000, payload_bytes=64, peer=1, operation=0),
        Span(1, K.WAIT, 0, 9_500, operation=0),
        Span(1, K.RECEIVE, 5_100, 9_500, payload_bytes=64, peer=0, operation=0),
        Span(1, K.ALL_REDUCE, 9_000, 12_000, payload_bytes=8, group=(0, 1), operation=1, algorithm="ring"),
    ],
    clock=Clock.VIRTUAL,
    notes={"backend": "gloo", "link": "α = 20 µs"},
    counters=[Counter("memory", 1, np.array([0, 7]), np.array([10, 20]))],
)


def assert_same(a: Trace, b: Trace) -> None:
    """Equal column for column, and in everything beside the columns."""
    for column in COLUMNS:
        np.testing.assert_array_equal(a.columns[column], b.columns[column], err_msg=column)
        assert a.columns[column].dtype == b.columns[column].dtype
    assert (a.clock, a.world_size, dict(a.notes), dict(a.tables)) == (
        b.clock,
        b.world_size,
        dict(b.notes),
        dict(b.tables),
    )
    assert len(a.counters) == len(b.counters)
    for one, other in zip(a.counters, b.counters, strict=True):
        assert (one.name, one.rank, one.unit, one.values.dtype) == (
            other.name,
            other.rank,
            other.unit,
            other.values.dtype,
        )
        np.testing.assert_array_equal(one.times_ns, other.times_ns)
        np.testing.assert_array_equal(one.values, other.values)


def events_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())["traceEvents"]


class TestRoundTrip:
    """What is written comes back."""

    @given(traces())
    def test_nothing_is_lost(self, tmp_path_factory: pytest.TempPathFactory, trace: Trace):
        """Column for column, for any trace, packed or not."""
        folder = tmp_path_factory.mktemp("trace")
        for name in ("run.json", "run.json.gz"):
            assert_same(read_trace(write_chrome_trace(trace, folder / name)), trace)

    def test_nanoseconds_of_today_survive(self, tmp_path: Path):
        """As microseconds in floating point they would not: 1.7e18 ns has more digits than a double."""
        trace = Trace.from_spans(
            [Span(0, K.FORWARD, 1_764_499_084_123_456_789, 1_764_499_084_123_456_790)], clock="wall"
        )
        assert read_trace(write_chrome_trace(trace, tmp_path / "run.json"))[0] == trace[0]

    def test_parts_of_a_trace_keep_its_tables(self, tmp_path: Path):
        """Names that no span has any more are not lost either."""
        part = RUN.filter(rank=0)
        assert_same(read_trace(write_chrome_trace(part, tmp_path / "part.json")), part)

    def test_the_same_trace_gives_the_same_bytes(self, tmp_path: Path):
        """No time of writing, no name of the file in it."""
        first, second = (write_chrome_trace(RUN, tmp_path / name).read_bytes() for name in ("a.json.gz", "b.json.gz"))
        assert first == second

    def test_files_of_ranks_make_one_run(self, tmp_path: Path):
        """A folder with a file for each rank; a send and its receive still share their operation."""
        for rank in range(2):
            write_chrome_trace(RUN.filter(rank=rank), tmp_path / f"rank{rank}.json.gz")
        (tmp_path / "notes.txt").write_text("not a trace")
        run = read_trace(tmp_path)
        assert sorted(run, key=lambda s: (s.rank, s.start_ns)) == sorted(RUN, key=lambda s: (s.rank, s.start_ns))
        assert (run.clock, run.world_size, run.notes) == (RUN.clock, RUN.world_size, RUN.notes)
        assert len(run.counters) == 1


class TestForPerfetto:
    """What the file looks like to a viewer."""

    def test_each_rank_is_a_process_with_named_threads(self, tmp_path: Path):
        """`rank 0`, with compute and communication below."""
        names = [
            (e["name"], e["pid"], e["args"]["name"])
            for e in events_of(write_chrome_trace(RUN, tmp_path / "run.json"))
            if e["ph"] == "M" and "name" in e["args"]
        ]
        assert names == [
            ("process_name", 0, "rank 0"),
            ("thread_name", 0, "compute"),
            ("thread_name", 0, "communication"),
            ("process_name", 1, "rank 1"),
            ("thread_name", 1, "compute"),
            ("thread_name", 1, "communication"),
            ("thread_name", 1, "communication 2"),
        ]

    def test_a_span_is_a_complete_event_in_microseconds(self, tmp_path: Path):
        """Its arguments have the exact nanoseconds and all that applies."""
        event = next(e for e in events_of(write_chrome_trace(RUN, tmp_path / "run.json")) if e["ph"] == "X")
        assert event == {
            "ph": "X",
            "cat": "F",
            "name": "layer 1",
            "pid": 0,
            "tid": 0,
            "ts": 1.001,
            "dur": 4.002,
            "args": {"start_ns": 1_001, "end_ns": 5_003, "name": "layer 1", "stage": 0, "microbatch": 3},
        }

    def test_a_span_without_a_name_shows_kind_and_microbatch(self, tmp_path: Path):
        """`F3`, as pipeline schedules are written."""
        trace = Trace.from_spans([Span(0, K.FORWARD, 0, 1, microbatch=3), Span(0, K.BARRIER, 0, 1)], clock="ideal")
        events = events_of(write_chrome_trace(trace, tmp_path / "run.json"))
        assert [e["name"] for e in events if e["ph"] == "X"] == ["F3", "barrier"]

    def test_an_arrow_leads_from_each_send_to_its_receive(self, tmp_path: Path):
        """It starts and ends within the two slices, on their threads, and never runs back in time."""
        events = events_of(write_chrome_trace(RUN, tmp_path / "run.json"))
        start, finish = (next(e for e in events if e["ph"] == phase) for phase in "sf")
        assert (start["id"], start["cat"], start["name"]) == (finish["id"], finish["cat"], finish["name"])
        assert (start["pid"], finish["pid"], finish["bp"]) == (0, 1, "e")
        for arrow, cat in ((start, "send"), (finish, "receive")):
            (slice_,) = [e for e in events if e.get("cat") == cat]
            assert (slice_["pid"], slice_["tid"]) == (arrow["pid"], arrow["tid"])
            assert slice_["ts"] <= arrow["ts"] < slice_["ts"] + slice_["dur"]
        assert start["ts"] <= finish["ts"]

    def test_arrows_find_messages_that_overlap(self, tmp_path: Path):
        """Two sends at once lie on two threads, and each arrow on the right one."""
        spans = [
            Span(rank, kind, start, start + 50, peer=1 - rank, operation=operation)
            for operation, start in enumerate((0, 10))
            for rank, kind in enumerate((K.SEND, K.RECEIVE))
        ]
        events = events_of(write_chrome_trace(Trace.from_spans(spans, clock="wall"), tmp_path / "run.json"))
        place = {(e["cat"], e["args"].get("operation")): (e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
        arrows = [((e["pid"], e["tid"]), e["ph"], e["id"]) for e in events if e["ph"] in "sf"]
        assert arrows == [
            (place["send", 0], "s", 1),
            (place["receive", 0], "f", 1),
            (place["send", 1], "s", 2),
            (place["receive", 1], "f", 2),
        ]
        assert len(set(place.values())) == 4

    def test_counters_are_counter_events(self, tmp_path: Path):
        """On their rank, with their unit."""
        samples = [e for e in events_of(write_chrome_trace(RUN, tmp_path / "run.json")) if e["ph"] == "C"]
        assert [(e["name"], e["pid"], e["ts"], e["args"]) for e in samples] == [
            ("memory", 1, 0.0, {"bytes": 10}),
            ("memory", 1, 0.007, {"bytes": 20}),
        ]

    @given(traces(longest_ns=50, max_spans=30))
    def test_events_of_one_thread_follow_or_nest(self, tmp_path_factory: pytest.TempPathFactory, trace: Trace):
        """Perfetto drops what overlaps otherwise; compute and communication never share a thread."""
        path = write_chrome_trace(trace, tmp_path_factory.mktemp("trace") / "run.json")
        threads = defaultdict(list)
        for event in events_of(path):
            if event["ph"] == "X":
                threads[event["pid"], event["tid"]].append(event)
        for events in threads.values():
            assert len({K(e["cat"]).role == "communication" for e in events}) == 1
            times = [(e["args"]["start_ns"], e["args"]["end_ns"]) for e in events]
            for i, (a, b) in enumerate(times):
                for c, d in times[i + 1 :]:
                    assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)

    def test_spans_without_overlap_stay_on_one_row(self):
        """No more threads than needed."""
        assert rows(np.zeros(3, int), np.array([0, 10, 20]), np.array([10, 20, 30])).tolist() == [0, 0, 0]

    @given(any_span())
    def test_the_file_is_strict_json(self, tmp_path_factory: pytest.TempPathFactory, span: Span):
        """No NaN and no infinity, which browsers refuse, also where a counter has them."""
        counter = Counter("loss", 0, np.array([0, 1]), np.array([np.nan, np.inf]), unit="nats")
        trace = Trace.from_spans([span], clock="wall", counters=[counter])
        path = write_chrome_trace(trace, tmp_path_factory.mktemp("trace") / "run.json")
        json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the file"))
        assert_same(read_trace(path), trace)

    def test_another_ending_is_refused(self, tmp_path: Path):
        """A reader of the folder would not find it."""
        with pytest.raises(InvalidInputError) as error:
            write_chrome_trace(RUN, "run.txt")
        assert str(error.value) == "path='run.txt': a trace file ends in .json or .json.gz; rename it"


def profiler_file(path: Path, *events: dict[str, Any], **top: Any) -> Path:
    """What PyTorch's profiler writes, cut down to these events."""
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "pid": 7, "tid": 9, **e} for e in events], **top}))
    return path


class TestProfilerFiles:
    """Files of PyTorch's profiler, as far as they tell."""

    def test_a_gpus_work_is_taken_where_there_is_some(self, tmp_path: Path):
        """Kernels compute, copies are data, NCCL communicates; the host's operators are left out."""
        path = profiler_file(
            tmp_path / "a.json",
            {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5},
            {"cat": "kernel", "name": "gemm", "ts": 10.001, "dur": 2.5},
            {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 13, "dur": 1},
            {"cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "ts": 12, "dur": 3},
            {"cat": "user_annotation", "name": "nccl:all_reduce", "ts": 1, "dur": 1},
            distributedInfo={"rank": 1, "world_size": 4, "backend": "nccl"},
        )
        trace = read_trace(path)
        assert [(s.rank, s.kind, s.start_ns, s.end_ns) for s in trace] == [
            (1, K.COMPUTE, 10_001, 12_501),
            (1, K.DATA, 13_000, 14_000),
            (1, K.ALL_REDUCE, 12_000, 15_000),
        ]
        assert (trace.clock, trace.world_size) == (Clock.WALL, 4)
        assert trace.notes == {"source": "profiler", "backend": "nccl", "device": "gpu"}

    @pytest.mark.parametrize(
        "name, kind",
        [
            ("gloo:all_reduce", K.ALL_REDUCE),
            ("nccl:_all_gather_base", K.ALL_GATHER),
            ("nccl:_reduce_scatter_base", K.REDUCE_SCATTER),
            ("gloo:broadcast", K.BROADCAST),
            ("gloo:reduce", K.REDUCE),
            ("nccl:all_to_all", K.ALL_TO_ALL),
            ("gloo:gather", K.GATHER),
            ("gloo:scatter", K.SCATTER),
            ("gloo:barrier", K.BARRIER),
            ("gloo:send", K.SEND),
            ("gloo:recv", K.RECEIVE),
        ],
    )
    def test_without_a_gpu_annotations_tell_the_communication(self, tmp_path: Path, name: str, kind: SpanKind):
        """`gloo:all_reduce` and the like; operators compute; other annotations are left out."""
        path = profiler_file(
            tmp_path / "a.json",
            {"cat": "cpu_op", "name": "aten::scatter_add", "ts": 0, "dur": 5},
            {"cat": "user_annotation", "name": name, "ts": 1, "dur": 1},
            {"cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 9},
        )
        trace = read_trace(path)
        assert [s.kind for s in trace] == [K.COMPUTE, kind]
        assert trace.notes == {"source": "profiler", "rank": "not in the file, taken as 0", "device": "cpu"}

    def test_a_bare_list_of_events_is_a_trace_too(self, tmp_path: Path):
        """The format's other form."""
        path = tmp_path / "a.json"
        path.write_text(json.dumps([{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}]))
        assert [s.end_ns for s in read_trace(path)] == [3_000]

    @needs_kineto
    @pytest.mark.parametrize(
        "name, rank, idle_percent, overlap_percent",
        [
            ("nccl_metadata_ddp", 0, 76.16, 15.61),
            ("nccl_pair_rank0", 0, 55.21, 14.95),
            ("nccl_pair_rank1", 1, 52.89, 19.93),
        ],
    )
    def test_real_traces_have_the_known_idle_time_and_overlap(
        self, name: str, rank: int, idle_percent: float, overlap_percent: float
    ):
        """Copies count as busy, and not as compute that hides communication, as HolisticTraceAnalysis has it."""
        trace = read_trace(KINETO / f"{name}.json.gz").filter(rank=rank)
        parts = breakdown(trace)
        without_copies = breakdown(trace.filter(~trace.is_kind("data")))
        assert 100 * parts.idle[rank] / parts.span[rank] == pytest.approx(idle_percent, abs=0.005)
        overlap = without_copies.overlapped[rank] / without_copies.communication[rank]
        assert 100 * overlap == pytest.approx(overlap_percent, abs=0.005)

    @needs_kineto
    @pytest.mark.parametrize("path", sorted(KINETO.glob("*.json.gz")) or [KINETO], ids=lambda path: path.name)
    def test_every_real_trace_can_be_read(self, path: Path):
        """Of CPUs, NVIDIA and AMD, with a rank and without; and what was read can be written and read again."""
        trace = read_trace(path)
        assert len(trace) > 0
        assert ("rank" in trace.notes) == (path.name.split(".")[0] in ("amd_mi250", "no_distributed_info", "no_rank"))

    @needs_kineto
    def test_a_real_gloo_trace_shows_its_collectives(self):
        """Rank 34 of 300, ten all-reduces."""
        trace = read_trace(KINETO / "gloo_cpu_rank34.json.gz")
        assert (trace.world_size, set(trace.rank.tolist()), trace.notes["backend"]) == (300, {34}, "gloo")
        assert len(trace.filter(kind="all_reduce")) == 10


class TestBadFiles:
    """A file that cannot be read says so, why, and what to do."""

    @pytest.mark.parametrize(
        "content, message",
        [
            (
                b'{"traceEvents": [{"ph": "X"',
                "not JSON or cut off (Input data was truncated); write or copy the file again",
            ),
            (b"", "not JSON or cut off (Input data was truncated); write or copy the file again"),
            (
                b"hello",
                "not JSON or cut off (JSON is malformed: invalid character (byte 0)); write or copy the file again",
            ),
            (b'{"events": []}', "no traceEvents in it; give a Chrome trace, such as Kineto's"),
            (
                b'{"traceEvents": 5}',
                "not a Chrome trace (Expected `array`, got `int` - at `$.traceEvents`); give one, such as Kineto's",
            ),
            (b"5", "not a Chrome trace (Expected `object`, got `int`); give one, such as Kineto's"),
            (
                b'{"traceEvents": []}',
                "no GPU work, operator or communication in it; record with the profiler on",
            ),
            (
                b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 5, "dur": -2}]}',
                "'mm' has dur=-2, and a duration cannot be negative; record it again",
            ),
            (
                b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "mm", "dur": 2}]}',
                "'mm' has ts=None, which is not a time in microseconds; record it again",
            ),
            (
                b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 1e400, "dur": 2}]}',
                "'mm' has ts=1E+400, which is not a time in microseconds; record it again",
            ),
            (
                b'{"traceEvents": [], "otherData": {"vizkit": {"version": 99}}}',
                "written by a newer vizkit (format 99, this one reads 1); update vizkit",
            ),
            (
                b'{"traceEvents": [], "otherData": {"vizkit": {"version": 1}}}',
                "its vizkit part is damaged (KeyError: 'tables'); write the trace again",
            ),
        ],
    )
    def test_a_bad_file_is_refused_with_a_reason(self, tmp_path: Path, content: bytes, message: str):
        """With the file's name first."""
        path = tmp_path / "a.json"
        path.write_bytes(content)
        with pytest.raises(UnreadableTraceError) as error:
            read_trace(path)
        assert str(error.value) == f"{path}: {message}"

    @pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
    def test_a_packed_file_that_was_cut_off_is_refused(self, tmp_path: Path, keep: float):
        """At any place."""
        path = write_chrome_trace(RUN, tmp_path / "run.json.gz")
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
        with pytest.raises(UnreadableTraceError, match=r"run\.json\.gz: "):
            read_trace(path)

    def test_a_file_that_is_not_packed_is_refused(self, tmp_path: Path):
        """Its name promised otherwise."""
        path = tmp_path / "a.json.gz"
        path.write_text("{}")
        with pytest.raises(UnreadableTraceError) as error:
            read_trace(path)
        assert str(error.value) == f"{path}: Not a gzipped file (b'{{}}'); give a complete .json or .json.gz file"

    def test_a_span_that_was_tampered_with_is_refused(self, tmp_path: Path):
        """Here its end lies before its start."""
        path = write_chrome_trace(RUN, tmp_path / "run.json")
        path.write_text(path.read_text().replace('"end_ns":5003', '"end_ns":3'))
        with pytest.raises(
            UnreadableTraceError, match=r"run\.json: its vizkit part is damaged \(InvalidInputError: end_ns=3"
        ):
            read_trace(path)

    def test_a_missing_file_is_named(self, tmp_path: Path):
        """With the system's reason."""
        with pytest.raises(UnreadableTraceError, match=r"No such file or directory: .*nowhere.json'; give a complete"):
            read_trace(tmp_path / "nowhere.json")

    def test_an_empty_folder_is_refused(self, tmp_path: Path):
        """Nothing to read is no trace."""
        with pytest.raises(UnreadableTraceError) as error:
            read_trace(tmp_path)
        assert str(error.value) == (
            f"{tmp_path}: no .json, .json.gz or .jsonl.gz file in this folder; give the folder with the traces"
        )

    def test_two_files_of_one_rank_are_refused(self, tmp_path: Path):
        """Files of two runs in one folder, most likely."""
        for name in ("a.json", "b.json"):
            write_chrome_trace(RUN.filter(rank=1), tmp_path / name)
        with pytest.raises(UnreadableTraceError) as error:
            read_trace(tmp_path)
        assert str(error.value) == (
            f"{tmp_path / 'b.json'}: rank 1 is in a.json too; keep one file for each rank in a folder"
        )

    def test_files_on_two_clocks_are_refused(self, tmp_path: Path):
        """A wall trace and a virtual one are not one run."""
        write_chrome_trace(RUN.filter(rank=0), tmp_path / "a.json")
        write_chrome_trace(Trace.from_spans([Span(1, K.FORWARD, 0, 1)], clock="wall"), tmp_path / "b.json")
        with pytest.raises(UnreadableTraceError) as error:
            read_trace(tmp_path)
        assert str(error.value) == (
            f"{tmp_path / 'b.json'}: its clock is wall, that of a.json is virtual; keep files of one clock in a folder"
        )
