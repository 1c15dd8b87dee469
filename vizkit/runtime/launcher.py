"""`launch`: run a function from a notebook cell on several real ranks."""

from __future__ import annotations

import contextlib
import inspect
import numbers
import operator
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vizkit.errors import InvalidInputError, RunStoppedError
from vizkit.record import STOPPED, Record
from vizkit.runtime import current, transport
from vizkit.runtime.board import MAX_RANKS
from vizkit.runtime.device import Placement, count_gpus, place
from vizkit.runtime.limits import available_cores, available_memory_bytes
from vizkit.runtime.live_state import LiveView
from vizkit.runtime.live_views import view_for
from vizkit.runtime.nursery import nursery
from vizkit.runtime.run import Run
from vizkit.runtime.supervisor import Supervisor
from vizkit.runtime.worker import Setup
from vizkit.units import seconds_text

RANK_BYTES = 40_000_000  # private memory of an idle rank; what it shares with the others is not counted
MAX_TIMEOUT_S = 1e6  # torch counts milliseconds, and overflows
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def launch(
    fn: Callable[..., Any],
    /,
    *args: Any,
    world_size: int = 4,
    device: str = "auto",
    timeout_s: float = 30,
    seed: int | None = 0,
    sample_memory: bool = False,
    live: bool | LiveView = False,
    **kwargs: Any,
) -> Run:
    """Call `fn(*args, **kwargs)` on `world_size` fresh processes that can talk through `torch.distributed`.

    Each rank has the default process group ready, its device in `vk.device()`, and the same `seed` for torch, numpy
    and `random` (None leaves them unseeded). `device` is "auto" (a GPU for each rank with NCCL where there are
    enough, else gloo on the CPU), "cpu" or "cuda". A communication may take `timeout_s` seconds; that ranks wait for
    each other in vain is noticed much earlier. `sample_memory` adds memory over time to the traces. What ranks print
    shows in the cell. `live=True` shows a panel while they run, with a button that stops them, and leaves a summary
    (`run.live`): progress and steps come from `vk.progress` or else from optimizers, curves from `vk.log`.

    Raises `InvalidInputError` for arguments that cannot work, `TransportError` for what cannot be pickled,
    `RankFailedError` where a rank has no result, its subclass `RanksStuckError` for a hang, and `RunStoppedError` where
    somebody stopped it.

    >>> import torch, torch.distributed as dist
    >>> def add_up():
    ...     x = torch.ones(1) * dist.get_rank()
    ...     dist.all_reduce(x)
    ...     return x.item()
    >>> launch(add_up, world_size=2).results
    [1.0, 1.0]
    """
    return launch_at(
        lambda rank: HERE,
        fn,
        args,
        kwargs,
        world_size=world_size,
        device=device,
        timeout_s=timeout_s,
        seed=seed,
        sample_memory=sample_memory,
        live=live,
    )


@dataclass(frozen=True)
class Home:
    """Where a rank lives, if not beside this process: namespaces to join, and what its environment says about them."""

    namespaces: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


HERE = Home()


