"""Chrome trace files: written so that Perfetto opens them and nothing is lost, and read."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import numpy as np

from vizkit.errors import InvalidInputError, UnreadableTraceError
from vizkit.formats import kineto
from vizkit.formats.rank_folder import as_path, rank_files, read_run
from vizkit.formats.rows import rows
from vizkit.trace import COLUMNS, KINDS, NONE, Clock, Counter, Role, Span, SpanKind, Trace

SUFFIXES = (".json", ".json.gz")
FORMAT_VERSION = 1
_OPTIONAL = ("stage", "microbatch", "payload_bytes", "peer", "operation", "group", "algorithm", "split_bytes")
_NS_PER_US = 1000


def write_chrome_trace(trace: Trace, path: str | Path) -> Path:
    """Write `trace` to `path` (`.json`, or `.json.gz` compressed) for Perfetto or chrome://tracing; returns the path.

    One process a rank, threads for compute and communication, an arrow from each send to its receive, counters. Times
    are microseconds, as the format wants; `args` repeat them in whole nanoseconds, and `otherData` holds the clock,
    notes and tables, so that `read_trace` gives the same trace back. Raises `InvalidInputError` for another file name.

    >>> import tempfile
    >>> trace = Trace.from_spans([Span(0, SpanKind.FORWARD, 0, 1500, microbatch=3)], clock="ideal")
    >>> read_trace(write_chrome_trace(trace, Path(tempfile.mkdtemp()) / "run.json"))[0].end_ns
    1500
    """
    path = Path(path)
    if not path.name.endswith(SUFFIXES):
        raise InvalidInputError.because("path", str(path), "a trace file ends in .json or .json.gz", "rename it")
    threads = _threads(trace)
    events = itertools.chain(
        _names(trace, threads), _slices(trace, threads), _arrows(trace, threads), _counter_events(trace)
    )
    encode = msgspec.json.Encoder().encode
    with _opened(path) as file:
        file.write(b'{"displayTimeUnit":"ns","otherData":' + encode({"vizkit": _header(trace)}) + b',"traceEvents":[')
        for number, event in enumerate(events):
            file.write((b",\n" if number else b"\n") + encode(event))
        file.write(b"\n]}\n")
    return path


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with path.open("wb") as file:
        if path.suffix == ".gz":
            # neither time nor name in the file: the same trace gives the same bytes
            with gzip.GzipFile(filename="", mode="wb", compresslevel=3, fileobj=file, mtime=0) as packed:
                yield cast(IO[bytes], packed)
        else:
            yield file


def read_trace(path: str | Path, *, partial: bool = False) -> Trace:
    """The trace in a file, or in a folder with one file for each rank (`.json`, `.json.gz` and `.jsonl.gz`).

    From the files of ranks that `python -m vizkit run … --trace folder` left (`.jsonl.gz`) comes one trace with the
    clocks of all hosts aligned, and how far off they may be in `notes["clock_error_s"]`; what is missing, doubled, cut
    off or foreign is an error, or with `partial=True` left out and named in the notes (`read_run` says more).

    Files of `write_chrome_trace` come back as they were. From files of PyTorch's profiler come the spans that can be
    told: GPU kernels and copies, or without any the CPU's operators, and communication by name; clock "wall", rank from
    `distributedInfo`, or 0 with a note. Raises `UnreadableTraceError` where there is no such file, it is cut off or no
    trace, a time makes no sense, or two files of a folder hold the same rank.
    """
    path = as_path(path)
    if rank_files(path):
        return read_run(path, partial=partial).trace
    if not path.is_dir():
        return _read_file(path)
    files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
    if not files:
        raise UnreadableTraceError(
            f"{path}: no .json, .json.gz or .jsonl.gz file in this folder; give the folder with the traces"
        )
    return _joined(files, [_read_file(file) for file in files])


def _header(trace: Trace) -> dict[str, Any]:
    return {
        "version": FORMAT_VERSION,
        "clock": trace.clock.value,
        "world_size": trace.world_size,
        "notes": dict(trace.notes),
        "tables": {column: list(table) for column, table in trace.tables.items()},
        "counters": [
            {
                "name": counter.name,
                "rank": counter.rank,
                "unit": counter.unit,
                "type": counter.values.dtype.str,
                "times_ns": counter.times_ns.tolist(),
                "values": [v if math.isfinite(v) else str(v) for v in counter.values.tolist()],
            }
            for counter in trace.counters
        ],
    }


def _threads(trace: Trace) -> np.ndarray:
    """The thread of each span: even for compute and waits, odd for communication; higher ones for what overlaps."""
    communicates = trace.is_role(Role.COMMUNICATION)
    return 2 * rows(trace.rank * 2 + communicates, trace.start_ns, trace.end_ns) + communicates


def _names(trace: Trace, threads: np.ndarray) -> Iterator[dict[str, Any]]:
    for rank in range(trace.world_size):
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        for thread in np.unique(threads[trace.rank == rank]).tolist():
            row, communicates = divmod(thread, 2)
            title = ("communication" if communicates else "compute") + (f" {row + 1}" if row else "")
            place = {"pid": rank, "tid": thread}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": title}}
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": communicates * 1000 + row}}


def _slices(trace: Trace, threads: np.ndarray) -> Iterator[dict[str, Any]]:
    """One complete event for each span, in the order of the trace."""
    for span, thread in zip(trace, threads.tolist(), strict=True):
        yield {
            "ph": "X",
            "cat": span.kind.value,
            "name": _title(span),
            "pid": span.rank,
            "tid": thread,
            "ts": span.start_ns / _NS_PER_US,
            "dur": span.duration_ns / _NS_PER_US,
            "args": _arguments(span),
        }


def _title(span: Span) -> str:
    return span.name or span.kind.value + (str(span.microbatch) if span.microbatch != NONE else "")


def _arguments(span: Span) -> dict[str, Any]:
    given = {"name": span.name} if span.name else {}
    for field in _OPTIONAL:
        if (value := getattr(span, field)) != Span.__dataclass_fields__[field].default:
            given[field] = value
    return {"start_ns": span.start_ns, "end_ns": span.end_ns, **given}


def _arrows(trace: Trace, threads: np.ndarray) -> Iterator[dict[str, Any]]:
    """A flow event from each send to the receive with the same operation."""
    unmatched: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index in np.flatnonzero(trace.is_kind(SpanKind.SEND)).tolist():
        send = trace[index]
        unmatched[send.operation, send.rank, send.peer].append(index)
    number = 0
    for index in np.flatnonzero(trace.is_kind(SpanKind.RECEIVE)).tolist():
        receive = trace[index]
        sends = unmatched.get((receive.operation, receive.peer, receive.rank))
        if receive.operation == NONE or not sends:
            continue
        sender = sends.pop(0)
        # an arrow binds to the slice that is open at its time, so it ends within the receive
        end = max(receive.start_ns, receive.end_ns - 1)
        begin = min(trace[sender].start_ns, end)
        number += 1
        arrow = {"cat": "message", "name": "message", "id": number}
        for phase, at, on, more in (("s", begin, sender, {}), ("f", end, index, {"bp": "e"})):
            place = {"pid": int(trace.rank[on]), "tid": int(threads[on]), "ts": at / _NS_PER_US}
            yield {"ph": phase, **arrow, **place, **more}


def _counter_events(trace: Trace) -> Iterator[dict[str, Any]]:
    for counter in trace.counters:
        for time_ns, value in zip(counter.times_ns.tolist(), counter.values.tolist(), strict=True):
            if math.isfinite(value):
                place = {"pid": counter.rank, "ts": time_ns / _NS_PER_US}
                yield {"ph": "C", "name": counter.name, **place, "args": {counter.unit: value}}


def _read_file(path: Path) -> Trace:
    try:
        data = path.read_bytes()
        if path.name.endswith(".gz"):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableTraceError(f"{path}: {error}; give a complete .json or .json.gz file") from error
    document = kineto.decode(data, str(path))
    header = document.other_data.get("vizkit") if isinstance(document.other_data, dict) else None
    if header is None:
        return kineto.to_trace(document, str(path))
    try:
        if header["version"] > FORMAT_VERSION:
            raise UnreadableTraceError(
                f"{path}: written by a newer vizkit (format {header['version']}, this one reads {FORMAT_VERSION}); "
                "update vizkit"
            )
        return _restored(header, document.events)
    except UnreadableTraceError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise UnreadableTraceError(
            f"{path}: its vizkit part is damaged ({type(error).__name__}: {error}); write the trace again"
        ) from error


def _restored(header: dict[str, Any], events: Iterable[kineto.Event]) -> Trace:
    kinds = {kind.value: kind for kind in KINDS}
    tables = {column: _hashable(table) for column, table in header["tables"].items()}
    codes = {column: {value: code for code, value in enumerate(table)} for column, table in tables.items()}
    columns: dict[str, list[Any]] = {column: [] for column in COLUMNS}
    defaults = {field: Span.__dataclass_fields__[field].default for field in ("name", *_OPTIONAL)}
    for event in events:
        if event.ph != "X" or event.cat not in kinds or not event.args:
            continue
        values = {**defaults, **event.args, "rank": event.pid, "kind": kinds[event.cat].code}
        for column in COLUMNS:
            value = values[column]
            if column in codes:
                value = codes[column][tuple(value) if isinstance(value, list) else value]
            columns[column].append(value)
    counters = [
        Counter(
            name=counter["name"],
            rank=counter["rank"],
            unit=counter["unit"],
            times_ns=np.array(counter["times_ns"], np.int64),
            values=np.array([float(v) if isinstance(v, str) else v for v in counter["values"]], counter["type"]),
        )
        for counter in header["counters"]
    ]
    return Trace.from_columns(
        clock=header["clock"],
        world_size=header["world_size"],
        tables=tables,
        counters=counters,
        notes=header["notes"],
        **columns,
    )


def _hashable(table: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in table)


def _joined(files: list[Path], traces: list[Trace]) -> Trace:
    """One run from the files of its ranks; operations keep their numbers, since the files share them."""
    holder: dict[int, Path] = {}
    for file, trace in zip(files, traces, strict=True):
        if trace.clock is not traces[0].clock:
            raise UnreadableTraceError(
                f"{file}: its clock is {trace.clock.value}, that of {files[0].name} is {traces[0].clock.value}; "
                "keep files of one clock in a folder"
            )
        for rank in np.unique(trace.rank).tolist():
            if rank in holder:
                raise UnreadableTraceError(
                    f"{file}: rank {rank} is in {holder[rank].name} too; keep one file for each rank in a folder"
                )
            holder[rank] = file
    return Trace.from_spans(
        itertools.chain.from_iterable(traces),
        clock=Clock(traces[0].clock),
        world_size=max(trace.world_size for trace in traces),
        counters=[counter for trace in traces for counter in trace.counters],
        notes={key: value for trace in traces for key, value in trace.notes.items()},
    )
