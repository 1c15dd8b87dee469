"""Who sends which chunk to whom: the movements of each algorithm, as generators of steps."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vizkit.trace import SpanKind


class Algorithm(enum.StrEnum):
    """How a collective moves its data."""

    RING = "ring"
    """Each rank talks to its neighbours only, towards the rank above (Patarasuk and Yuan, 2009)."""
    RING_DOWN = "ring_down"
    """The same ring towards the rank below, which is the way gloo's reductions go."""
    HALVING_DOUBLING = "halving_doubling"
    """Pairs at distance n/2, n/4, … exchange halves (Rabenseifner, 2004); extra ranks fold in first and out last."""
    TREE = "tree"
    """A binomial tree with the root on top."""
    DIRECT = "direct"
    """Each message goes straight from where it is to where it belongs; an all-reduce passes through one server rank."""
    RING_THEN_GATHER = "ring_then_gather"
    """A ring reduce-scatter, then every chunk goes straight to the root: gloo's reduce."""
    VIA_ALL_REDUCE = "via_all_reduce"
    """A whole all-reduce of the full input, of which each rank keeps its chunk: gloo's reduce-scatter."""
    DISSEMINATION = "dissemination"
    """Signals at distance 1, 2, 4, … (Hensgen, Finkel and Manber, 1988): a barrier."""


class Transfer(NamedTuple):
    """One message: `chunks` go from rank `src` to rank `dst`, which adds them to its own where `reduces` is true."""

    src: int
    dst: int
    chunks: tuple[int, ...]
    reduces: bool


Step = tuple[Transfer, ...]
"""Transfers that happen at the same time; each sends what its source held before the step."""


Steps = Iterable[Iterable[Transfer]]
Builder = Callable[[int, int], Steps]


def _ring_reduce_scatter(n: int, towards: int) -> Steps:
    return (
        [Transfer(r, (r + towards) % n, ((r - towards * (k + 1)) % n,), True) for r in range(n)] for k in range(n - 1)
    )


def _ring_all_gather(n: int, towards: int) -> Steps:
    return [[Transfer(r, (r + towards) % n, ((r - towards * k) % n,), False) for r in range(n)] for k in range(n - 1)]


def _ring_broadcast(n: int, root: int) -> Steps:
    """A chain from the root, through which the chunks flow one behind the other."""
    hops = [((root + v) % n, (root + v + 1) % n) for v in range(n - 1)]
    for step in range(2 * (n - 1)):
        yield [Transfer(a, b, (step - v,), False) for v, (a, b) in enumerate(hops) if 0 <= step - v < n]


def _reversed_into_root(broadcast: Steps) -> Steps:
    """A reduce is its broadcast played backwards."""
    for step in reversed(list(broadcast)):
        yield [Transfer(dst, src, chunks, True) for src, dst, chunks, _ in step]


def _tree_broadcast(n: int, root: int) -> Steps:
    everything = tuple(range(n))
    for distance in _powers_of_two_below(n):
        yield [
            Transfer((v + root) % n, (v + distance + root) % n, everything, False)
            for v in range(min(distance, n - distance))
        ]


def _tree_gather(n: int, root: int) -> Steps:
    for distance in _powers_of_two_below(n):
        yield [
            Transfer(
                (v + root) % n,
                (v - distance + root) % n,
                tuple((u + root) % n for u in range(v, min(v + distance, n))),
                False,
            )
            for v in range(distance, n, 2 * distance)
        ]


def _tree_scatter(n: int, root: int) -> Steps:
    for step in reversed(list(_tree_gather(n, root))):
        yield [Transfer(dst, src, chunks, False) for src, dst, chunks, _ in step]


def _halving(n: int) -> Steps:
    """Recursive halving among the largest power of two p ≤ n; rank i < p owns chunk i and, if there is one, p + i."""
    p = 1 << (n.bit_length() - 1)
    everything = tuple(range(n))
    if n > p:
        yield [Transfer(p + i, i, everything, True) for i in range(n - p)]
    for distance in reversed(list(_powers_of_two_below(p))):
        yield [Transfer(r, r ^ distance, _owned(n, p, r ^ distance, distance), True) for r in range(p)]


def _doubling(n: int) -> Steps:
    p = 1 << (n.bit_length() - 1)
    for distance in _powers_of_two_below(p):
        yield [Transfer(r, r ^ distance, _owned(n, p, r, distance), False) for r in range(p)]


def _owned(n: int, p: int, rank: int, block: int) -> tuple[int, ...]:
    """The chunks of all ranks in the aligned block of this size around `rank`."""
    first = rank - rank % block
    return tuple(c for base in (0, p) for c in range(base + first, min(base + first + block, n)))


def _halving_reduce_scatter(n: int) -> Steps:
    yield from _halving(n)
    p = 1 << (n.bit_length() - 1)
    if n > p:
        yield [Transfer(i, p + i, (p + i,), False) for i in range(n - p)]


def _doubling_all_gather(n: int) -> Steps:
    p = 1 << (n.bit_length() - 1)
    if n > p:
        yield [Transfer(p + i, i, (p + i,), False) for i in range(n - p)]
    yield from _doubling(n)
    if n > p:
        yield [Transfer(i, p + i, tuple(c for c in range(n) if c != p + i), False) for i in range(n - p)]


