"""Why a launch cannot go on: which ranks are stuck, on what, and which one is at fault."""

from __future__ import annotations

import itertools
import linecache
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vizkit.errors import RankReport
from vizkit.runtime.board import Posted, Snapshot, State, mismatch
from vizkit.runtime.worker import ASKED_TO_STOP, Failure, Raised
from vizkit.trace import SpanKind

RUNTIME_FOLDER = str(Path(__file__).parent)
_COMMUNICATING = re.compile(r"[/\\]torch[/\\](distributed|autograd|nn[/\\]parallel|_ops\.py)")
_BACKENDS = re.compile(r"gloo|NCCL|c10d")
STATE_WORDS = {
    State.STARTING: "starting",
    State.RUNNING: "running",
    State.RETURNED: "returned",
    State.FAILED: "failed",
}
SHORT = 120
_OMISSIONS = {SpanKind.SEND: "received", SpanKind.RECEIVE: "sent"}
CONSEQUENCES = re.compile(
    r"closed by peer|Connection reset|Broken pipe|Socket Timeout|Timed out|timed out|wait timeout|Connect timeout|"
    r"stopped by the notebook|stopped by SIGTERM|remote process exited|NCCL communicator was aborted|"
    r"unhandled system error"
)
TIMEOUTS = re.compile(r"Timed out|timed out|wait timeout|Socket Timeout|Connect timeout")


@dataclass(frozen=True)
class Blocked:
    """A rank that waits in `operation` for `missing` ranks, none of which will ever come.

    `is_certain`: it cannot go on in any other way, neither by itself nor by another of its threads.
    """

    rank: int
    operation: Posted
    missing: tuple[int, ...]
    is_certain: bool = True


def operation_text(operation: Posted) -> str:
    """An operation as messages call it, with its number, group or peer, and tensor."""
    number = operation.sequence + 1
    toward = {SpanKind.SEND: f"to rank {operation.peer}", SpanKind.RECEIVE: f"from rank {operation.peer}"}
    where = toward.get(operation.kind, f"of group {operation.members}")
    if operation.is_from_anybody:
        where = "from any rank"
    tensor = f", {operation.tensor}" if operation.dtype else ""
    return f"{operation.kind.value} {number} {where}{tensor}"


def missing_ranks(rank: int, operation: Posted, snapshots: Sequence[Snapshot]) -> tuple[int, ...]:
    """Ranks that the operation needs and that have not entered it; for a receive from anybody, all others."""
    if operation.is_from_anybody:
        return tuple(snapshot.rank for snapshot in snapshots if snapshot.rank != rank)
    return tuple(
        member for member in operation.members if member != rank and not _has_entered(snapshots[member], operation)
    )


def _has_entered(snapshot: Snapshot, operation: Posted) -> bool:
    return any(key == operation.key and sequence >= operation.sequence for key, sequence in snapshot.ring)


def awaited(snapshot: Snapshot, idle: bool) -> Posted | None:
    """What a rank's main thread is blocked on, as far as one can tell.

    DDP waits inside C++, where nothing notes it: a rank that uses no processor and has an unfinished communication is
    taken to wait for the oldest one, though outside a backward it may as well sleep or read a file.
    """
    if snapshot.state is not State.RUNNING or snapshot.waiting or not idle:
        return snapshot.waiting if snapshot.state is State.RUNNING else None
    return next((posted for posted in snapshot.ring.values() if not posted.finished), None)


def _is_certain(snapshot: Snapshot) -> bool:
    return not snapshot.is_crowded if snapshot.waiting else snapshot.in_backward


def doomed(
    snapshots: Sequence[Snapshot], idle: Iterable[int], gone: Iterable[int], is_over: bool = False
) -> list[Blocked]:
    """The ranks that can never go on: each waits for a rank that is gone or doomed itself.

    `idle` are ranks that used no processor lately, `gone` those that have returned, failed or died. Whoever may yet do
    something other than wait counts as doomed only where it waits for a rank that is gone; where the run `is_over`,
    nobody may do anything any more.
    """
    idle, gone = set(idle), set(gone)
    blocked: dict[int, Blocked] = {}
    for snapshot in snapshots:
        rank = snapshot.rank
        operation = None if rank in gone else awaited(snapshot, rank in idle)
        if operation and (missing := missing_ranks(rank, operation, snapshots)):
            blocked[rank] = Blocked(rank, operation, missing, is_over or _is_certain(snapshot))
    while True:
        lost = gone | blocked.keys()
        free = [r for r, state in blocked.items() if not _hopeless(state, lost if state.is_certain else gone)]
        if not free:
            return list(blocked.values())
        for rank in free:
            del blocked[rank]


def _hopeless(blocked: Blocked, lost: set[int]) -> bool:
    needed = all if blocked.operation.is_from_anybody else any
    return needed(member in lost for member in blocked.missing)


