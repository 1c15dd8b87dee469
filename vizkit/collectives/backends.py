"""Which algorithm a backend uses for which collective."""

from __future__ import annotations

from vizkit.collectives.movements import Algorithm
from vizkit.trace import SpanKind

_K, _A = SpanKind, Algorithm

DEFAULT_ALGORITHMS: dict[SpanKind, Algorithm] = {
    _K.ALL_REDUCE: _A.RING,
    _K.ALL_GATHER: _A.RING,
    _K.REDUCE_SCATTER: _A.RING,
    _K.ALL_TO_ALL: _A.DIRECT,
    _K.BROADCAST: _A.TREE,
    _K.REDUCE: _A.TREE,
    _K.GATHER: _A.DIRECT,
    _K.SCATTER: _A.DIRECT,
    _K.BARRIER: _A.DISSEMINATION,
}
"""What is assumed where the backend is not known: the textbook's choice for large payloads."""

_GLOO = {
    _K.ALL_REDUCE: _A.RING_DOWN,
    _K.ALL_GATHER: _A.RING,
    _K.REDUCE_SCATTER: _A.VIA_ALL_REDUCE,
    _K.ALL_TO_ALL: _A.DIRECT,
    _K.BROADCAST: _A.TREE,
    _K.REDUCE: _A.RING_THEN_GATHER,
    _K.GATHER: _A.DIRECT,
    _K.SCATTER: _A.DIRECT,
    _K.BARRIER: _A.DISSEMINATION,
}
_NCCL = DEFAULT_ALGORITHMS | {_K.BROADCAST: _A.RING, _K.REDUCE: _A.RING}

BACKEND_ALGORITHMS: dict[tuple[str, SpanKind], Algorithm] = {
    (backend, kind): algorithm
    for backend, table in {"gloo": _GLOO, "nccl": _NCCL}.items()
    for kind, algorithm in table.items()
}
"""(backend, kind) → the algorithm that really runs.

gloo: read from its source and measured on the loopback interface with torch 2.13
(`tests/distributed/test_wire_bytes.py`). NCCL: an assumption; it picks ring, tree or others by size and topology, and
ring is its choice for large payloads inside one node. It runs all-to-all, gather and scatter as sends and receives.
"""


def algorithm_for(kind: SpanKind | str, backend: str = "") -> Algorithm:
    """The algorithm that `backend` ("gloo", "nccl") uses; an unknown backend gets the textbook's choice.

    >>> algorithm_for("reduce_scatter", "gloo").value, algorithm_for("reduce_scatter").value
    ('via_all_reduce', 'ring')
    """
    kind = SpanKind.parse(kind)
    return BACKEND_ALGORITHMS.get((backend, kind), DEFAULT_ALGORITHMS[kind])
