"""One rank of a run that torchrun started: the same recorder as `launch` has, and a file in the place of a notebook."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vizkit.errors import InvalidInputError
from vizkit.formats.rank_file import Header, Outcome
from vizkit.runtime.device import DEVICE_ENV, count_gpus, place
from vizkit.runtime.launcher import MAX_TIMEOUT_S
from vizkit.runtime.limits import available_cores

ATTEMPT_ENV = "VIZKIT_ATTEMPT"
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEFAULTS = {
    "TORCH_GLOO_LAZY_INIT": "1",
    "TORCH_DISTRIBUTED_DEBUG": "INFO",  # DDP then names parameters that got no gradient
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_NCCL_ENABLE_TIMING": "1",
}
FAREWELL_S = 60


@dataclass(frozen=True)
class Place:
    """Which rank this process is, as the environment says."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class Settings:
    """How to run; `trace` is the folder for the file of each rank, None for none."""

    trace: Path | None = None
    device: str = "auto"
    timeout_s: float = 600
    seed: int | None = 0
    sample_memory: bool = False
    target: str = ""


def place_here(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The rank that this process is, or None outside torchrun (and whatever else sets the variables of `env://`).

    Raises `InvalidInputError` where only some of them are set, or one holds no number that it can be.

    >>> place_here({})
    >>> place_here({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).local_rank
    3
    """
    given = [name for name in REQUIRED if environment.get(name)]
    if not {"RANK", "WORLD_SIZE"} & set(given):
        return None
    missing = [name for name in REQUIRED if name not in given]
    if missing:
        raise InvalidInputError.because(
            "environment",
            ", ".join(given),
            f"{', '.join(missing)} is missing, which torchrun sets too",
            f"start with torchrun, or unset {', '.join(given)} to run on this machine alone",
        )
    _number(environment, "MASTER_PORT", 0, below=2**16)
    world_size = _number(environment, "WORLD_SIZE", 1)
    rank = _number(environment, "RANK", 0, below=world_size)
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", 1, default=world_size)
    local_rank = _number(environment, "LOCAL_RANK", 0, below=local_world_size, default=rank % local_world_size)
    return Place(rank, world_size, local_rank, local_world_size)


def _number(
    environment: Mapping[str, str], name: str, lowest: int, below: int | None = None, default: int | None = None
) -> int:
    text = environment.get(name, "" if default is None else str(default))
    try:
        number = int(text)
    except ValueError:
        number = lowest - 1
    if number < lowest or (below is not None and number >= below):
        span = f"from {lowest} on" if below is None else f"from {lowest} to {below - 1}"
        raise InvalidInputError.because(
            name, text, f"is no whole number {span}", "start with torchrun, which sets it, or mend what sets it"
        )
    return number


def prepare() -> None:
    """Sets what torch reads when it is imported; call it before the user's module."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def run_rank(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any], here: Place, settings: Settings
) -> Any:
    """Call the function as rank `here` of a run, with a process group ready, and leave its record in the folder.

    Blocks until the other ranks have been found, and at the end until all have returned. Where the function raises,
    prints the traceback, tells torchrun, and exits with status 1. Raises `InvalidInputError` where the ranks do not
    agree on a backend or the folder holds another run.
    """
    import torch
    import torch.distributed as dist

    from vizkit.runtime.attempts import meet
    from vizkit.runtime.recorder import Recorder
    from vizkit.runtime.worker import _seed

    with contextlib.suppress(
        Exception
    ):  # DDP and optimizers import it late, and it would count as the program's compute
        importlib.import_module("torch._dynamo")
    num_gpus = count_gpus() if settings.device != "cpu" else 0
    placement = place(settings.device, here.local_world_size, num_gpus)
    device = placement.of_rank(here.local_rank, num_gpus)
    os.environ[DEVICE_ENV] = device
    if settings.seed is not None:
        _seed(settings.seed)
    if device != "cpu":
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=min(settings.timeout_s, MAX_TIMEOUT_S))
    shared, _, _ = next(iter(dist.rendezvous("env://", timeout=timeout)))
    store = dist.PrefixStore(f"vizkit/{meet(shared, here.rank, here.world_size, settings.timeout_s)}", shared)
    header = _agree(store, here, settings, placement.backend, device)
    os.environ[ATTEMPT_ENV] = str(header.attempt)
    recorder = Recorder(
        rank=here.rank,
        backend=placement.backend,
        timeout_s=settings.timeout_s,
        sample_memory=settings.sample_memory,
    )
    recorder.install()
    dist.set_debug_level_from_env()
    dist.init_process_group(
        placement.backend,
        store=dist.PrefixStore("default", store),
        rank=here.rank,
        world_size=here.world_size,
        timeout=timeout,
        device_id=torch.device(device) if placement.backend == "nccl" else None,
    )
    with _rank_in_front(here.rank):
        result = _recorded(recorder, header, settings.trace, lambda: function(*arguments, **keywords))
    _farewell(store, here, settings.timeout_s)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return result


