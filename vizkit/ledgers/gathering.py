"""What a trace says of bytes, by axis of the mesh and kind: each rank's calls, and what they put on the wire."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vizkit import collectives
from vizkit.ledgers.explanations import Calls, ranks_text
from vizkit.mesh import Mesh
from vizkit.metrics import traffic
from vizkit.trace import COLLECTIVE_KINDS, KINDS, SpanKind, Trace

MESSAGES = (SpanKind.SEND, SpanKind.RECEIVE)


@dataclass(frozen=True)
class Communications:
    """All calls of one kind along one axis: by rank, payloads, and bytes that it sends by two algorithms."""

    axis: str
    kind: SpanKind
    num_ranks: int
    calls: dict[int, Calls]
    wire_bytes: dict[int, int]
    ring_bytes: dict[int, int]
    algorithms: tuple[str, ...]


def gather(trace: Trace, mesh: Mesh, kinds: Sequence[SpanKind]) -> Iterator[Communications]:
    """One entry for each axis and kind that occurs, in the mesh's order of axes; groups that follow none come last."""
    spans = np.flatnonzero(trace.is_kind(*kinds))
    axes, axis_of_span = _axes(trace, mesh, spans)
    backend = trace.notes.get("backend", "")
    textbook = replace(
        trace,
        columns={**trace.columns, "algorithm": np.zeros(len(trace), np.int32)},
        tables={**trace.tables, "algorithm": ("",)},
        notes={},
    )
    everybody = np.unique(trace.rank).tolist()
    for number in sorted(range(len(axes)), key=lambda i: _order(mesh, axes[i])):
        axis, members = axes[number]
        here = spans[axis_of_span == number]
        for code in np.unique(trace.kind[here]).tolist():
            chosen = here[trace.kind[here] == code]
            mask = np.zeros(len(trace), bool)
            mask[chosen] = True
            kind = KINDS[code]
            ranks = [rank for rank in everybody if not members or rank in members]
            yield Communications(
                axis,
                kind,
                len(members) or axis_size(mesh, axis),
                _calls(trace, chosen, ranks),
                _sent(trace.filter(mask), ranks),
                _sent(textbook.filter(mask), ranks),
                _algorithms(trace, chosen, kind, backend),
            )


def axis_name(mesh: Mesh, name: str) -> str:
    """The name as a mesh writes it: several axes joined by "×" in its own order; raises for an axis it does not have.

    >>> axis_name(Mesh(dp=2, tp=2), "tp×dp")
    'dp×tp'
    """
    parts = [part.strip() for part in name.split("×")]
    for part in parts:
        mesh.size(part)
    return "×".join(axis for axis in mesh.names if axis in parts)


def axis_size(mesh: Mesh, name: str) -> int:
    """Ranks of a group along an axis, or along several joined by "×"."""
    return math.prod(mesh.size(axis) for axis in name.split("×"))


def _axes(trace: Trace, mesh: Mesh, spans: np.ndarray) -> tuple[list[tuple[str, tuple[int, ...]]], np.ndarray]:
    """Axes as name and, for a group that follows none, its ranks; and for each span the position of its own."""
    is_message = np.isin(trace.kind[spans], [kind.code for kind in MESSAGES])
    group = np.where(is_message, -1, trace.group[spans])
    ends = np.where(is_message, trace.rank[spans] * trace.world_size + trace.peer[spans], -1)
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    pairs, inverse = np.unique(np.stack([group, ends]), axis=1, return_inverse=True)
    positions = []
    for column, edge in pairs.T.tolist():
        if column >= 0:
            members = trace.tables["group"][column] or tuple(range(trace.world_size))
            axis = _axis_of_group(mesh, members)
        else:
            members = ()
            axis = _axis_of_message(mesh, *divmod(edge, trace.world_size))
        key = (axis, ()) if axis else (f"ranks {ranks_text(members)}", tuple(members))
        positions.append(found.setdefault(key, len(found)))
    return list(found), np.array(positions, np.int64)[inverse.reshape(-1)] if len(spans) else np.zeros(0, np.int64)


def _axis_of_group(mesh: Mesh, members: Sequence[int]) -> str:
    """A rank alone speaks along the mesh's axis of size 1, where it has one only."""
    axis = mesh.axis_of(members)
    if axis or len(set(members)) != 1:
        return axis
    alone = [name for name, size in mesh.axes.items() if size == 1]
    return alone[0] if len(alone) == 1 else ""


def _axis_of_message(mesh: Mesh, rank: int, peer: int) -> str:
    """The axes in which the two ends differ."""
    here, there = mesh.coordinates(rank), mesh.coordinates(peer)
    return "×".join(name for name in mesh.names if here[name] != there[name]) or mesh.names[-1]


def _order(mesh: Mesh, axis: tuple[str, tuple[int, ...]]) -> tuple[object, ...]:
    name, members = axis
    parts = name.split("×")
    return (bool(members), len(parts), 0 if members else mesh.names.index(parts[0]), members)


def _calls(trace: Trace, spans: np.ndarray, ranks: Sequence[int]) -> dict[int, Calls]:
    calls: dict[int, Calls] = {rank: Counter() for rank in ranks}
    both = np.stack([trace.rank[spans], trace.payload_bytes[spans]])
    (rank, payload), counts = np.unique(both, axis=1, return_counts=True)
    for r, size, count in zip(rank.tolist(), payload.tolist(), counts.tolist(), strict=True):
        calls[r][size] += count
    return calls


def _sent(trace: Trace, ranks: Sequence[int]) -> dict[int, int]:
    sent = traffic(trace).wire_bytes.sum(axis=1)
    return {rank: int(sent[rank]) for rank in ranks}


def _algorithms(trace: Trace, spans: np.ndarray, kind: SpanKind, backend: str) -> tuple[str, ...]:
    if kind not in COLLECTIVE_KINDS:
        return ()
    named = (trace.tables["algorithm"][code] for code in np.unique(trace.algorithm[spans]).tolist())
    return tuple(sorted({str(name or collectives.algorithm_for(kind, backend).value) for name in named}))
