"""The one type that everything speaks: what each rank did, when, and how many bytes that moved."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vizkit.errors import InvalidInputError

if TYPE_CHECKING:
    import pandas as pd

NONE = -1
NS_PER_S = 1_000_000_000


class Clock(enum.StrEnum):
    """What the times of a trace mean."""

    WALL = "wall"
    """What happened on this machine."""
    VIRTUAL = "virtual"
    """The recorded program replayed with a device for each rank."""
    IDEAL = "ideal"
    """Computed by a simulator; nothing ran."""


class Role(enum.StrEnum):
    """Which resource of a rank a span occupies."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    WAIT = "wait"


class SpanKind(enum.StrEnum):
    """What a rank did during a span; F, B, I and W are the letters that `torch.distributed.pipelining` uses.

    >>> SpanKind("F") is SpanKind.FORWARD, SpanKind.ALL_REDUCE.role.value
    (True, 'communication')
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    OPTIMIZER = "optimizer"
    COMPUTE = "compute"
    DATA = "data"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    BARRIER = "barrier"
    SEND = "send"
    RECEIVE = "receive"
    WAIT = "wait"

    __hash__ = (
        str.__hash__
    )  # a kind equals its value, so a table of kinds has to find it by its value; and it is quicker

    @property
    def role(self) -> Role:
        return _ROLES[self]

    @property
    def code(self) -> int:
        """The number that stands for this kind in `Trace.kind`."""
        return _CODES[self]

    @classmethod
    def parse(cls, value: str | SpanKind) -> SpanKind:
        """The kind with this value or name; raises `InvalidInputError` with the valid ones.

        >>> SpanKind.parse("forward"), SpanKind.parse("B")
        (<SpanKind.FORWARD: 'F'>, <SpanKind.BACKWARD: 'B'>)
        """
        if isinstance(value, cls):
            return value
        for kind in cls:
            if isinstance(value, str) and value in (kind.value, kind.name, kind.name.lower()):
                return kind
        valid = ", ".join(kind.value for kind in cls)
        raise InvalidInputError.because("kind", value, "is not a kind of span", f"use one of {valid}")


KINDS: tuple[SpanKind, ...] = tuple(SpanKind)
COMPUTE_KINDS = KINDS[: KINDS.index(SpanKind.ALL_REDUCE)]
COLLECTIVE_KINDS = KINDS[KINDS.index(SpanKind.ALL_REDUCE) : KINDS.index(SpanKind.SEND)]
COMMUNICATION_KINDS = (*COLLECTIVE_KINDS, SpanKind.SEND, SpanKind.RECEIVE)
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_ROLES = (
    dict.fromkeys(COMPUTE_KINDS, Role.COMPUTE)
    | dict.fromkeys(COMMUNICATION_KINDS, Role.COMMUNICATION)
    | {SpanKind.WAIT: Role.WAIT}
)


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that one rank did; times in nanoseconds on the trace's clock.

    `payload_bytes` is logical: the tensor that is reduced or broadcast, all inputs together for reduce-scatter, scatter
    and all-to-all, all outputs together for all-gather and gather, the message for send and receive. `operation`
    numbers a communication: the spans of one collective, or a send and its receive, share it across ranks. `peer` is
    the other rank of a message or the root of a collective, as a global rank; `group` holds the global ranks that took
    part. `split_bytes` is what this rank sends to each member of `group` where an all-to-all is uneven. `algorithm` is
    a name of `vizkit.collectives`. −1 and () mean "does not apply".
    """

    rank: int
    kind: SpanKind
    start_ns: int
    end_ns: int
    name: str = ""
    stage: int = NONE
    microbatch: int = NONE
    payload_bytes: int = 0
    peer: int = NONE
    group: tuple[int, ...] = ()
    operation: int = NONE
    algorithm: str = ""
    split_bytes: tuple[int, ...] = ()

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Counter:
    """A quantity of one rank over time, such as memory: `values[i]` holds from `times_ns[i]` until the next sample."""

    name: str
    rank: int
    times_ns: np.ndarray
    values: np.ndarray
    unit: str = "bytes"


