"""What a collective costs: bytes on the wire, seconds, and the bandwidths that benchmarks report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from vizkit.collectives.algorithms import num_chunks, resolve, steps
from vizkit.collectives.movements import Algorithm
from vizkit.errors import InvalidInputError
from vizkit.hardware import Link
from vizkit.trace import SpanKind

GLOO_SEGMENT_BYTES = 1 << 20


def chunk_bytes(kind: SpanKind | str, world_size: int, payload_bytes: int) -> np.ndarray:
    """Bytes of each chunk, as even as whole bytes allow; they add up to what the collective moves from rank to rank.

    An all-to-all has `payload_bytes` on each rank, so its n × n chunks add up to n payloads.

    >>> chunk_bytes("all_reduce", 4, 10).tolist()
    [2, 3, 2, 3]
    """
    kind = SpanKind.parse(kind)
    if payload_bytes < 0:
        raise InvalidInputError.because("payload_bytes", payload_bytes, "cannot be negative", "give the tensor's bytes")
    if kind is SpanKind.BARRIER:
        return np.zeros(1, np.int64)
    edges = np.array([i * payload_bytes // world_size for i in range(world_size + 1)], np.int64)
    return np.tile(np.diff(edges), num_chunks(kind, world_size) // world_size)


def wire_bytes(
    kind: SpanKind | str,
    algorithm: Algorithm | str,
    world_size: int,
    payload_bytes: int,
    root: int = 0,
    split_bytes: Sequence[Sequence[int]] | np.ndarray | None = None,
) -> np.ndarray:
    """Bytes that rank i sends to rank j: a `world_size` × `world_size` array of whole numbers.

    `payload_bytes` is what `vizkit.Span` calls so; `root` is a position in the group. `split_bytes[i][j]` is what rank
    i has for rank j in an uneven all-to-all. Chunks are cut as `chunk_bytes` says; gloo's reduce cuts whole segments
    and sends some of them needlessly, which is counted. Protocol headers are not.

    >>> wire_bytes("all_reduce", "ring", 4, 1000).sum(axis=1).tolist()  # 2 (n - 1) / n of the payload for each rank
    [1500, 1500, 1500, 1500]
    """
    kind, algorithm = resolve(kind, algorithm)
    src, dst, chunk = _moves(kind, algorithm, world_size, root)
    surplus = np.zeros(world_size, np.int64)
    if split_bytes is None:
        sizes = chunk_bytes(kind, world_size, payload_bytes)
        if algorithm is Algorithm.RING_THEN_GATHER and world_size > 1:
            sizes, surplus = _gloo_reduce_bytes(world_size, payload_bytes)
    else:
        sizes = np.asarray(split_bytes, np.int64)
        if kind is not SpanKind.ALL_TO_ALL or sizes.shape != (world_size, world_size) or sizes.min(initial=0) < 0:
            raise InvalidInputError.because(
                "split_bytes",
                sizes.shape,
                f"belongs to an all_to_all and holds one number, not negative, for each of {world_size} x {world_size}",
                "give row i for what rank i sends to each rank",
            )
        sizes = sizes.ravel()
    matrix = np.zeros((world_size, world_size), np.int64)
    np.add.at(matrix, (src, dst), sizes[chunk])
    ranks = np.arange(world_size)
    matrix[ranks, ranks - 1] += surplus
    return matrix


def _gloo_reduce_bytes(n: int, payload_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Chunk sizes of gloo's reduce, and what each rank sends to the rank below though nobody uses it.

    Its loop (`gloo/reduce.cc`) runs to two segments before the end in place of one chunk before it, so with more than
    two segments of 1 MiB a chunk, each rank sends most of its finished chunk once more.
    """
    segment = max(min(-(-payload_bytes // (2 * n)), GLOO_SEGMENT_BYTES), 1)
    per_rank = max(-(-payload_bytes // (segment * n)), 2)
    starts = np.arange(n, dtype=np.int64) * per_rank * segment
    within = np.minimum(starts, payload_bytes)
    sizes = np.minimum(starts + per_rank * segment, payload_bytes) - within
    return sizes, np.minimum(starts + (per_rank - 2) * segment, payload_bytes) - within


@lru_cache(maxsize=256)
def _moves(
    kind: SpanKind, algorithm: Algorithm, world_size: int, root: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources, destinations and chunk numbers of all messages, one entry for each chunk that moves."""
    moves = [
        (transfer.src, transfer.dst, chunk)
        for step in steps(kind, algorithm, world_size, root)
        for transfer in step
        for chunk in transfer.chunks
    ]
    columns = np.array(moves, np.int64).reshape(-1, 3)
    columns.flags.writeable = False
    return columns[:, 0], columns[:, 1], columns[:, 2]


def time_s(
    kind: SpanKind | str, algorithm: Algorithm | str, world_size: int, payload_bytes: float, link: Link
) -> float:
    """Seconds by the α–β model: each step costs α plus its largest message over β, and steps do not overlap.

    With n ranks and S bytes: ring all-reduce 2(n−1)(α + S/nβ); ring all-gather and reduce-scatter (n−1)(α + S/nβ);
    halving-doubling all-reduce 2 log₂n α + 2(n−1)/n S/β for n a power of two; binomial tree ⌈log₂n⌉(α + S/β); direct
    all-to-all (n−1)(α + S/nβ); barrier ⌈log₂n⌉ α; nothing for one rank (Thakur, Rabenseifner and Gropp, 2005, without
    the arithmetic). The direct forms let a rank send or receive one message at a time.

    >>> round(time_s("all_reduce", "ring", 4, 4e6, Link(latency_s=1e-3, bandwidth_bytes_per_s=1e9)), 9)
    0.012
    """
    num_steps, share = critical_path(kind, algorithm, world_size)
    return num_steps * link.latency_s + share * payload_bytes / link.bandwidth_bytes_per_s


def critical_path(kind: SpanKind | str, algorithm: Algorithm | str, world_size: int) -> tuple[int, float]:
    """How many steps follow one another, and how many payloads the largest messages of those steps add up to.

    >>> critical_path("all_reduce", "ring", 4), critical_path("broadcast", "tree", 5)
    ((6, 1.5), (3, 3.0))
    """
    key = resolve(kind, algorithm)
    if world_size < 1:
        raise InvalidInputError.because("world_size", world_size, "must be a whole number from 1 on", "give the ranks")
    if world_size == 1:
        return 0, 0.0
    num_steps, share = _CRITICAL_PATHS[key](world_size)
    return num_steps, float(share)


def bus_factor(kind: SpanKind | str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it: what each link has to carry, per payload byte.

    All-reduce 2(n−1)/n; reduce-scatter, all-gather, all-to-all, gather and scatter (n−1)/n; broadcast and reduce 1.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    kind = SpanKind.parse(kind)
    if kind not in _BUS_FACTORS:
        valid = ", ".join(known.value for known in _BUS_FACTORS)
        raise InvalidInputError.because("kind", kind.value, "has no bus bandwidth", f"use one of {valid}")
    if world_size < 1:
        raise InvalidInputError.because("world_size", world_size, "must be a whole number from 1 on", "give the ranks")
    per_payload, lacks_own_part = _BUS_FACTORS[kind]
    return per_payload * ((world_size - 1) / world_size if lacks_own_part else 1.0)


def algorithm_bandwidth(payload_bytes: float, seconds: float) -> float:
    """Payload bytes a second, as the caller of the collective sees it; infinite where it took no time."""
    return payload_bytes / seconds if seconds > 0 else math.inf


def bus_bandwidth(kind: SpanKind | str, world_size: int, payload_bytes: float, seconds: float) -> float:
    """Bytes a second that a link carried, to compare with the link's own bandwidth.

    >>> bus_bandwidth("all_reduce", 4, payload_bytes=1e9, seconds=0.5)
    3000000000.0
    """
    return algorithm_bandwidth(payload_bytes, seconds) * bus_factor(kind, world_size)


_K, _A = SpanKind, Algorithm
_BUS_FACTORS: dict[SpanKind, tuple[float, bool]] = {
    _K.ALL_REDUCE: (2.0, True),
    _K.REDUCE_SCATTER: (1.0, True),
    _K.ALL_GATHER: (1.0, True),
    _K.ALL_TO_ALL: (1.0, True),
    _K.GATHER: (1.0, True),
    _K.SCATTER: (1.0, True),
    _K.BROADCAST: (1.0, False),
    _K.REDUCE: (1.0, False),
}


def _levels(n: int) -> int:
    """⌈log₂n⌉"""
    return (n - 1).bit_length()


def _folded(n: int) -> tuple[int, int, float]:
    """Halving-doubling among p, the largest power of two ≤ n: fold steps at one end, log₂p, payloads of one pass."""
    p = 1 << (n.bit_length() - 1)
    extra = n - p
    messages = (distance + min(extra, distance) for distance in (1 << i for i in range(_levels(p))))
    return int(extra > 0), _levels(p), sum(messages) / n


def _halving_doubling_all_reduce(n: int) -> tuple[int, float]:
    fold, levels, share = _folded(n)
    return 2 * (levels + fold), 2 * (share + fold)


def _halving_or_doubling(n: int, folded_share: float) -> tuple[int, float]:
    fold, levels, share = _folded(n)
    return levels + 2 * fold, share + fold * folded_share


def _ring_pass(n: int) -> tuple[int, float]:
    return n - 1, (n - 1) / n


def _two_ring_passes(n: int) -> tuple[int, float]:
    return 2 * (n - 1), 2 * (n - 1) / n


_CRITICAL_PATHS: dict[tuple[SpanKind, Algorithm], Callable[[int], tuple[int, float]]] = {
    (_K.ALL_REDUCE, _A.RING): _two_ring_passes,
    (_K.ALL_REDUCE, _A.RING_DOWN): _two_ring_passes,
    (_K.ALL_REDUCE, _A.HALVING_DOUBLING): _halving_doubling_all_reduce,
    (_K.ALL_REDUCE, _A.TREE): lambda n: (2 * _levels(n), 2 * _levels(n)),
    (_K.ALL_REDUCE, _A.DIRECT): lambda n: (2 * (n - 1), 2 * (n - 1)),
    (_K.REDUCE_SCATTER, _A.RING): _ring_pass,
    (_K.REDUCE_SCATTER, _A.HALVING_DOUBLING): lambda n: _halving_or_doubling(n, 1 + 1 / n),
    (_K.REDUCE_SCATTER, _A.DIRECT): _ring_pass,
    (_K.REDUCE_SCATTER, _A.VIA_ALL_REDUCE): _two_ring_passes,
    (_K.ALL_GATHER, _A.RING): _ring_pass,
    (_K.ALL_GATHER, _A.HALVING_DOUBLING): lambda n: _halving_or_doubling(n, 1),
    (_K.ALL_GATHER, _A.DIRECT): _ring_pass,
    (_K.ALL_TO_ALL, _A.DIRECT): _ring_pass,
    (_K.BROADCAST, _A.RING): _two_ring_passes,
    (_K.BROADCAST, _A.TREE): lambda n: (_levels(n), _levels(n)),
    (_K.BROADCAST, _A.DIRECT): lambda n: (n - 1, n - 1),
    (_K.REDUCE, _A.RING): _two_ring_passes,
    (_K.REDUCE, _A.TREE): lambda n: (_levels(n), _levels(n)),
    (_K.REDUCE, _A.DIRECT): lambda n: (n - 1, n - 1),
    (_K.REDUCE, _A.RING_THEN_GATHER): _two_ring_passes,
    (_K.GATHER, _A.TREE): lambda n: (_levels(n), (n - 1) / n),
    (_K.GATHER, _A.DIRECT): _ring_pass,
    (_K.SCATTER, _A.TREE): lambda n: (_levels(n), (n - 1) / n),
    (_K.SCATTER, _A.DIRECT): _ring_pass,
    (_K.BARRIER, _A.DISSEMINATION): lambda n: (_levels(n), 0.0),
}
