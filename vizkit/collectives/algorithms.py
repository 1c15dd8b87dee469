"""How each collective moves its chunks, step by step, and what each rank holds after each step."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from vizkit.collectives.movements import BUILDERS, Algorithm, Step
from vizkit.errors import InvalidInputError
from vizkit.trace import COLLECTIVE_KINDS, SpanKind


def num_chunks(kind: SpanKind | str, world_size: int) -> int:
    """Into how many chunks the payload is cut: n; n × n for an all-to-all (chunk `src * n + dst`); 1 for a barrier.

    >>> num_chunks("all_reduce", 4), num_chunks("all_to_all", 4), num_chunks("barrier", 4)
    (4, 16, 1)
    """
    special = {SpanKind.ALL_TO_ALL: world_size**2, SpanKind.BARRIER: 1}
    return special.get(_collective(kind), world_size)


def algorithms_for(kind: SpanKind | str) -> tuple[Algorithm, ...]:
    """The algorithms that this collective has here.

    >>> [algorithm.value for algorithm in algorithms_for("all_gather")]
    ['ring', 'halving_doubling', 'direct']
    """
    kind = _collective(kind)
    return tuple(algorithm for known, algorithm in BUILDERS if known is kind)


def resolve(kind: SpanKind | str, algorithm: Algorithm | str) -> tuple[SpanKind, Algorithm]:
    """Kind and algorithm as enums; raises `InvalidInputError` with the valid ones where the two do not go together."""
    kind = _collective(kind)
    valid = algorithms_for(kind)
    if algorithm not in valid:
        raise InvalidInputError.because(
            "algorithm", str(algorithm), f"is not one that {kind.value} has", f"use one of {', '.join(valid)}"
        )
    return kind, Algorithm(algorithm)


def steps(kind: SpanKind | str, algorithm: Algorithm | str, world_size: int, root: int = 0) -> list[Step]:
    """The steps of a collective; `root` matters to broadcast, reduce, gather, scatter and a direct all-reduce.

    Works for every world size from 1 (no steps) on. Raises `InvalidInputError` for a kind that is no collective, an
    algorithm that the collective does not have, a world size below 1 and a root outside it.

    >>> for step in steps("broadcast", "tree", 4):
    ...     print([(transfer.src, transfer.dst) for transfer in step])
    [(0, 1)]
    [(0, 2), (1, 3)]
    >>> steps("all_gather", "ring", 2)
    [(Transfer(src=0, dst=1, chunks=(0,), reduces=False), Transfer(src=1, dst=0, chunks=(1,), reduces=False))]
    """
    key = resolve(kind, algorithm)
    if isinstance(world_size, bool) or not isinstance(world_size, int | np.integer) or world_size < 1:
        raise InvalidInputError.because("world_size", world_size, "must be a whole number from 1 on", "give the ranks")
    if not 0 <= root < world_size:
        raise InvalidInputError.because(
            "root", root, f"must be a rank of the group, 0 to {world_size - 1}", "give its position in the group"
        )
    return list(_cached_steps(*key, int(world_size), int(root)))


@lru_cache(maxsize=256)
def _cached_steps(kind: SpanKind, algorithm: Algorithm, world_size: int, root: int) -> tuple[Step, ...]:
    return tuple(tuple(step) for step in BUILDERS[kind, algorithm](world_size, root))


def holdings(kind: SpanKind | str, algorithm: Algorithm | str, world_size: int, root: int = 0) -> np.ndarray:
    """What each rank holds before the first step and after each one.

    Shape (steps + 1, rank, chunk, contributor): how often the contributor's data is in the rank's copy of the chunk;
    all zeros where the rank does not hold the chunk.

    >>> holdings("reduce_scatter", "ring", 3)[-1, 1, 1]      # rank 1 ends with chunk 1, to which each rank gave once
    array([1, 1, 1])
    """
    kind, algorithm = resolve(kind, algorithm)
    all_steps = steps(kind, algorithm, world_size, root)
    state = _starting(kind, world_size, root)
    history = [state]
    for step in all_steps:
        before, state = state, state.copy()
        for src, dst, chunks, reduces in step:
            where = list(chunks)
            sent = before[src, where]
            state[dst, where] = state[dst, where] + sent if reduces else sent
        history.append(state)
    return np.array(history)


def promise(kind: SpanKind | str, world_size: int, root: int = 0) -> np.ndarray:
    """What each rank must hold in the end, as in `holdings`: shape (rank, chunk, contributor), zeros for "anything".

    >>> promise("scatter", 2, root=1)[0].tolist()     # rank 0 ends with chunk 0, which came from rank 1
    [[0, 1], [0, 0]]
    """
    kind = _collective(kind)
    chunks = num_chunks(kind, world_size)
    start = _starting(kind, world_size, root)
    # a chunk's final content: everything that any rank holds of it at the start
    content = start.sum(axis=0, keepdims=True)
    ranks, numbers = np.arange(world_size)[:, None], np.arange(chunks)[None, :]
    wanted = {
        SpanKind.REDUCE: ranks == root,
        SpanKind.GATHER: ranks == root,
        SpanKind.SCATTER: ranks == numbers,
        SpanKind.REDUCE_SCATTER: ranks == numbers,
        SpanKind.ALL_TO_ALL: ranks == numbers % world_size,
    }.get(kind, np.ones((1, 1), bool))
    return np.where(wanted[..., None], content, 0) * np.ones((world_size, chunks, 1), int)


def _starting(kind: SpanKind, n: int, root: int) -> np.ndarray:
    chunks = num_chunks(kind, n)
    ranks, numbers = np.arange(n)[:, None], np.arange(chunks)[None, :]
    held = {
        SpanKind.ALL_GATHER: ranks == numbers,
        SpanKind.GATHER: ranks == numbers,
        SpanKind.BROADCAST: ranks == root,
        SpanKind.SCATTER: ranks == root,
        SpanKind.ALL_TO_ALL: ranks == numbers // n,
    }.get(kind, np.ones((1, 1), bool))
    state = np.zeros((n, chunks, n), int)
    state[np.arange(n), :, np.arange(n)] = held
    return state


def _collective(kind: SpanKind | str) -> SpanKind:
    kind = SpanKind.parse(kind)
    if kind not in COLLECTIVE_KINDS:
        valid = ", ".join(collective.value for collective in COLLECTIVE_KINDS)
        raise InvalidInputError.because("kind", kind.value, "is not a collective", f"use one of {valid}")
    return kind