def launch_at(
    home_of: Callable[[int], Home],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    world_size: int,
    device: str,
    timeout_s: float,
    seed: int | None,
    sample_memory: bool = False,
    live: bool | LiveView = False,
    where: str = "",
) -> Run:
    """`launch` with a home for each rank; `where` describes the homes in the run's notes."""
    started_s = time.perf_counter()
    size = checked_world_size(world_size)
    _check(fn, timeout_s, seed)
    view = view_for(live)
    births = nursery()
    births.warm()
    num_gpus = count_gpus() if device != "cpu" else 0
    placement = place(device, size, num_gpus)
    cores = available_cores()
    threads = max(1, cores // size)
    call = transport.pack_call(fn, args, kwargs)
    try:
        with rendezvous() as store_path:
            homes = [home_of(rank) for rank in range(size)]
            setups = [
                Setup(
                    rank=rank,
                    world_size=size,
                    backend=placement.backend,
                    device=placement.of_rank(rank, num_gpus),
                    store_path=store_path,
                    timeout_s=min(float(timeout_s), MAX_TIMEOUT_S),
                    seed=None if seed is None else int(seed),
                    num_threads=threads,
                    sample_memory=sample_memory,
                    environment=rank_environment(dict(os.environ), rank, size, placement) | dict(home.environment),
                    namespaces=home.namespaces,
                    live=view is not None,
                )
                for rank, home in enumerate(homes)
            ]
            with Supervisor(births, setups, call, view) as supervisor:
                supervisor.start()
                answers = supervisor.wait()
                seconds = time.perf_counter() - started_s
            logs = supervisor.logs
    finally:
        os.close(call)
    notes = {"backend": placement.backend, "device": placement.device.value, "world_size": str(size)}
    notes |= {"hosts": where} if where else {}
    if supervisor.stopped:
        notes[STOPPED] = supervisor.summary.progress if supervisor.summary else "at once"
    is_whole = all(record is not None for _, record in answers)
    run = Run(
        results=[result for result, _ in answers],
        logs=logs,
        record=Record(ranks=tuple(record for _, record in answers if record is not None), notes=notes),
        world_size=size,
        backend=placement.backend,
        device=placement.device.value,
        device_reason=where or placement.reason,
        seconds=seconds,
        cores=cores,
        num_threads=threads,
        live=supervisor.summary,
    )
    if supervisor.stopped:
        raise RunStoppedError(_stopped_text(run, supervisor.stopped, is_whole), run if is_whole else None)
    return run


def _stopped_text(run: Run, how: str, is_whole: bool) -> str:
    at = f"at {run.live.progress}, after {seconds_text(run.live.seconds)}" if run.live else "at once"
    kept = "has what was recorded until then" if is_whole else "is None, for not every rank could hand over its record"
    return f"stopped {at}: Stop was pressed, and {how}; `.run` of this error {kept}"


def checked_world_size(world_size: Any) -> int:
    """`world_size` as an int; raises `InvalidInputError` where no launch can have it."""
    try:
        size = operator.index(world_size)
    except TypeError:
        size = None
    if size is None or isinstance(world_size, bool):
        raise InvalidInputError.because(
            "world_size", world_size, "is a whole number of ranks", "use world_size=2 or another int"
        )
    if size < 1:
        raise InvalidInputError.because(
            "world_size", size, "a launch has at least one rank", "use world_size=1 for one process"
        )
    if size > MAX_RANKS:
        raise InvalidInputError.because(
            "world_size", size, f"one machine runs at most {MAX_RANKS} ranks", f"use world_size={MAX_RANKS} or fewer"
        )
    left = available_memory_bytes()
    if left is not None and size * RANK_BYTES > left:
        fits = max(1, left // RANK_BYTES)
        raise InvalidInputError.because(
            "world_size",
            size,
            f"each rank needs about {RANK_BYTES / 1e6:.0f} MB and {left / 1e6:.0f} MB are free",
            f"use world_size={fits} or fewer",
        )
    return size


def _check(fn: Any, timeout_s: Any, seed: Any) -> None:
    if not callable(fn):
        raise InvalidInputError.because(
            "fn", fn, "is called on each rank", "pass the function itself and its arguments: vk.launch(train, 3)"
        )
    if inspect.iscoroutinefunction(fn):
        raise InvalidInputError.because(
            "fn",
            fn,
            "is a coroutine function, and no event loop runs on a rank",
            "call asyncio.run in a plain function",
        )
    if (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, numbers.Real)
        or not 0 < float(timeout_s) < float("inf")
    ):
        raise InvalidInputError.because("timeout_s", timeout_s, "is a positive number of seconds", "use timeout_s=30")
    if seed is not None and (
        isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= int(seed) < 2**63
    ):
        raise InvalidInputError.because("seed", seed, "is None or a whole number from 0 on", "use seed=0")
    if current.board() is not None:
        raise InvalidInputError.because(
            "fn", getattr(fn, "__name__", fn), "a rank cannot launch ranks", "call vk.launch in the notebook"
        )


def rank_environment(base: dict[str, str], rank: int, world_size: int, placement: Placement) -> dict[str, str]:
    """Environment of a rank: the notebook's, torch's names for ranks, and loopback as the only interface."""
    interface = LOOPBACK.get(sys.platform)
    ours = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    if interface:
        ours |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if placement.device == "cpu":
        ours["CUDA_VISIBLE_DEVICES"] = ""
    defaults = {
        "TORCH_GLOO_LAZY_INIT": "1",
        "TORCH_DISTRIBUTED_DEBUG": "INFO",  # DDP then names parameters that got no gradient
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_NCCL_ENABLE_TIMING": "1",
    }
    return defaults | base | ours


@contextlib.contextmanager
def rendezvous() -> Iterator[str]:
    """Path of a file over which the ranks of one launch find each other: no port, no host name."""
    with tempfile.TemporaryDirectory(prefix="vizkit-", ignore_cleanup_errors=True) as folder:
        yield os.path.join(folder, "store")
