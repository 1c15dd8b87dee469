"""Where ranks are born: fresh processes from a forkserver that has already imported torch, or spawned ones.

The notebook's own process is never forked: it may have run threaded operations or touched a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import popen_spawn_posix, spawn
from multiprocessing.process import BaseProcess
from typing import Any

from vizkit.errors import InvalidInputError

METHOD_ENV = "VIZKIT_START_METHOD"
PRELOAD = "vizkit.runtime.preload"


class RankProcess(multiprocessing.process.BaseProcess):
    """A process that never runs the parent's `__main__` again: what a rank needs of it travels by value."""

    _start_method = None

    def __init__(self, nursery: Nursery, target: Callable[..., None], args: tuple[Any, ...], name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._nursery: Nursery | None = nursery

    def _Popen(self, process: RankProcess) -> Any:  # noqa: N802 - multiprocessing calls it so
        nursery, process._nursery = process._nursery, None  # stays behind in the parent
        assert nursery is not None
        return nursery.popen(process)


class Nursery:
    """Starts rank processes by one method, `"forkserver"` or `"spawn"`."""

    def __init__(self, method: str) -> None:
        self.method = method
        self._server = _new_server() if method == "forkserver" else None
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Have the forkserver running; its imports go on in the background. Does nothing for spawned ranks."""
        if self._server is not None:
            with self._lock, _interrupts_blocked(), _package_importable():
                try:
                    self._server.ensure_running()
                except ChildProcessError:  # it died, and somebody else has taken note of its death
                    self._server = _new_server()
                    self._server.ensure_running()
                except OSError as error:
                    if "AF_UNIX path too long" not in str(error):
                        raise
                    raise InvalidInputError.because(
                        "TMPDIR",
                        tempfile.gettempdir(),
                        "is too long a path for a socket",
                        "use a short one: TMPDIR=/tmp",
                    ) from error

    def warm_in_background(self) -> None:
        def warm() -> None:
            with contextlib.suppress(Exception):  # a launch will meet the same obstacle, and say so where it is read
                self.warm()

        threading.Thread(target=warm, name="vizkit-warm", daemon=True).start()

    def start(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> RankProcess:
        """Start a process that calls `target(*args)`; an interrupt meant for the notebook does not reach it."""
        process = RankProcess(self, target, args, name)
        self.warm()
        with _interrupts_blocked():
            process.start()
        return process

    def popen(self, process: BaseProcess) -> Any:
        if self._server is None:
            with _main_hidden():
                return popen_spawn_posix.Popen(process)
        from vizkit.runtime.forkserver import ForkserverPopen

        return ForkserverPopen(process, self._server)


@functools.cache
def nursery(method: str | None = None) -> Nursery:
    """The nursery of this process for `method`; by default the best one here, or what `VIZKIT_START_METHOD` says."""
    chosen = method or os.environ.get(METHOD_ENV) or best_method()
    return Nursery(chosen) if method else nursery(chosen)


def best_method() -> str:
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def _new_server() -> Any:
    from multiprocessing.forkserver import ForkServer

    server = ForkServer()
    server.set_forkserver_preload([PRELOAD])
    return server


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes started here inherit the mask: Stop in a notebook interrupts the kernel and not the ranks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _package_importable() -> Iterator[None]:
    """The forkserver starts with a bare interpreter: tell it where vizkit and its libraries are."""
    name, before = "PYTHONPATH", os.environ.get("PYTHONPATH")
    os.environ[name] = os.pathsep.join(os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    main = sys.modules["__main__"]
    names = ("__file__", "__spec__")
    hidden: dict[str, Any] = {name: main.__dict__.pop(name) for name in names if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def preparation(name: str) -> dict[str, Any]:
    """What multiprocessing tells a new process, without the order to import the parent's `__main__`."""
    facts = spawn.get_preparation_data(name)
    return {key: value for key, value in facts.items() if not key.startswith("init_main")}