def at_fault(stuck: Sequence[Blocked]) -> int:
    """The rank that most of the stuck ranks wait for, the lowest of several; one that waits for none leads."""
    waiting = {blocked.rank for blocked in stuck}
    counts = Counter(member for blocked in stuck for member in blocked.missing)
    return min(counts, key=lambda rank: (rank in waiting, -counts[rank], rank))


def cycle(stuck: Sequence[Blocked]) -> list[Blocked]:
    """Stuck ranks that wait for each other in a circle; empty where they all wait for ranks that are gone."""
    by_rank = {blocked.rank: blocked for blocked in stuck}
    for start in by_rank:
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in path:
            path.append(rank)
            rank = next((member for member in by_rank[rank].missing if member in by_rank), None)
        if rank is not None:
            return [by_rank[member] for member in path[path.index(rank) :]]
    return []


def revived(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """The ranks as they stood before a timeout ended their waits: each in the last operation that it did not finish."""
    return [replace(s, state=State.RUNNING, waiting=None) if s.state is State.FAILED else s for s in snapshots]


def slowest_rank(snapshots: Sequence[Snapshot]) -> int:
    """The rank that has entered the fewest communications."""
    return min(snapshots, key=lambda snapshot: snapshot.posted).rank


def timeout_text(snapshots: Sequence[Snapshot]) -> str:
    """Which rank the others were waiting for when their patience ended."""
    slow = snapshots[slowest_rank(snapshots)]
    rest = [snapshot.rank for snapshot in snapshots if snapshot.posted > slow.posted]
    counts = f"rank {slow.rank} has entered {slow.posted} communication{'s' * (slow.posted != 1)}"
    return f"{counts}, {ranks_text(rest)} more" if rest else counts


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> ranks_text([0]), ranks_text([0, 1, 3])
    ('rank 0', 'ranks 0, 1, 3')
    """
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def finished_text(snapshot: Snapshot) -> str:
    """How many communications a rank has finished, by name where they are all of one kind."""
    kinds = {posted.kind for posted in snapshot.ring.values()}
    noun = next(iter(kinds)).value if len(kinds) == 1 else "communication"
    return f"{snapshot.finished} {noun}{'' if snapshot.finished == 1 else 's'}"


def stuck_text(stuck: Sequence[Blocked], snapshots: Sequence[Snapshot], fates: Mapping[int, str]) -> str:
    """What the ranks wait for, one sentence for each group of ranks in the same operation."""
    groups: dict[tuple[SpanKind, int, int, int], list[Blocked]] = {}
    for blocked in stuck:
        operation = blocked.operation
        edge = blocked.rank if operation.is_message else -1
        groups.setdefault((operation.kind, operation.key, operation.sequence, edge), []).append(blocked)
    waits = []
    for members in groups.values():
        names = [blocked.rank for blocked in members]
        missing = sorted({rank for blocked in members for rank in blocked.missing})
        verb = "waits" if len(names) == 1 else "wait"
        operation = members[0].operation
        omission = _OMISSIONS.get(operation.kind, "entered")
        waits.append(
            f"{ranks_text(names)} {verb} in {operation_text(operation)}, which {ranks_text(missing)} never {omission}"
        )
    circle = cycle(stuck)
    left = sorted({rank for blocked in stuck for rank in blocked.missing} & fates.keys())
    heads = [f"rank {rank} {fates[rank]} after {finished_text(snapshots[rank])}" for rank in left]
    if circle:
        order = " -> ".join(str(blocked.rank) for blocked in (*circle, circle[0]))
        heads.append(f"ranks wait for each other in a circle ({order})")
    return "; ".join([*heads, *waits])


def misfit(rank: int, snapshots: Sequence[Snapshot]) -> tuple[int, str] | None:
    """Of the operation that `rank` entered last: the rank that does not fit the others, and how, as a sentence.

    The same in every run, whichever rank noticed first: where one rank differs from all others, it is that one.
    """
    mine = snapshots[rank].last
    if mine is None:
        return None
    entered = {
        member: posted
        for member in sorted(mine.members)
        if (posted := snapshots[member].ring.get((mine.key, mine.sequence))) is not None
    }
    conflicts = {
        (a, b): text
        for a, b in itertools.combinations(entered, 2)
        if (text := mismatch(entered[a], a, entered[b], b)) is not None
    }
    if not conflicts:
        return None
    counts = Counter(member for pair in conflicts for member in pair)
    odd = [member for member, count in counts.items() if count == len(entered) - 1 and len(entered) > 2]
    (first, second), text = next(iter(conflicts.items()))
    if len(odd) == 1:
        return odd[0], f"rank {odd[0]} does not fit the others: {text}"
    return second, f"ranks {first} and {second} do not fit together: {text}"


def is_consequence(failure: Failure) -> bool:
    """Whether a failure, or one that led to it, only says that some other rank has gone."""
    return any(_speaks_of_others(raised) and CONSEQUENCES.search(raised.text) for raised in failure.chain)


def is_timeout(failure: Failure) -> bool:
    return any(_speaks_of_others(raised) and TIMEOUTS.search(raised.text) for raised in failure.chain)


def _speaks_of_others(raised: Raised) -> bool:
    """Whether torch's communication raised it: what the user's own files and sockets say is the rank's own fault."""
    if raised.type_name in ("SystemExit", "ValueError"):
        return raised.type_name == "SystemExit"
    place = raised.frames[-1][0] if raised.frames else ""
    return place.startswith(RUNTIME_FOLDER) or bool(_COMMUNICATING.search(place) or _BACKENDS.search(raised.text))


def failure_text(failure: Failure) -> str:
    """Why a rank has no result, and what to do where the exception does not say it."""
    rank, last = failure.rank, failure.last
    if last.text == ASKED_TO_STOP and last.type_name == SystemExit.__name__:
        return (
            f"rank {rank} got SIGTERM, though nobody stopped this launch, and has no result; look for what ends "
            "processes on this machine: a job's time limit, a guard of its memory, the function itself"
        )
    if last.type_name == SystemExit.__name__:
        return f"rank {rank} called sys.exit({last.text}) and has no result; return from the function instead"
    return f"rank {rank} raised {exception_line(last)}"


def own_failures_text(failures: Iterable[Failure]) -> str:
    """What went wrong in ranks while they were being stopped, other than that they were."""
    return "".join(
        f"; meanwhile rank {failure.rank} raised {short(exception_line(failure.last))}"
        for failure in sorted(failures, key=lambda failure: failure.rank)
        if not (_speaks_of_others(failure.last) and CONSEQUENCES.search(failure.last.text))
        and failure.last.type_name != SystemExit.__name__
    )


def stop_text(killed: Sequence[int]) -> str:
    """How the ranks ended that somebody stopped.

    >>> stop_text([]), stop_text([1])
    ('the ranks were stopped', 'rank 1 did not stop when asked and was killed')
    """
    if not killed:
        return "the ranks were stopped"
    return f"{ranks_text(killed)} did not stop when asked and {'were' if len(killed) > 1 else 'was'} killed"


def traceback_text(failure: Failure) -> str:
    """The traceback as Python prints it, with the source lines of notebook cells and without the kit's own frames."""
    parts = []
    for raised in failure.chain:
        if raised.introduction:
            parts.append(f"\n{raised.introduction}\n")
        parts.append(f"Traceback of rank {failure.rank} (most recent call last):")
        own = [frame for frame in raised.frames if not frame[0].startswith(RUNTIME_FOLDER)]
        parts.extend(_frame_text(*frame) for frame in own or raised.frames)
        parts.append(exception_line(raised))
    return "\n".join(parts)


def short(text: str) -> str:
    """The first line of a text, cut where it is long."""
    return textwrap.shorten(text.splitlines()[0], SHORT, placeholder=" …")


def exception_line(raised: Raised) -> str:
    notes = "".join(f"\n{note}" for note in raised.notes)
    return (f"{raised.type_name}: {raised.text}" if raised.text else raised.type_name) + notes


def _frame_text(filename: str, number: int, name: str) -> str:
    source = linecache.getline(filename, number).strip()
    return f'  File "{filename}", line {number}, in {name}' + (f"\n    {source}" if source else "")


_STACK_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')


def user_line(stack: str) -> str:
    """The innermost line of the user's own code in a dump by faulthandler; "" where there is none."""
    for block in reversed(re.split(r"\n(?=Thread 0x|Current thread 0x)", stack)):
        frames = [match.groups() for line in block.splitlines() if (match := _STACK_FRAME.match(line))]
        if any(filename.endswith("worker.py") and name == "_live" for filename, _, name in frames):
            for filename, number, name in frames:
                if not _is_library(filename):
                    source = linecache.getline(filename, int(number)).strip()
                    return f"line {number} in {name}" + (f": {source}" if source else "")
    return ""


def _is_library(filename: str) -> bool:
    return filename.startswith((RUNTIME_FOLDER, "<frozen")) or "site-packages" in filename or "/lib/python" in filename


def reports(
    snapshots: Sequence[Snapshot], fates: Mapping[int, str], stuck: Sequence[Blocked], stacks: Mapping[int, str]
) -> list[RankReport]:
    """One report a rank: its state, and the operation that it is in or was in last."""
    waits = {blocked.rank: blocked for blocked in stuck}
    found = []
    for snapshot in snapshots:
        rank = snapshot.rank
        operation = waits[rank].operation if rank in waits else snapshot.waiting
        state = fates.get(rank) or ("waiting" if operation else STATE_WORDS[snapshot.state])
        if state == "waiting" and operation:
            last = f"in {operation_text(operation)}"
        elif snapshot.last:
            last = f"last operation {operation_text(snapshot.last)}"
        else:
            last = "no communication yet"
        line = user_line(stacks.get(rank, ""))
        found.append(
            RankReport(rank, state, last + (f", at {line}" if line else ""), snapshot.finished, stacks.get(rank, ""))
        )
    return found
