"""What each rank is doing, in memory that the notebook and all ranks share, readable also after a rank was killed.

Every rank has one record: its state, its counters, and a ring with its last `RING` communications. A rank writes only
its own record, so no lock is needed. Before a rank enters a communication it notes what it is about to do and looks
at what its neighbours in the group noted for the same one: whoever comes later sees a mismatch before the backend can
hang or crash on it.
"""

from __future__ import annotations

import enum
import functools
import mmap
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from vizkit.errors import CollectiveMismatchError
from vizkit.trace import KINDS, NONE, SpanKind

MAX_RANKS = 64
RING = 256
ANY_NUMEL = -1

_HEADER = struct.Struct("<BBBxiQQ")  # state, crowded, in backward, slot waited for, posted, finished
_STATE = struct.Struct("<B")
_WAITING = struct.Struct("<i")
_WAIT = struct.Struct("<iQQ")
_COUNT = struct.Struct("<Q")
_PROGRESS = struct.Struct("<QQ32s")
# key, sequence, kind, dimensions, text length, peer, members, elements, first four dims, "dtype|detail", finished
_SLOT = struct.Struct("<IIBBBxiQq4q32sBxxxxxxx")
_BODY = struct.Struct("<BBBxiQq4q32s")
_KEY = struct.Struct("<II")
_CROWDED_AT, _BACKWARD_AT, _WAITING_AT, _POSTED_AT, _FINISHED_AT, _PROGRESS_AT = 1, 2, 4, 8, 16, 24
_RING_AT = 128
_BODY_AT, _FINISHED_FLAG_AT = _KEY.size, _KEY.size + _BODY.size
SLOT_BYTES = _SLOT.size
RECORD_BYTES = _RING_AT + RING * SLOT_BYTES

NOT_WAITING = -1
_BEING_WRITTEN = _KEY.pack(0, 0xFFFFFFFF)
_NOT_FINISHED = bytes(SLOT_BYTES - _FINISHED_FLAG_AT)


class State(enum.IntEnum):
    """How far a rank has come."""

    STARTING = 0
    RUNNING = 1
    RETURNED = 2
    FAILED = 3


class Operation(NamedTuple):
    """One communication as a rank enters it.

    `key` names the group of a collective, or group, edge and tag of a message; `sequence` counts operations of that key
    from 0 on; `members` and `peer` are global ranks; `numel` is −1 where it may differ between ranks.
    """

    kind: SpanKind
    key: str
    sequence: int
    members: tuple[int, ...]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    numel: int = ANY_NUMEL
    peer: int = NONE
    detail: str = ""


@dataclass(frozen=True)
class Posted:
    """An operation as it stands in a rank's ring."""

    key: int
    sequence: int
    kind: SpanKind
    finished: bool
    members: tuple[int, ...]
    numel: int
    peer: int
    shape: tuple[int, ...]
    dtype: str
    detail: str

    @property
    def tensor(self) -> str:
        return f"{self.dtype or 'no tensor'} {list(self.shape)}" if self.dtype else "no tensor"

    @property
    def is_message(self) -> bool:
        return self.kind in (SpanKind.SEND, SpanKind.RECEIVE)

    @property
    def is_from_anybody(self) -> bool:
        return self.kind is SpanKind.RECEIVE and self.peer < 0


@dataclass(frozen=True)
class Snapshot:
    """One rank's record at one moment.

    `waiting` is what its main thread is blocked on; `is_crowded` says that other threads of the program were alive when
    that began, `in_backward` that the main thread is inside a backward.
    """

    rank: int
    state: State
    waiting: Posted | None
    posted: int
    finished: int
    ring: dict[tuple[int, int], Posted]
    is_crowded: bool = False
    in_backward: bool = False

    @property
    def last(self) -> Posted | None:
        return next(reversed(self.ring.values()), None)


def create_board(world_size: int, descriptor: int) -> None:
    """Give the file behind `descriptor` the size that `world_size` ranks need, filled with zeros."""
    os.ftruncate(descriptor, world_size * RECORD_BYTES)


