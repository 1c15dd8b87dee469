"""The life of one rank: get ready, call the user's function, hand back what came of it, wait to be let go."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import enum
import faulthandler
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import connection, current_process, parent_process
from typing import Any, NoReturn

from vizkit.runtime import current, namespaces, transport
from vizkit.runtime.board import Board, State
from vizkit.runtime.device import DEVICE_ENV
from vizkit.runtime.live_record import LiveRecord
from vizkit.runtime.output import TaggedStream

ORPHANED = 9
PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGUSR1
ASKED_TO_STOP = "stopped by SIGTERM"


class Message(enum.IntEnum):
    """What a file on the channel between the notebook and a rank holds."""

    SETUP = 1
    CALL = 2
    BOARD = 3
    STACKS = 4
    STDOUT = 5
    STDERR = 6
    RESULT = 7
    FAILURE = 8
    STOPPED = 9


@dataclass(frozen=True)
class Setup:
    """All that a rank needs to know before it calls the user's function."""

    rank: int
    world_size: int
    backend: str
    device: str
    store_path: str
    timeout_s: float
    seed: int | None
    num_threads: int
    sample_memory: bool
    environment: dict[str, str] = field(repr=False)
    live: bool = False
    namespaces: tuple[str, ...] = ()  # where the rank is to live, as paths in /proc


@dataclass(frozen=True)
class Raised:
    """One exception of a chain, as plain data: the notebook has the cell's source lines, the rank has not."""

    type_name: str
    text: str
    frames: tuple[tuple[str, int, str], ...]
    notes: tuple[str, ...] = ()
    introduction: str = ""


@dataclass(frozen=True)
class Failure:
    """Why a rank has no result; the cause that came first stands first in `chain`."""

    rank: int
    time_ns: int
    chain: tuple[Raised, ...]

    @property
    def last(self) -> Raised:
        return self.chain[-1]


def main(channel: socket.socket) -> None:
    """Be a rank; never returns."""
    os.setpgid(0, 0)  # whatever this rank starts ends with its group
    _die_with_parent()
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # so that it may have data loader workers
    files = dict(_receive(channel) for _ in range(6))
    setup: Setup = transport.unpack(files[Message.SETUP])
    board = Board(files[Message.BOARD], setup.world_size, setup.rank)
    streams = _redirect(files[Message.STDOUT], files[Message.STDERR], board)
    signal.signal(signal.SIGTERM, _leave)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    faulthandler.register(STACK_SIGNAL, file=files[Message.STACKS], all_threads=True)
    live = LiveRecord(files[Message.BOARD], setup.world_size, setup.rank) if setup.live else None
    code = 1
    try:
        tag, answer = _live(setup, board, live, files[Message.CALL])
        board.enter_state(State.FAILED if tag is Message.FAILURE else State.RETURNED)
        with contextlib.suppress(OSError):  # the program may have closed them
            for stream in streams:
                stream.finish()
        transport.send_file(channel, tag, answer)
        code = int(tag is Message.FAILURE)
        channel.recv(1)  # peers may still need this rank's connections: stay until the notebook lets go
    finally:
        os._exit(code)  # destructors of process groups are slow and wait for each other


def _receive(channel: socket.socket) -> tuple[Message, int]:
    message = transport.receive_file(channel)
    if message is None:
        os._exit(ORPHANED)
    tag, descriptor = message
    return Message(tag), descriptor


def _redirect(stdout: int, stderr: int, board: Board) -> tuple[TaggedStream, TaggedStream]:
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    streams = TaggedStream(1, lambda: board.posted), TaggedStream(2, lambda: board.posted)
    sys.stdout, sys.stderr = streams
    return streams