def _agree(store: Any, here: Place, settings: Settings, backend: str, device: str) -> Header:
    import torch

    from vizkit.runtime import attempts
    from vizkit.runtime.keeper import read_clocks

    seen, problem = [], ""
    if settings.trace is not None:
        try:
            settings.trace.mkdir(parents=True, exist_ok=True)
            seen = attempts.seen_in(settings.trace) if here.local_rank == 0 else []
            problem = "" if os.access(settings.trace, os.W_OK) else "Permission denied"
        except OSError as error:
            problem = error.strerror or str(error)
    job, agent, host = attempts.job_name(), attempts.agent_name(), socket.gethostname()
    mine = attempts.Proposal(job, agent, backend, host, str(settings.trace or ""), seen, problem)
    decision = attempts.agree(store, here.rank, here.world_size, mine)
    return Header(
        run=decision.run,
        rank=here.rank,
        world_size=here.world_size,
        attempt=decision.attempt,
        host=host,
        clock=attempts.clock_name(),
        began=read_clocks(),
        job=job,
        agent=agent,
        target=settings.target,
        cores=available_cores(),
        num_threads=torch.get_num_threads(),
        notes={"backend": backend, "device": device.split(":")[0], "world_size": str(here.world_size)},
    )


def _recorded(recorder: Any, header: Header, folder: Path | None, call: Callable[[], Any]) -> Any:
    from vizkit.runtime.keeper import Keeper, Stopped, words_of

    if folder is None:
        recorder.start()
        return call()
    keeper = Keeper(recorder, folder, header)
    with keeper.watching():
        recorder.start()
        outcome, detail, result = Outcome.RETURNED, "", None
        try:
            result = call()
            return result
        except Stopped:
            outcome, detail = Outcome.STOPPED, "SIGTERM"
            raise
        except BaseException as error:
            outcome, detail = Outcome.RAISED, words_of(error)
            raise
        finally:
            recorder.stop()
            keeper.finish(outcome, recorder.harvest(), detail, result)


@contextlib.contextmanager
def _rank_in_front(rank: int) -> Iterator[None]:
    """What the function prints comes in whole lines that begin with their rank."""
    from vizkit.runtime.output import PlainStream

    sys.stdout.flush()
    sys.stderr.flush()
    before = sys.stdout, sys.stderr
    streams = PlainStream(1, rank), PlainStream(2, rank)
    sys.stdout, sys.stderr = streams
    try:
        yield
    except Exception as error:
        _tell(error)
        raise SystemExit(1) from error
    finally:
        for stream in streams:
            stream.finish()
        sys.stdout, sys.stderr = before


def _tell(error: Exception) -> None:
    """Prints the traceback from the user's function on, and writes it where torchrun's own summary looks for it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace))


def _farewell(store: Any, here: Place, timeout_s: float) -> None:
    """Peers may still need this rank's connections: stay until all have returned, or one will never."""
    key = "returned/{}"
    patience = datetime.timedelta(seconds=min(timeout_s, FAREWELL_S))
    with contextlib.suppress(Exception):  # a peer has failed; torchrun ends us all
        store.set(key.format(here.rank), "")
        store.wait([key.format(rank) for rank in range(here.world_size)], patience)
