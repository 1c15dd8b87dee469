"""Which run and which attempt this is: agreed by all ranks before any of them writes a file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from vizkit.errors import InvalidInputError, UnreadableTraceError
from vizkit.formats.rank_file import read_header
from vizkit.formats.rank_folder import rank_files

NO_JOB = ("", "none")  # torchrun's rdzv-id unless one is given
_PROPOSAL, _DECISION = "proposal/{}", "decision"
_HELLO, _ANSWER, _HEARD = "vizkit/hello/{}", "vizkit/answer/{}", "vizkit/heard/{}/{}"
POLL_S = 0.02


class Store(Protocol):
    """What is used of `torch.distributed.Store`; `get` waits until the key is there, or the store's timeout is over."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Seen(msgspec.Struct, frozen=True):
    """What a node's folder already holds of one attempt."""

    run: str
    job: str
    agent: str
    attempt: int


class Proposal(msgspec.Struct, frozen=True):
    """What one rank knows before the run."""

    job: str
    agent: str
    backend: str
    host: str
    folder: str = ""
    seen: list[Seen] = []
    problem: str = ""


class Decision(msgspec.Struct, frozen=True):
    """What all ranks go by; `refusal` (value, rule, remedy, for `InvalidInputError`) is empty where they may go on."""

    run: str
    attempt: int
    refusal: tuple[str, ...] = ()


def meet(store: Store, rank: int, world_size: int, timeout_s: float = 600) -> str:
    """A name that all ranks of this attempt have, and no other attempt.

    The store lives in torchrun and outlives a restart, with all that ranks of earlier attempts wrote to it (torch
    2.13), and agents may count restarts differently. So rank 0 answers whatever calls there are until each rank has
    heard it: to what a rank of an earlier attempt left, nobody listens. Raises `TimeoutError` with who is missing.
    """
    call = secrets.token_hex(8)
    if rank:
        store.set(_HELLO.format(rank), call)
        name = store.get(_ANSWER.format(call)).decode()
        store.set(_HEARD.format(name, rank), "")
        return name
    missing = set(range(1, world_size))
    answered: set[str] = set()
    deadline = time.monotonic() + timeout_s
    while missing:
        for other in sorted(missing):
            if store.check([_HEARD.format(call, other)]):
                missing.remove(other)
            elif store.check([_HELLO.format(other)]):
                theirs = store.get(_HELLO.format(other)).decode()
                if theirs not in answered:
                    answered.add(theirs)
                    store.set(_ANSWER.format(theirs), call)
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has waited {timeout_s:g} s for ranks {sorted(missing)}, which never came")
        time.sleep(POLL_S if missing else 0)
    return call


def agree(store: Store, rank: int, world_size: int, mine: Proposal) -> Decision:
    """The decision of rank 0, from what all ranks propose; where it is a refusal, all raise `InvalidInputError`."""
    store.set(_PROPOSAL.format(rank), msgspec.json.encode(mine).decode())
    if rank == 0:
        proposals = [
            msgspec.json.decode(store.get(_PROPOSAL.format(other)), type=Proposal) for other in range(world_size)
        ]
        store.set(_DECISION, msgspec.json.encode(decide(proposals)).decode())
    decision = msgspec.json.decode(store.get(_DECISION), type=Decision)
    if decision.refusal:
        raise InvalidInputError.because(*decision.refusal)
    return decision


def decide(proposals: list[Proposal]) -> Decision:
    """A later attempt of a run that the folders know, by its job or by the agent that started it; else a new run."""
    backends = {proposal.backend: proposal for proposal in proposals}
    if len(backends) > 1:
        told = ", ".join(f"{backend} on {proposal.host}" for backend, proposal in sorted(backends.items()))
        return Decision(
            "", 0, ("device", told, "all ranks need the same backend", "use --device cpu, or GPUs on all nodes")
        )
    if troubled := next((proposal for proposal in proposals if proposal.problem), None):
        rule = f"{troubled.problem} (on {troubled.host})"
        return Decision("", 0, ("trace", troubled.folder, rule, "name a folder that can be written on every node"))
    job = proposals[0].job
    agents = {proposal.agent for proposal in proposals}
    seen = [entry for proposal in proposals for entry in proposal.seen]
    ours = [entry for entry in seen if (job and entry.job == job) or entry.agent in agents]
    run = ours[-1].run if ours else secrets.token_hex(4)
    for proposal in proposals:
        if any(entry.run != run for entry in proposal.seen):
            return Decision(
                run,
                0,
                (
                    "trace",
                    proposal.folder,
                    f"holds files of another run (on {proposal.host})",
                    "give a new folder, or empty this one",
                ),
            )
    return Decision(run, max((entry.attempt for entry in ours), default=-1) + 1)


def seen_in(folder: Path) -> list[Seen]:
    """The attempts of which the folder holds files, each once."""
    found: dict[Seen, None] = {}
    for path in rank_files(folder):
        with contextlib.suppress(UnreadableTraceError):
            header = read_header(path)
            found[Seen(header.run, header.job, header.agent, header.attempt)] = None
    return list(found)


def job_name(environment: Any = os.environ) -> str:
    """The name that the user gave this run: torchrun's rdzv-id, or "" where there is none."""
    name = environment.get("TORCHELASTIC_RUN_ID", "")
    return "" if name in NO_JOB else name


def clock_name() -> str:
    """Names the CLOCK_MONOTONIC of this machine, from one boot to the next: processes that share it agree."""
    return _digest(_facts("/proc/sys/kernel/random/boot_id", "/proc/self/timens_offsets") or [socket.gethostname()])


def agent_name() -> str:
    """Names the process that started this one: torchrun's agent, which stays the same when it restarts its ranks."""
    parent = os.getppid()
    stat = _facts(f"/proc/{parent}/stat")
    since = stat[0].rpartition(")")[2].split()[19] if stat else ""
    return _digest([clock_name(), socket.gethostname(), str(parent), since])


def _facts(*paths: str) -> list[str]:
    facts = []
    for path in paths:
        with contextlib.suppress(OSError):
            facts.append(Path(path).read_text())
    return facts


def _digest(facts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