def _die_with_parent() -> None:
    """Where the system can, have it end this process with the one that bore it, whatever this one is busy with."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)  # this rank, and whatever it has started


def _leave(signum: int, frame: object) -> None:
    raise SystemExit(ASKED_TO_STOP)


def _live(setup: Setup, board: Board, live: LiveRecord | None, call: int) -> tuple[Message, int]:
    recorder = None
    try:
        namespaces.join(setup.namespaces)  # before there are threads
        threading.Thread(target=_end_with_parent, name="vizkit-watch", daemon=True).start()
        os.environ.clear()
        os.environ.update(setup.environment | {DEVICE_ENV: setup.device})
        recorder = _join(setup, board, live)
        function, arguments, keywords = transport.unpack(call)
        board.enter_state(State.RUNNING)
        recorder.start()
        rank = os.getpid()
        try:
            result = function(*arguments, **keywords)
        finally:
            if os.getpid() != rank:
                _end_fork()
            recorder.stop()
            _keep_standard_files_open()
        return Message.RESULT, transport.pack_result(setup.rank, result, recorder.harvest())
    except BaseException as error:
        if live is not None and live.is_stop_wanted and recorder is not None and recorder.stopped is not None:
            why = describe_failure(setup.rank, error)
            return Message.STOPPED, transport.pack_result(setup.rank, why, recorder.harvest())
        return Message.FAILURE, transport.pack(describe_failure(setup.rank, error), f"failure-{setup.rank}")


def _end_fork() -> NoReturn:
    """A process that the function has forked, and that comes back from it, is no rank and ends as any other does."""
    error = sys.exc_info()[1]
    is_failure = error is not None and not isinstance(error, SystemExit)
    if is_failure:
        traceback.print_exception(error)
    os._exit(int(is_failure))


def _keep_standard_files_open() -> None:
    """An answer with the number of an output that the function has closed would get what is left to print."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _join(setup: Setup, board: Board, live: LiveRecord | None) -> Any:
    import torch
    import torch.distributed as dist

    from vizkit.runtime.recorder import Recorder

    torch.set_num_threads(setup.num_threads)
    if setup.seed is not None:
        _seed(setup.seed)
    device = torch.device(setup.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.set_debug_level_from_env()  # torch read it when the forkserver imported it, before this environment
    recorder = Recorder(
        rank=setup.rank,
        board=board,
        backend=setup.backend,
        timeout_s=setup.timeout_s,
        sample_memory=setup.sample_memory,
        live=live,
    )
    recorder.install()
    current.become(board, live)
    dist.init_process_group(
        setup.backend,
        store=dist.FileStore(setup.store_path, setup.world_size),
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=datetime.timedelta(seconds=setup.timeout_s),
        device_id=device if setup.backend == "nccl" else None,
    )
    return recorder


def _seed(seed: int) -> None:
    """The same seed on each rank, so that models start equal; data that should differ needs the rank added."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def describe_failure(rank: int, error: BaseException) -> Failure:
    """The exception with its causes as data that always travels."""
    chain: list[Raised] = []
    seen: set[int] = set()
    current_error: BaseException | None = error
    while current_error is not None and id(current_error) not in seen:
        seen.add(id(current_error))
        cause, context = current_error.__cause__, current_error.__context__
        follow = cause or (None if current_error.__suppress_context__ else context)
        introduction = "" if follow is None else _CAUSE if cause else _CONTEXT
        frames = tuple((f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(current_error.__traceback__))
        chain.append(
            Raised(
                type_name=_type_name(type(current_error)),
                text=_text(current_error) + _members_text(current_error),
                frames=tuple(frame for frame in frames if frame[0] != __file__),
                notes=tuple(map(str, getattr(current_error, "__notes__", ()))),
                introduction=introduction,
            )
        )
        current_error = follow
    return Failure(rank, time.monotonic_ns(), tuple(reversed(chain)))


_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"


def _type_name(kind: type) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _members_text(error: BaseException) -> str:
    """The exceptions of a group, one a line."""
    if not isinstance(error, BaseExceptionGroup):
        return ""
    lines = [f"{_type_name(type(member))}: {_text(member)}{_members_text(member)}" for member in error.exceptions]
    return "".join("\n  " + line.replace("\n", "\n  ") for line in lines)


def _text(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        return str(error)
    return "(its message cannot be shown: str() of it raised)"
