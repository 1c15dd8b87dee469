"""What can be told from a Chrome trace that somebody else wrote, above all PyTorch's profiler (Kineto)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import msgspec

from vizkit.errors import UnreadableTraceError
from vizkit.trace import Clock, Span, SpanKind, Trace

_NS_PER_US = 1000
_LONGEST_NS = 2**62
_DEVICE_CATEGORIES = {
    "kernel": SpanKind.COMPUTE,
    "gpu_memcpy": SpanKind.DATA,
    "gpu_memset": SpanKind.DATA,
}
_HOST_CATEGORIES = {"cpu_op": SpanKind.COMPUTE}
_LIBRARY = re.compile(r"^(?:gloo|nccl|rccl|mpi|ucc|xccl):|nccl|rccl", re.IGNORECASE)
_KIND_PATTERNS = tuple(
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (r"all_?reduce", SpanKind.ALL_REDUCE),
        (r"reduce_?scatter", SpanKind.REDUCE_SCATTER),
        (r"all_?gather", SpanKind.ALL_GATHER),
        (r"all_?to_?all", SpanKind.ALL_TO_ALL),
        (r"broadcast", SpanKind.BROADCAST),
        (r"barrier", SpanKind.BARRIER),
        (r"scatter", SpanKind.SCATTER),
        (r"gather", SpanKind.GATHER),
        (r"reduce", SpanKind.REDUCE),
        # NCCL runs all-to-all as grouped sends and receives, under this name
        (r"send_?recv", SpanKind.ALL_TO_ALL),
        (r"send", SpanKind.SEND),
        (r"recv|receive", SpanKind.RECEIVE),
    )
)


class Event(msgspec.Struct):
    """One entry of `traceEvents`; numbers with a point stay decimal, so that nanoseconds survive."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | str | None = None
    ts: Decimal | None = None
    dur: Decimal | None = None
    args: dict[str, Any] | None = None


class Document(msgspec.Struct, rename={"events": "traceEvents", "other_data": "otherData"}):
    """The parts of a trace file that are read."""

    events: list[Event]
    other_data: Any = None
    distributed_info: Any = msgspec.field(default=None, name="distributedInfo")


def decode(data: bytes, path: str) -> Document:
    """The file's events, also where it is a bare list of them; raises `UnreadableTraceError`."""
    is_list = data.lstrip()[:1] == b"["
    try:
        if is_list:
            return Document(msgspec.json.decode(data, type=list[Event]))
        return msgspec.json.decode(data, type=Document)
    except msgspec.ValidationError as error:
        if "traceEvents" in str(error) and "missing" in str(error):
            raise UnreadableTraceError(
                f"{path}: no traceEvents in it; give a Chrome trace, such as Kineto's"
            ) from error
        raise UnreadableTraceError(f"{path}: not a Chrome trace ({error}); give one, such as Kineto's") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableTraceError(f"{path}: not JSON or cut off ({error}); write or copy the file again") from error


def to_trace(document: Document, path: str) -> Trace:
    """The spans of a profiler's file, on the wall clock.

    Where the file holds GPU work, that alone is taken, with copies and fills as kind "data"; else the CPU's operators.
    Communication goes by name. Raises `UnreadableTraceError` where no event fits, and for times that are missing,
    negative or no numbers.
    """
    info = document.distributed_info if isinstance(document.distributed_info, dict) else {}
    notes = {"source": "profiler"}
    rank = info.get("rank")
    if not isinstance(rank, int):
        rank, notes["rank"] = 0, "not in the file, taken as 0"
    if isinstance(info.get("backend"), str):
        notes["backend"] = info["backend"]
    events = [event for event in document.events if event.ph == "X"]
    on_device = any(event.cat in _DEVICE_CATEGORIES for event in events)
    notes["device"] = "gpu" if on_device else "cpu"
    spans = list(_spans(events, rank, on_device, path))
    if not spans:
        raise UnreadableTraceError(f"{path}: no GPU work, operator or communication in it; record with the profiler on")
    world_size = info.get("world_size")
    known = isinstance(world_size, int) and world_size > rank
    return Trace.from_spans(spans, clock=Clock.WALL, world_size=world_size if known else rank + 1, notes=notes)


def _spans(events: Iterable[Event], rank: int, on_device: bool, path: str) -> Iterable[Span]:
    kinds = _DEVICE_CATEGORIES if on_device else _HOST_CATEGORIES
    for event in events:
        if event.cat not in kinds and (on_device or event.cat != "user_annotation"):
            continue
        kind = _communication_kind(event.name) or kinds.get(event.cat)
        if kind is None:
            continue
        start = _nanoseconds(event.ts, "ts", event, path)
        duration = _nanoseconds(event.dur, "dur", event, path)
        if duration < 0:
            raise UnreadableTraceError(
                f"{path}: {event.name!r} has dur={event.dur}, and a duration cannot be negative; record it again"
            )
        yield Span(rank, kind, start, start + duration, name=event.name)


def _communication_kind(name: str) -> SpanKind | None:
    if not _LIBRARY.search(name):
        return None
    return next((kind for pattern, kind in _KIND_PATTERNS if pattern.search(name)), None)


def _nanoseconds(value: Decimal | None, field: str, event: Event, path: str) -> int:
    try:
        microseconds = value if value is not None else Decimal("nan")
        if math.isfinite(microseconds) and abs(microseconds) * _NS_PER_US < _LONGEST_NS:
            return round(microseconds * _NS_PER_US)
    except ArithmeticError:
        pass
    raise UnreadableTraceError(
        f"{path}: {event.name!r} has {field}={value}, which is not a time in microseconds; record it again"
    )