def _halving_doubling_all_reduce(n: int) -> Steps:
    yield from _halving(n)
    yield from _doubling(n)
    p = 1 << (n.bit_length() - 1)
    if n > p:
        yield [Transfer(i, p + i, tuple(range(n)), False) for i in range(n - p)]


def _direct_all(n: int, chunk: Callable[[int, int], int], reduces: bool) -> Steps:
    """Everybody to everybody: in step k, rank r sends to rank r + k."""
    for k in range(1, n):
        yield [Transfer(r, (r + k) % n, (chunk(r, (r + k) % n),), reduces) for r in range(n)]


def _direct_from(n: int, root: int, chunks: Callable[[int], tuple[int, ...]]) -> Steps:
    return [[Transfer(root, (root + k) % n, chunks((root + k) % n), False)] for k in range(1, n)]


def _direct_into(n: int, root: int, chunks: Callable[[int], tuple[int, ...]], reduces: bool) -> Steps:
    return [[Transfer((root + k) % n, root, chunks((root + k) % n), reduces)] for k in range(1, n)]


def _direct_broadcast(n: int, root: int) -> Steps:
    return _direct_from(n, root, lambda _: tuple(range(n)))


def _direct_reduce(n: int, root: int) -> Steps:
    return _direct_into(n, root, lambda _: tuple(range(n)), True)


def _direct_gather(n: int, root: int) -> Steps:
    return _direct_into(n, root, lambda rank: (rank,), False)


def _dissemination(n: int) -> Steps:
    for distance in _powers_of_two_below(n):
        yield [Transfer(r, (r + distance) % n, (0,), True) for r in range(n)]


def _powers_of_two_below(n: int) -> list[int]:
    return [1 << i for i in range((n - 1).bit_length())]


def _ring_all_reduce(n: int, towards: int) -> Steps:
    return [*_ring_reduce_scatter(n, towards), *_ring_all_gather(n, towards)]


_K, _A = SpanKind, Algorithm
BUILDERS: dict[tuple[SpanKind, Algorithm], Builder] = {
    (_K.ALL_REDUCE, _A.RING): lambda n, root: _ring_all_reduce(n, +1),
    (_K.ALL_REDUCE, _A.RING_DOWN): lambda n, root: _ring_all_reduce(n, -1),
    (_K.ALL_REDUCE, _A.HALVING_DOUBLING): lambda n, root: _halving_doubling_all_reduce(n),
    (_K.ALL_REDUCE, _A.TREE): lambda n, root: [
        *_reversed_into_root(_tree_broadcast(n, root)),
        *_tree_broadcast(n, root),
    ],
    (_K.ALL_REDUCE, _A.DIRECT): lambda n, root: [*_direct_reduce(n, root), *_direct_broadcast(n, root)],
    (_K.REDUCE_SCATTER, _A.RING): lambda n, root: _ring_reduce_scatter(n, +1),
    (_K.REDUCE_SCATTER, _A.HALVING_DOUBLING): lambda n, root: _halving_reduce_scatter(n),
    (_K.REDUCE_SCATTER, _A.DIRECT): lambda n, root: _direct_all(n, lambda src, dst: dst, True),
    (_K.REDUCE_SCATTER, _A.VIA_ALL_REDUCE): lambda n, root: _ring_all_reduce(n, -1),
    (_K.ALL_GATHER, _A.RING): lambda n, root: _ring_all_gather(n, +1),
    (_K.ALL_GATHER, _A.HALVING_DOUBLING): lambda n, root: _doubling_all_gather(n),
    (_K.ALL_GATHER, _A.DIRECT): lambda n, root: _direct_all(n, lambda src, dst: src, False),
    (_K.ALL_TO_ALL, _A.DIRECT): lambda n, root: _direct_all(n, lambda src, dst: src * n + dst, False),
    (_K.BROADCAST, _A.RING): _ring_broadcast,
    (_K.BROADCAST, _A.TREE): _tree_broadcast,
    (_K.BROADCAST, _A.DIRECT): _direct_broadcast,
    (_K.REDUCE, _A.RING): lambda n, root: _reversed_into_root(_ring_broadcast(n, root)),
    (_K.REDUCE, _A.TREE): lambda n, root: _reversed_into_root(_tree_broadcast(n, root)),
    (_K.REDUCE, _A.DIRECT): _direct_reduce,
    (_K.REDUCE, _A.RING_THEN_GATHER): lambda n, root: [*_ring_reduce_scatter(n, -1), *_direct_gather(n, root)],
    (_K.GATHER, _A.TREE): _tree_gather,
    (_K.GATHER, _A.DIRECT): _direct_gather,
    (_K.SCATTER, _A.TREE): _tree_scatter,
    (_K.SCATTER, _A.DIRECT): lambda n, root: _direct_from(n, root, lambda rank: (rank,)),
    (_K.BARRIER, _A.DISSEMINATION): lambda n, root: _dissemination(n),
}
