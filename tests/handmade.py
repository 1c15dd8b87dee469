"""Records written by hand: what a rank did, as a list of steps in nanoseconds of its own work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vizkit.lanes import Label
from vizkit.record import Call, Event, RankRecord, Record, SpanClosed, SpanOpened, Wait
from vizkit.schedules import Schedule
from vizkit.schedules.dependencies import Dependencies
from vizkit.trace import SpanKind

Step = tuple[Any, ...]


def record(*programs: Sequence[Step], **notes: str) -> Record:
    """One rank for each program. A program's steps, in order:

    ("work", ns), ("open", kind, fields of a `Label`), ("close",),
    ("post", name, kind, fields of a `Call`), ("wait", *names), ("wait_implicit", *names)
    """
    return Record(tuple(rank_record(rank, program, len(programs)) for rank, program in enumerate(programs)), notes)


def rank_record(rank: int, program: Sequence[Step], world_size: int) -> RankRecord:
    """Each event takes 7 ns of CPU time and 10 ns of wall time of its own, which no replay may count as work."""
    events: list[Event] = []
    calls: dict[str, int] = {}
    work, wall = 0, 1_000
    for verb, *rest in program:
        if verb == "work":
            work += rest[0]
            wall += rest[0]
            continue
        stamps = {"before_ns": work, "after_ns": work + 7, "start_wall_ns": wall, "end_wall_ns": wall + 10}
        work, wall = work + 7, wall + 10
        if verb == "open":
            kind, fields = rest[0], rest[1] if len(rest) > 1 else {}
            events.append(SpanOpened(label=Label(SpanKind.parse(kind), **fields), **stamps))
        elif verb == "close":
            events.append(SpanClosed(**stamps))
        elif verb == "post":
            name, kind, fields = rest[0], rest[1], rest[2] if len(rest) > 2 else {}
            calls[name] = len(calls)
            fields = {"group": "0", "members": tuple(range(world_size)), "payload_bytes": 8, **fields}
            events.append(Call(call=calls[name], kind=SpanKind.parse(kind), **fields, **stamps))
        else:
            awaited = tuple(calls[name] for name in rest)
            events.append(Wait(calls=awaited, implicit=verb == "wait_implicit", **stamps))
    return RankRecord(rank=rank, events=tuple(events), start_ns=0, end_ns=work, start_wall_ns=1_000, end_wall_ns=wall)


def gpipe(num_ranks: int, num_microbatches: int) -> Record:
    """All forwards, then all backwards, one stage a rank; each receives, waits, computes and sends."""
    programs = []
    for rank in range(num_ranks):
        steps: list[Step] = []
        for kind, source, destination in (("F", rank - 1, rank + 1), ("B", rank + 1, rank - 1)):
            for microbatch in range(num_microbatches):
                steps.append(("open", kind, {"stage": rank, "microbatch": microbatch}))
                if 0 <= source < num_ranks:
                    name = f"{kind} from {source} {microbatch}"
                    steps += [("post", name, "receive", {"peer": source}), ("wait", name)]
                steps.append(("work", 500 + 13 * rank + microbatch))
                if 0 <= destination < num_ranks:
                    steps.append(("post", f"{kind} to {destination} {microbatch}", "send", {"peer": destination}))
                steps.append(("close",))
        programs.append(steps)
    return record(*programs)


def pipeline(schedule: Schedule, payload_bytes: int = 0) -> Record:
    """What ranks do that execute this schedule: a span for each action, receives waited for before, sends after it."""
    needs = Dependencies.of(schedule)
    makers = {int(maker): taker for taker, maker in enumerate(needs.input.tolist()) if maker >= 0}
    actions, owner = list(schedule), schedule.rank.tolist()
    programs: list[list[Step]] = [[] for _ in range(schedule.num_ranks)]
    position = 0
    for rank, row in enumerate(schedule.rows):
        for cell in row:
            mine = range(position, position + len(cell))
            for action in mine:
                maker = int(needs.input[action])
                if maker >= 0 and owner[maker] != rank:
                    message = {"peer": owner[maker], "tag": maker, "payload_bytes": payload_bytes}
                    programs[rank] += [("post", f"receive {maker}", "receive", message), ("wait", f"receive {maker}")]
                label = {"stage": actions[action].stage, "microbatch": actions[action].microbatch}
                programs[rank] += [("open", actions[action].kind, label), ("close",)]
            for action in mine:
                taker = makers.get(action)
                if taker is not None and owner[taker] != rank:
                    message = {"peer": owner[taker], "tag": action, "payload_bytes": payload_bytes}
                    programs[rank].append(("post", f"send {action}", "send", message))
            position += len(cell)
    return record(*programs)