_NUMBERS: Mapping[str, tuple[type[np.generic], int]] = {
    "rank": (np.int32, 0),
    "kind": (np.uint8, 0),
    "start_ns": (np.int64, 0),
    "end_ns": (np.int64, 0),
    "stage": (np.int32, NONE),
    "microbatch": (np.int32, NONE),
    "payload_bytes": (np.int64, 0),
    "peer": (np.int32, NONE),
    "operation": (np.int64, NONE),
}
_INTERNED = {"name": "", "group": (), "algorithm": "", "split_bytes": ()}
COLUMNS: tuple[str, ...] = (*_NUMBERS, *_INTERNED)


@dataclass(frozen=True, eq=False)
class Trace:
    """Columns of spans, immutable, with the clock that their times are on.

    Each name in `COLUMNS` is an attribute: a read-only numpy array with one entry a span. `kind` holds codes (positions
    in `KINDS`); `name`, `group`, `algorithm` and `split_bytes` hold positions in `tables[column]`. `world_size` counts
    ranks, whether or not each has a span. Build one with `Trace.from_spans` or, for many spans, `Trace.from_columns`.

    >>> t = Trace.from_spans([Span(0, SpanKind.FORWARD, 0, 10), Span(1, SpanKind.SEND, 5, 9, peer=0)], clock="ideal")
    >>> len(t), t.world_size, t[1].duration_ns, t.clock.value
    (2, 2, 4, 'ideal')
    """

    clock: Clock
    world_size: int
    columns: Mapping[str, np.ndarray]
    tables: Mapping[str, tuple[Any, ...]]
    counters: tuple[Counter, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    """Facts about the run that a reader should see beside the figure (backend, device, link)."""

    def __getattr__(self, name: str) -> np.ndarray:
        if name in COLUMNS and "columns" in self.__dict__:
            return self.columns[name]
        raise AttributeError(f"Trace has no attribute {name!r}; its columns are {', '.join(COLUMNS)}")

    @classmethod
    def from_spans(
        cls,
        spans: Iterable[Span],
        *,
        clock: Clock | str,
        world_size: int | None = None,
        counters: Sequence[Counter] = (),
        notes: Mapping[str, str] | None = None,
    ) -> Trace:
        """A trace of these spans, in this order; `world_size` defaults to the highest rank plus one."""
        rows = list(spans)
        data: dict[str, Any] = {column: [getattr(span, column) for span in rows] for column in COLUMNS}
        data["kind"] = [SpanKind.parse(kind).code for kind in data["kind"]]
        tables: dict[str, tuple[Any, ...]] = {}
        for column in _INTERNED:
            index: dict[Any, int] = {}
            data[column] = [index.setdefault(value, len(index)) for value in data[column]]
            tables[column] = tuple(index)
        return cls.from_columns(
            clock=clock, world_size=world_size, tables=tables, counters=counters, notes=notes, **data
        )

    @classmethod
    def from_columns(
        cls,
        *,
        clock: Clock | str,
        world_size: int | None = None,
        tables: Mapping[str, Sequence[Any]] | None = None,
        counters: Sequence[Counter] = (),
        notes: Mapping[str, str] | None = None,
        **columns: Any,
    ) -> Trace:
        """A trace from arrays; columns left out take their default; raises `InvalidInputError` where they do not fit.

        >>> Trace.from_columns(clock="ideal", rank=[0, 0], kind=[0, 1], start_ns=[0, 5], end_ns=[5, 3])
        Traceback (most recent call last):
        vizkit.errors.InvalidInputError: end_ns=3: a span ends before it starts at 5 (span 1, rank 0); swap the two
        """
        if unknown := set(columns) - set(COLUMNS):
            raise InvalidInputError.because(
                "column", sorted(unknown)[0], "is not a column of a trace", f"use {', '.join(COLUMNS)}"
            )
        length = max((len(values) for values in columns.values()), default=0)
        full_tables = {c: tuple((tables or {}).get(c, (default,))) for c, default in _INTERNED.items()}
        data: dict[str, np.ndarray] = {}
        for column in COLUMNS:
            dtype, default = _NUMBERS.get(column, (np.int32, 0))
            values = np.array(columns[column], dtype) if column in columns else np.full(length, default, dtype)
            if values.shape != (length,):
                raise InvalidInputError.because(
                    column, values.shape, f"every column has {length} entries", "give one value a span"
                )
            values.flags.writeable = False
            data[column] = values
        ranks = data["rank"]
        highest = int(ranks.max()) + 1 if length else 0
        highest = max([highest, *(counter.rank + 1 for counter in counters)])
        size = highest if world_size is None else world_size
        if size < highest or (length and int(ranks.min()) < 0):
            raise InvalidInputError.because(
                "world_size", size, f"ranks run from 0 to {highest - 1}", f"use world_size={highest} or more"
            )
        backwards = np.flatnonzero(data["end_ns"] < data["start_ns"])
        if len(backwards):
            i = int(backwards[0])
            start, end, rank = (int(data[c][i]) for c in ("start_ns", "end_ns", "rank"))
            raise InvalidInputError.because(
                "end_ns", end, f"a span ends before it starts at {start} (span {i}, rank {rank})", "swap the two"
            )
        for column, table in (*full_tables.items(), ("kind", KINDS)):
            codes = data[column]
            if length and (int(codes.min()) < 0 or int(codes.max()) >= len(table)):
                raise InvalidInputError.because(
                    column, int(codes.max()), f"its table has {len(table)} entries", "give positions in that table"
                )
        return cls(Clock(clock), size, data, full_tables, tuple(counters), dict(notes or {}))

    def __len__(self) -> int:
        return len(self.columns["rank"])

    def __getitem__(self, index: int) -> Span:
        values = {column: self.columns[column][index].item() for column in COLUMNS}
        for column in _INTERNED:
            values[column] = self.tables[column][values[column]]
        values["kind"] = KINDS[values["kind"]]
        return Span(**values)

    def __iter__(self) -> Iterator[Span]:
        decoded: dict[str, Iterable[Any]] = {column: self.columns[column].tolist() for column in COLUMNS}
        decoded["kind"] = (KINDS[code] for code in decoded["kind"])
        for column in _INTERNED:
            decoded[column] = map(self.tables[column].__getitem__, decoded[column])
        for row in zip(*decoded.values(), strict=True):
            yield Span(**dict(zip(COLUMNS, row, strict=True)))

    def __repr__(self) -> str:
        return (
            f"Trace({len(self):,} spans, {self.world_size} ranks, "
            f"{self.duration_ns / 1e6:,.3f} ms, clock={self.clock.value!r})"
        )

    @property
    def extent_ns(self) -> tuple[int, int]:
        """First start and last end in nanoseconds; (0, 0) where there is no span."""
        if not len(self):
            return (0, 0)
        return int(self.start_ns.min()), int(self.end_ns.max())

    @property
    def duration_ns(self) -> int:
        start, end = self.extent_ns
        return end - start

    def is_role(self, role: Role) -> np.ndarray:
        """Which spans have this role: one boolean a span."""
        return np.array([kind.role is role for kind in KINDS])[self.kind]

    def is_kind(self, *kinds: SpanKind | str) -> np.ndarray:
        """Which spans are of one of these kinds: one boolean a span."""
        return np.isin(self.kind, [SpanKind.parse(kind).code for kind in kinds])

    def filter(
        self,
        mask: np.ndarray | None = None,
        *,
        rank: int | Sequence[int] | None = None,
        kind: SpanKind | str | Sequence[SpanKind | str] | None = None,
    ) -> Trace:
        """The spans that meet all conditions, in the same order; `mask` has one boolean a span.

        >>> t = Trace.from_spans([Span(0, SpanKind.FORWARD, 0, 1), Span(1, SpanKind.WAIT, 0, 1)], clock="ideal")
        >>> len(t.filter(kind="F")), len(t.filter(rank=1)), len(t.filter(rank=[0, 1], kind=["F", "wait"]))
        (1, 1, 2)
        """
        keep = np.ones(len(self), bool) if mask is None else np.asarray(mask, bool)
        if keep.shape != (len(self),):
            raise InvalidInputError.because(
                "mask", keep.shape, f"the trace has {len(self)} spans", "give one boolean a span"
            )
        counters = self.counters
        if rank is not None:
            ranks = [rank] if isinstance(rank, int) else list(rank)
            keep = keep & np.isin(self.rank, ranks)
            counters = tuple(counter for counter in counters if counter.rank in ranks)
        if kind is not None:
            keep = keep & self.is_kind(*([kind] if isinstance(kind, str) else kind))
        return self._with({c: values[keep] for c, values in self.columns.items()}, counters=counters)

    def shift(self, offset_ns: int) -> Trace:
        """The same trace `offset_ns` nanoseconds later."""
        moved = {c: self.columns[c] + offset_ns if c in ("start_ns", "end_ns") else self.columns[c] for c in COLUMNS}
        counters = tuple(replace(counter, times_ns=counter.times_ns + offset_ns) for counter in self.counters)
        return self._with(moved, counters=counters)

    def _with(self, columns: dict[str, np.ndarray], **changes: Any) -> Trace:
        for values in columns.values():
            values.flags.writeable = False
        return replace(self, columns=columns, **changes)

    @classmethod
    def merge(cls, traces: Sequence[Trace]) -> Trace:
        """All spans of several traces of one clock; operations keep apart, so the traces are taken as separate runs.

        Raises `InvalidInputError` for no traces and for traces on different clocks.
        """
        clocks = sorted({trace.clock.value for trace in traces})
        if len(clocks) != 1:
            raise InvalidInputError.because(
                "traces", clocks, "must be one or more traces of one clock", "replay or filter them to one clock first"
            )
        tables: dict[str, dict[Any, int]] = {column: {} for column in _INTERNED}
        parts: dict[str, list[np.ndarray]] = {column: [] for column in COLUMNS}
        next_operation = 0
        for trace in traces:
            for column in COLUMNS:
                values = trace.columns[column]
                if column in _INTERNED:
                    index = tables[column]
                    codes = [index.setdefault(value, len(index)) for value in trace.tables[column]]
                    values = np.array(codes, np.int32)[values] if len(values) else values
                elif column == "operation" and len(values):
                    values = np.where(values >= 0, values + next_operation, values)
                    next_operation = max(next_operation, int(values.max()) + 1)
                parts[column].append(values)
        return cls.from_columns(
            clock=clocks[0],
            world_size=max(trace.world_size for trace in traces),
            tables={column: tuple(index) for column, index in tables.items()},
            counters=[counter for trace in traces for counter in trace.counters],
            notes={key: value for trace in traces for key, value in trace.notes.items()},
            **{column: np.concatenate(values) for column, values in parts.items()},
        )

    def to_frame(self) -> pd.DataFrame:
        """A pandas table with one row a span; kinds, names, groups and algorithms are written out."""
        import pandas as pd

        frame = pd.DataFrame({column: self.columns[column] for column in COLUMNS})
        frame["kind"] = np.array([kind.value for kind in KINDS], object)[self.kind]
        for column in _INTERNED:
            table = np.empty(len(self.tables[column]), object)
            table[:] = self.tables[column]
            frame[column] = table[self.columns[column]] if len(self) else []
        return frame
