"""The file that one rank leaves behind: a line that says who it is, and a line with what it did.

`rank00003-attempt00.jsonl.gz` is gzip, UTF-8, one JSON object a line. The first line (`Header`) is written when the
rank starts, so that a rank that is killed leaves its name; the second (`Body`) when it ends. Times are nanoseconds;
those of the record are on the host's CLOCK_MONOTONIC, which readings of both clocks at start and end tie to UTC.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import gzip
import json
import operator
import os
import re
import typing
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vizkit import record as records
from vizkit.errors import UnreadableTraceError
from vizkit.lanes import MOST_LABELLED
from vizkit.memory_samples import CATEGORIES
from vizkit.record import Call, Event, RankRecord, SpanClosed, SpanOpened
from vizkit.trace import NONE

SUFFIX = ".jsonl.gz"
FORMAT = "vizkit rank"
FORMAT_VERSION = 1
_TAG = "event"
_EXACT_RESULT = "exact_result"
_NAME = re.compile(r"rank(\d+)-attempt(\d+)")
_LATEST_NS = 2**62
"""Of what clocks show: the difference of two such times still has 64 bits."""


class Outcome(enum.StrEnum):
    """How a rank's run ended."""

    RETURNED = "returned"
    RAISED = "raised"
    STOPPED = "stopped"
    """By a signal."""
    RUNNING = "running"
    """Not at all, as far as the file knows: it still runs, or was killed."""


class Reading(msgspec.Struct, frozen=True):
    """Both clocks of a host at one moment."""

    unix_ns: int
    monotonic_ns: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote a file. `clock` names the host's monotonic clock: ranks with the same share it.

    `run` is the same for all ranks and attempts of a run; `job` is the number that the user gave it (torchrun's
    rdzv-id) or "", and `agent` the process that started the rank: with them a later attempt finds its run again.
    `cores` are those of the host that its ranks may use together, 0 where nobody knows.
    """

    run: str
    rank: int
    world_size: int
    attempt: int
    host: str
    clock: str
    began: Reading
    job: str = ""
    agent: str = ""
    target: str = ""
    cores: int = 0
    num_threads: int = 1
    notes: dict[str, str] = {}
    format: str = FORMAT
    version: int = FORMAT_VERSION


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank did. `result` is what the function returned where that is plain data, else its text."""

    outcome: Outcome
    detail: str = ""
    ended: Reading
    record: RankRecord
    result: Any = None
    is_result_text: bool = False


class RankFile(msgspec.Struct, frozen=True):
    """A file as read; `body` is None where the rank never wrote it."""

    path: Path
    header: Header
    body: Body | None


def file_name(rank: int, attempt: int) -> str:
    """
    >>> file_name(3, 0)
    'rank00003-attempt00.jsonl.gz'
    """
    return f"rank{rank:05d}-attempt{attempt:02d}{SUFFIX}"


def write_rank_file(folder: str | Path, header: Header, body: Body | None = None) -> Path:
    """Write the file of a rank, whole or not at all, and return its path; without `body` only who it is."""
    path = Path(folder) / file_name(header.rank, header.attempt)
    lines = [_encoded(header)]
    if body is not None:
        fields = {**_shallow(body), "record": _plain_record(body.record)}
        lines.append(_encoded(fields | _exact_result(body.result)))
    packed = gzip.compress(b"\n".join(lines) + b"\n", compresslevel=3, mtime=0)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(packed)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    return path


def read_header(path: Path) -> Header:
    """Who wrote a file, also where the rest of it is cut off; raises `UnreadableTraceError`."""
    try:
        with gzip.open(path) as file:
            line = file.readline()
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, f"is cut off or damaged ({error})") from error
    return _header(path, line)


