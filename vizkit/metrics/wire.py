"""How many bytes went from which rank to which, by the algorithm that the backend uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vizkit import collectives
from vizkit.errors import InvalidInputError
from vizkit.trace import COLLECTIVE_KINDS, KINDS, NONE, Span, SpanKind, Trace

if TYPE_CHECKING:
    import pandas as pd

_SIGNATURE = ("rank", "kind", "payload_bytes", "peer", "group", "algorithm", "split_bytes")
_Matrices = dict[tuple[SpanKind, str, int, int, int], np.ndarray]
_BATCH = 1 << 16
_COUNTED = (*COLLECTIVE_KINDS, SpanKind.SEND)


@dataclass(frozen=True, eq=False)
class KindTraffic:
    """One kind's part of the traffic, with the meanings of `Traffic`."""

    operations: int
    payload_bytes: int
    wire_bytes: np.ndarray


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes between ranks.

    `wire_bytes[i, j]` is what rank i sent to rank j, by the algorithm of each collective and without protocol headers.
    `payload_bytes` is logical: what the callers asked to move, each collective and each message counted once.
    `operations` counts those. `by_kind` holds the same for each kind that occurs.
    """

    wire_bytes: np.ndarray
    payload_bytes: int
    operations: int
    by_kind: Mapping[SpanKind, KindTraffic]

    @property
    def total_wire_bytes(self) -> int:
        """Bytes that all ranks sent."""
        return int(self.wire_bytes.sum())

    def to_frame(self) -> pd.DataFrame:
        """A pandas table with one row a kind, in bytes."""
        import pandas as pd

        rows = {
            kind.value: (part.operations, part.payload_bytes, int(part.wire_bytes.sum()))
            for kind, part in self.by_kind.items()
        }
        names = ["operations", "payload_bytes", "wire_bytes"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=names).rename_axis("kind")

    def __str__(self) -> str:
        lines = [
            f"{kind.value}: {part.operations:,} operations, {part.payload_bytes:,} payload bytes, "
            f"{int(part.wire_bytes.sum()):,} bytes on the wire"
            for kind, part in self.by_kind.items()
        ]
        total = f"total: {self.operations:,} operations, {self.payload_bytes:,} payload bytes, "
        return "\n".join([*lines, f"{total}{self.total_wire_bytes:,} bytes on the wire"])


def traffic(trace: Trace) -> Traffic:
    """Bytes on the wire from rank to rank, and the logical payload beside them.

    A rank's row comes from its own spans: its share of each collective by the span's `algorithm` (where that is empty,
    by what `trace.notes["backend"]` uses) among the ranks of `group` (where that is empty, all ranks), and its sends.
    So a trace of some ranks tells what those ranks sent. A receive adds nothing: its bytes are counted at the sender,
    and are missing where the sender is not in the trace. Spans of one `operation` are one operation; spans without a
    number count once for each group, on the lowest rank of the group that is in the trace. Raises `InvalidInputError`
    for a send without a peer and for a rank outside its own group.

    >>> spans = [Span(r, "all_reduce", 0, 1, payload_bytes=1000, operation=0) for r in range(4)]
    >>> t = traffic(Trace.from_spans(spans, clock="virtual"))
    >>> t.payload_bytes, t.total_wire_bytes, t.wire_bytes.sum(axis=1).tolist()
    (1000, 6000, [1500, 1500, 1500, 1500])
    """
    rows = _Rows.of(trace)
    size = trace.world_size
    parts = {}
    for kind in _COUNTED:
        spans = trace.kind[rows.spans] == kind.code
        if spans.any():
            matrix = rows.matrix(np.bincount(rows.of_span[spans], minlength=len(rows.ranks)))
            operations, payload = _logical(trace, rows.spans[spans])
            parts[kind] = KindTraffic(operations, payload, matrix)
    return Traffic(
        wire_bytes=sum((part.wire_bytes for part in parts.values()), np.zeros((size, size), np.int64)),
        payload_bytes=sum(part.payload_bytes for part in parts.values()),
        operations=sum(part.operations for part in parts.values()),
        by_kind=parts,
    )


def traffic_over_time(trace: Trace, times_ns: np.ndarray) -> np.ndarray:
    """Bytes on the wire so far at each time: shape (times, sender, receiver).

    A span's bytes count as moved when it ends; times are on the trace's clock and need not be sorted.

    >>> spans = [Span(0, "send", 0, 10, peer=1, payload_bytes=5), Span(1, "send", 10, 20, peer=0, payload_bytes=7)]
    >>> traffic_over_time(Trace.from_spans(spans, clock="ideal"), [0, 10, 20]).tolist()
    [[[0, 0], [0, 0]], [[0, 5], [0, 0]], [[0, 5], [7, 0]]]
    """
    rows = _Rows.of(trace)
    times = np.asarray(times_ns)
    order = np.argsort(times, kind="stable")
    # the first of the sorted times at which each span is over
    since = np.searchsorted(times[order], trace.end_ns[rows.spans], side="left")
    seen = since < len(times)
    step = np.zeros((len(times), trace.world_size, trace.world_size), np.int64)
    pairs, counts = np.unique(since[seen] * max(len(rows.ranks), 1) + rows.of_span[seen], return_counts=True)
    for first in range(0, len(pairs), _BATCH):
        batch = slice(first, first + _BATCH)
        at, row = np.divmod(pairs[batch], len(rows.ranks))
        np.add.at(step, (at, rows.ranks[row]), counts[batch, None] * rows.bytes_to[row])
    result = np.empty_like(step)
    result[order] = step.cumsum(axis=0)
    return result


@dataclass(frozen=True)
class _Rows:
    """What each distinct communication makes its rank send; `of_span` points from each of `spans` to its row."""

    spans: np.ndarray
    of_span: np.ndarray
    ranks: np.ndarray
    bytes_to: np.ndarray

    @classmethod
    def of(cls, trace: Trace) -> _Rows:
        spans = np.flatnonzero(trace.is_kind(*_COUNTED))
        distinct = np.zeros(len(spans), np.int64)
        for column in _SIGNATURE:
            values, code = np.unique(trace.columns[column][spans], return_inverse=True)
            _, distinct = np.unique(distinct * max(len(values), 1) + code, return_inverse=True)
        _, examples = np.unique(distinct, return_index=True)
        backend = trace.notes.get("backend", "")
        matrices: _Matrices = {}
        bytes_to = [_sent(trace[int(spans[i])], trace.world_size, backend, matrices) for i in examples]
        return cls(
            spans,
            distinct,
            trace.rank[spans[examples]],
            np.array(bytes_to, np.int64).reshape(-1, trace.world_size),
        )

    def matrix(self, counts: np.ndarray) -> np.ndarray:
        """Bytes from rank to rank where row i happened `counts[i]` times."""
        size = self.bytes_to.shape[1]
        total = np.zeros((size, size), np.int64)
        np.add.at(total, self.ranks, self.bytes_to * counts[:, None])
        return total


def _sent(span: Span, world_size: int, backend: str, matrices: _Matrices) -> np.ndarray:
    """What this span's rank sends to each rank."""
    row = np.zeros(world_size, np.int64)
    if span.kind is SpanKind.SEND:
        if not 0 <= span.peer < world_size:
            raise InvalidInputError.because(
                "peer",
                span.peer,
                f"a send of rank {span.rank} goes to a rank from 0 to {world_size - 1}",
                "give the receiver's global rank",
            )
        row[span.peer] = span.payload_bytes
        return row
    group = span.group or tuple(range(world_size))
    if span.rank not in group or max(group) >= world_size:
        raise InvalidInputError.because(
            "group",
            group,
            f"must hold rank {span.rank}, whose span it is, and ranks below {world_size} only",
            "give the global ranks that took part",
        )
    place = list(group)
    if span.split_bytes:
        row[place] = span.split_bytes
        row[span.rank] = 0
        return row
    algorithm = span.algorithm or collectives.algorithm_for(span.kind, backend)
    root = group.index(span.peer) if span.peer in group else 0
    key = (span.kind, algorithm, len(group), span.payload_bytes, root)
    if key not in matrices:
        matrices[key] = collectives.wire_bytes(*key)
    row[place] = matrices[key][group.index(span.rank)]
    return row


def _logical(trace: Trace, spans: np.ndarray) -> tuple[int, int]:
    """How many operations these spans of one kind are, and the payload of those; its largest where the ranks differ."""
    operation, payload = trace.operation[spans], trace.payload_bytes[spans]
    numbered = operation != NONE
    numbers, where = np.unique(operation[numbered], return_inverse=True)
    largest = np.zeros(len(numbers), np.int64)
    np.maximum.at(largest, where, payload[numbered])
    rank, group = trace.rank[spans[~numbered]], trace.group[spans[~numbered]]
    lowest = np.full(len(trace.tables["group"]), trace.world_size)
    np.minimum.at(lowest, group, rank)
    is_send = KINDS[int(trace.kind[spans[0]])] is SpanKind.SEND
    once = payload[~numbered][(rank == lowest[group]) | is_send]
    return len(numbers) + len(once), int(largest.sum() + once.sum())