class Board:
    """The shared records, seen from rank `rank`, or from the notebook if `rank` is −1."""

    def __init__(self, descriptor: int, world_size: int, rank: int = NONE) -> None:
        self._memory = mmap.mmap(descriptor, world_size * RECORD_BYTES)
        self._world_size = world_size
        self._rank = rank
        self._base = max(rank, 0) * RECORD_BYTES
        self.posted = 0
        self._finished = 0
        self._channels: dict[str, tuple[int, int, list[tuple[int, int]]]] = {}
        if rank >= 0:
            _WAITING.pack_into(self._memory, self._base + _WAITING_AT, NOT_WAITING)

    def enter_state(self, state: State) -> None:
        _STATE.pack_into(self._memory, self._base, state)

    def post(self, operation: Operation) -> int:
        """Note that this rank enters `operation`; the number returned stands for it in `waiting` and `finished`.

        Raises `CollectiveMismatchError` where a neighbour in the group has entered it with other arguments.
        """
        kind, key, sequence, members, dtype, shape, numel, peer, detail = operation
        crc, bits, neighbours = self._channels.get(key) or self._channel(key, members)
        slot = (crc + sequence) % RING
        offset = _RING_AT + slot * SLOT_BYTES
        memory, base = self._memory, self._base
        mine = base + offset
        stamp = _KEY.pack(crc, sequence & 0xFFFFFFFF)
        entry = stamp + _body(kind, dtype, shape, numel, peer, detail, bits)
        memory[mine : mine + _BODY_AT] = _BEING_WRITTEN
        memory[mine + _BODY_AT : mine + SLOT_BYTES] = entry[_BODY_AT:] + _NOT_FINISHED
        memory[mine : mine + _BODY_AT] = stamp  # last, so that nobody compares a slot half written
        self.posted += 1
        _COUNT.pack_into(memory, base + _POSTED_AT, self.posted)
        for member, member_base in neighbours:
            there = member_base + offset
            theirs = memory[there : there + _FINISHED_FLAG_AT]
            if (
                theirs != entry
                and theirs.startswith(stamp)
                and (conflict := mismatch(operation, self._rank, _read_slot(memory, there), member))
                and memory[there : there + _BODY_AT] == stamp  # not overwritten while it was read
            ):
                raise CollectiveMismatchError(conflict)
        return slot

    def _channel(self, key: str, members: tuple[int, ...]) -> tuple[int, int, list[tuple[int, int]]]:
        """The key's number, the members as bits, and the neighbours in the group with the places of their records.

        Where not all members agree, two neighbours disagree: to look at those two is enough in a group of any size.
        """
        here = members.index(self._rank) if self._rank in members else 0
        neighbours = {members[here - 1], members[(here + 1) % len(members)]} - {self._rank}
        places = [(member, member * RECORD_BYTES) for member in sorted(neighbours)]
        channel = zlib.crc32(key.encode()), sum(1 << member for member in set(members)), places
        self._channels[key] = channel
        return channel

    def waiting(self, slot: int, is_crowded: bool = False) -> None:
        """Note that the main thread is about to block until the operation in `slot` is over.

        `is_crowded`: other threads of the program are alive, and what they do may end the wait.
        """
        self._memory[self._base + _CROWDED_AT] = is_crowded
        _WAITING.pack_into(self._memory, self._base + _WAITING_AT, slot)

    def resumed(self) -> None:
        """Note that the main thread goes on."""
        _WAITING.pack_into(self._memory, self._base + _WAITING_AT, NOT_WAITING)

    def in_backward(self, is_inside: bool) -> None:
        """Note that the main thread enters or leaves a backward."""
        self._memory[self._base + _BACKWARD_AT] = is_inside

    def finished(self, slot: int) -> None:
        """Note that the operation in `slot` is over; may be called from any thread of the rank."""
        self._memory[self._base + _RING_AT + slot * SLOT_BYTES + _FINISHED_FLAG_AT] = 1
        self._finished += 1
        _COUNT.pack_into(self._memory, self._base + _FINISHED_AT, self._finished)

    def show_progress(self, done: int, total: int, label: str) -> None:
        """Note how far a long step has come; `total` is 0 where that is unknown."""
        text = label.encode(errors="replace")[:32]
        _PROGRESS.pack_into(self._memory, self._base + _PROGRESS_AT, done, total, text)

    def posted_by(self, rank: int) -> int:
        """Number of communications that `rank` has entered."""
        return _COUNT.unpack_from(self._memory, rank * RECORD_BYTES + _POSTED_AT)[0]

    def waiting_of(self, rank: int) -> Posted | None:
        """The operation that the main thread of `rank` is blocked on; quicker to read than all of a snapshot."""
        at = rank * RECORD_BYTES
        slot = _WAITING.unpack_from(self._memory, at + _WAITING_AT)[0]
        if self.state_of(rank) is not State.RUNNING or not 0 <= slot < RING:
            return None
        found = _read_slot(self._memory, at + _RING_AT + slot * SLOT_BYTES)
        return found if found.members else None

    def has_entered(self, rank: int, operation: Posted) -> bool:
        """Whether `rank` has entered `operation` of another rank, or a later one of the same group or edge."""
        slot = (operation.key + operation.sequence) % RING
        found = _read_slot(self._memory, rank * RECORD_BYTES + _RING_AT + slot * SLOT_BYTES)
        if found.key == operation.key or not found.members:
            return bool(found.members) and found.sequence >= operation.sequence
        return any(k == operation.key and n >= operation.sequence for k, n in self.snapshot(rank).ring)

    def state_of(self, rank: int) -> State:
        """How far `rank` has come."""
        return State(self._memory[rank * RECORD_BYTES])

    def snapshot(self, rank: int) -> Snapshot:
        """All that `rank` has noted."""
        base = rank * RECORD_BYTES
        state, is_crowded, in_backward, waiting, posted, finished = _HEADER.unpack_from(self._memory, base)
        ring = [_read_slot(self._memory, base + _RING_AT + i * SLOT_BYTES) for i in range(RING)]
        at_wait = ring[waiting] if state != State.STARTING and 0 <= waiting < RING else None
        found = sorted((p for p in ring if p.members), key=lambda p: p.sequence)
        return Snapshot(
            rank=rank,
            state=State(state),
            waiting=at_wait if at_wait and at_wait.members else None,
            posted=posted,
            finished=finished,
            ring={(p.key, p.sequence): p for p in found},
            is_crowded=bool(is_crowded),
            in_backward=bool(in_backward),
        )

    def wait_of(self, rank: int) -> tuple[int, int] | None:
        """What the main thread of `rank` waits for, as a pair that is another for each wait; None while it goes on."""
        waiting, posted, _ = _WAIT.unpack_from(self._memory, rank * RECORD_BYTES + _WAITING_AT)
        return None if waiting == NOT_WAITING else (waiting, posted)

    def progress_of(self, rank: int) -> tuple[int, int, str]:
        """Steps done, steps in all (0: unknown) and label that `rank` reports."""
        done, total, label = _PROGRESS.unpack_from(self._memory, rank * RECORD_BYTES + _PROGRESS_AT)
        return done, total, label.rstrip(b"\0").decode(errors="ignore")  # its last letter may be cut in the middle

    def snapshots(self) -> list[Snapshot]:
        return [self.snapshot(rank) for rank in range(self._world_size)]

    def fingerprint(self) -> bytes:
        """Changes whenever any rank enters, leaves or waits for a communication; cheap to poll."""
        return b"".join(
            self._memory[rank * RECORD_BYTES : rank * RECORD_BYTES + _HEADER.size] for rank in range(self._world_size)
        )