def read_rank_file(path: Path) -> RankFile:
    """The whole file; raises `UnreadableTraceError` where it is cut off, damaged, or no file of a rank."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise _unreadable(path, "is no file")
    try:
        lines = gzip.decompress(path.read_bytes()).split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, f"is cut off or damaged ({error})") from error
    header = _header(path, lines[0])
    if lines[-1]:
        raise _unreadable(path, "ends in the middle of a line")
    if len(lines) == 2:
        return RankFile(path, header, None)
    try:
        raw = msgspec.json.decode(lines[1], type=dict[str, msgspec.Raw])
        fields = {name: msgspec.json.decode(value) for name, value in raw.items() if name != "record"}
        if _EXACT_RESULT in fields:
            fields["result"] = json.loads(fields[_EXACT_RESULT])
        body = msgspec.convert({**fields, "record": None}, _BodyWithoutRecord)
        record = _record(raw["record"])
        _check_record(record, header)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, msgspec.DecodeError) as error:
        raise _unreadable(path, f"holds a damaged record ({type(error).__name__}: {error})") from error
    return RankFile(path, header, Body(**{**_shallow(body), "record": record}))


def _header(path: Path, line: bytes) -> Header:
    try:
        known = msgspec.json.decode(line, type=dict[str, Any])
        if known.get("format") != FORMAT:
            raise ValueError(f"no {FORMAT!r} in its first line")
        header = msgspec.convert(known, Header)
        if header.version > FORMAT_VERSION:
            raise UnreadableTraceError(
                f"{path}: written by a newer vizkit (format {header.version}, this one reads {FORMAT_VERSION}); "
                "update vizkit"
            )
        if header.version < 1:
            raise ValueError(f"there never was a format {header.version}")
        if not 0 <= header.rank < header.world_size or header.attempt < 0:
            raise ValueError(f"rank {header.rank} of {header.world_size}, attempt {header.attempt}")
        return header
    except UnreadableTraceError:
        raise
    except (ValueError, msgspec.DecodeError) as error:
        raise _unreadable(path, f"is no file of a rank ({error})") from error


def _unreadable(path: Path, what: str) -> UnreadableTraceError:
    found = _NAME.search(path.name)
    whose = f"rank {int(found[1])}, attempt {int(found[2])}" if found else "the rank"
    return UnreadableTraceError(
        f"{path}: {what}; copy it again from the node where {whose} ran, or read the others with partial=True"
    )


class _BodyWithoutRecord(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    detail: str = ""
    ended: Reading
    record: None = None
    result: Any = None
    is_result_text: bool = False


def _shallow(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


# Records are dataclasses; events are of several classes, told apart by a tag that only the file has.


@functools.cache
def _encoder() -> msgspec.json.Encoder:
    return msgspec.json.Encoder(enc_hook=_plain_value)


def _plain_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "__index__"):  # whole numbers of numpy and torch, which a program may give as a tag
        return operator.index(value)
    raise NotImplementedError(f"{type(value).__name__} has no place in a rank's file")


def _encoded(value: Any) -> bytes:
    try:
        return _encoder().encode(value)
    except UnicodeEncodeError:
        return _encoder().encode(_well_formed(msgspec.to_builtins(value, enc_hook=_plain_value)))


def _well_formed(plain: Any) -> Any:
    """The same with lone surrogates escaped, which names of files and messages of exceptions may hold; UTF-8 cannot."""
    if isinstance(plain, str):
        return plain.encode("utf-8", "backslashreplace").decode()
    if isinstance(plain, dict):
        return {_well_formed(key): _well_formed(value) for key, value in plain.items()}
    return [_well_formed(value) for value in plain] if isinstance(plain, list | tuple) else plain


def _exact_result(result: Any) -> dict[str, str]:
    """The result as a text, where it holds NaN or infinity: JSON proper has only null for them."""
    with contextlib.suppress(RecursionError):  # nested too deep for this encoder, not for the other
        try:
            json.dumps(result, allow_nan=False)
        except ValueError:
            return {_EXACT_RESULT: json.dumps(result)}
    return {}


def _plain_record(record: RankRecord) -> dict[str, Any]:
    plain = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {**plain, "events": [_plain_event(event) for event in record.events]}


@functools.cache
def _field_names() -> dict[type[Event], tuple[str, ...]]:
    return {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in _event_kinds().values()}


def _plain_event(event: Event) -> dict[str, Any]:
    kind = type(event)
    return {_TAG: kind.__name__, **{name: getattr(event, name) for name in _field_names()[kind]}}


def _record(raw: msgspec.Raw) -> RankRecord:
    row = msgspec.json.decode(raw, type=_record_row(), dec_hook=_array)
    fields = _shallow(row)
    kinds = _event_kinds()
    events = tuple(kinds[type(event).__name__](**_shallow(event)) for event in fields["events"])
    if (tensors := fields["tensors"]) is not None:  # without a sample, a list says nothing of its columns
        num_bytes = tensors.num_bytes.reshape(len(tensors.wall_ns), len(CATEGORIES))
        fields["tensors"] = dataclasses.replace(tensors, num_bytes=num_bytes)
    return RankRecord(**{**fields, "events": events})


def _check_record(record: RankRecord, header: Header) -> None:
    """Raises `ValueError` where parts of a record that are each well formed contradict each other."""
    if record.rank != header.rank:
        raise ValueError(f"it is of rank {record.rank}, and the first line of rank {header.rank}")
    if record.end_ns < record.start_ns or record.end_wall_ns < record.start_wall_ns:
        raise ValueError("it ends before it starts")
    if len(record.memory_wall_ns) != len(record.memory_bytes):
        raise ValueError(f"{len(record.memory_bytes)} sizes of memory at {len(record.memory_wall_ns)} times")
    depth = 0
    for event in sorted(record.events, key=lambda event: event.start_wall_ns):
        depth += isinstance(event, SpanOpened) - isinstance(event, SpanClosed)
        if depth < 0:
            raise ValueError("a span was closed that nobody had opened")
        if isinstance(event, SpanOpened):
            label = event.label
            labels = [("stage", label.stage), ("microbatch", label.microbatch)]
            _check_range(*labels, lowest=-MOST_LABELLED, below=MOST_LABELLED)
        elif isinstance(event, Call):
            _check_range(("peer", event.peer), lowest=NONE, below=header.world_size)
            _check_range(*(("member", member) for member in event.members), lowest=0, below=header.world_size)
    times = [record.start_ns, record.end_ns, record.start_wall_ns, record.end_wall_ns]
    times += [time for event in record.events for time in (event.start_wall_ns, event.end_wall_ns)]
    if max(map(abs, times)) >= _LATEST_NS:
        raise ValueError(f"a time of {max(times, key=abs):.3g} ns")


def _check_range(*numbers: tuple[str, int], lowest: int, below: int) -> None:
    for name, number in numbers:
        if not lowest <= number < below:
            raise ValueError(f"{name} {number}, of {below}")


def _array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return np.array(value, np.int64)
    raise NotImplementedError(kind.__name__)


@functools.cache
def _event_kinds() -> dict[str, type[Event]]:
    """All that the record knows; a class with slots is made twice, and only the second counts."""
    return {kind.__name__: kind for kind in Event.__subclasses__() if getattr(records, kind.__name__, None) is kind}


@functools.cache
def _record_row() -> type[msgspec.Struct]:
    """A struct like `RankRecord` whose events say of which class they are."""
    events = [_struct_like(kind, tag=name, tag_field=_TAG) for name, kind in _event_kinds().items()]
    union: Any = typing.Union[tuple(events)]  # noqa: UP007 - made of a list
    return _struct_like(RankRecord, events=tuple[union, ...])


def _struct_like(kind: type, *, events: Any = None, **options: Any) -> type[msgspec.Struct]:
    hints = typing.get_type_hints(kind)
    fields: list[tuple[Any, ...]] = []
    for field in dataclasses.fields(kind):
        hint = events if field.name == "events" and events is not None else hints[field.name]
        given = () if field.default is dataclasses.MISSING else (field.default,)
        fields.append((field.name, hint, *given))
    return msgspec.defstruct(kind.__name__, fields, kw_only=True, frozen=True, **options)