@functools.lru_cache(maxsize=1024)
def _body(
    kind: SpanKind, dtype: str, shape: tuple[int, ...], numel: int, peer: int, detail: str, members: int
) -> bytes:
    """The part of a slot that is the same on all ranks of a collective unless something differs: quick to compare."""
    dims = shape[:4]
    text = f"{dtype}|{detail}".encode()[:32]
    padded = (*dims, *[0] * (4 - len(dims)))
    return _BODY.pack(kind.code, len(dims), len(text), peer, members, numel, *padded, text)


@functools.lru_cache(maxsize=1024)
def _members(bits: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(MAX_RANKS) if bits >> rank & 1)


def _read_slot(memory: mmap.mmap, offset: int) -> Posted:
    key, sequence, kind, ndim, length, peer, bits, numel, *dims, text, finished = _SLOT.unpack_from(memory, offset)
    dtype, _, detail = text[:length].decode(errors="replace").partition("|")
    shape = tuple(dims[:ndim])
    return Posted(key, sequence, KINDS[kind], bool(finished), _members(bits), numel, peer, shape, dtype, detail)


Entered = Operation | Posted
_VERBS = {SpanKind.SEND: "sends", SpanKind.RECEIVE: "receives"}


class _Rule(NamedTuple):
    """Something that has to agree between ranks, what a rank does about it in words, and the remedy."""

    differs: Callable[[Entered, Entered], bool]
    words: Callable[[Entered], str]
    remedy: str


def _tensors_differ(mine: Entered, other: Entered) -> bool:
    sizes_differ = ANY_NUMEL not in (mine.numel, other.numel) and mine.numel != other.numel
    if mine.kind is SpanKind.ALL_TO_ALL and not (mine.dtype and other.dtype):
        return False  # ranks with equal splits note a tensor, those with others none, and both may take part
    return mine.dtype != other.dtype or sizes_differ


_SAME_TENSOR = _Rule(
    _tensors_differ,
    lambda o: f"{_VERBS.get(o.kind, 'passes')} {o.dtype} {list(o.shape)}" if o.dtype else "passes no tensor",
    "the dtype and the number of elements have to be the same on each rank",
)
_COLLECTIVE_RULES = (
    _Rule(
        lambda mine, other: mine.kind is not other.kind,
        lambda o: f"calls {o.kind.value}",
        "all ranks of a group have to call the same collectives in the same order",
    ),
    _Rule(
        lambda mine, other: mine.peer != other.peer,
        lambda o: f"calls {o.kind.value} with root {o.peer}",
        "name the same root on each rank",
    ),
    _Rule(
        lambda mine, other: mine.detail != other.detail,
        lambda o: f"calls {o.kind.value} with {o.detail}",
        "pass the same reduction on each rank",
    ),
    _SAME_TENSOR,
)


def mismatch(mine: Entered, my_rank: int, other: Entered, other_rank: int) -> str | None:
    """What differs between two ranks in the same operation, as a sentence; None where they agree."""
    rules: tuple[_Rule, ...]
    if mine.kind not in _VERBS:
        rules, where = _COLLECTIVE_RULES, f"in operation {mine.sequence + 1} of group {tuple(sorted(mine.members))}"
    elif mine.kind is other.kind:
        return None
    else:
        rules, where = (_SAME_TENSOR,), f"in message {mine.sequence + 1} between the two"
    for rule in rules:
        if rule.differs(mine, other):
            does, other_does = rule.words(mine), rule.words(other)
            return f"{where}, rank {my_rank} {does} but rank {other_rank} {other_does}; {rule.remedy}"
    return None
