"""Hosts in name only, for machines where no namespaces can be made: what dies and comes back is told by a mark."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from vizkit.errors import InvalidInputError
from vizkit.runtime.hosts import NETWORK_ENV, Hosts, hosts_problem
from vizkit.runtime.launcher import LOOPBACK, launch
from vizkit.runtime.run import Run

MARK_ENV = "VIZKIT_LOCAL_HOST"
POLL_S = 0.02


class LocalHosts:
    """What `Hosts` does with processes, on this machine's loopback: no network of their own, no limited bandwidth.

    A host is the set of processes that were started on it, and all that those have started: `kill` ends them at once.
    Use it as a context manager, which leaves none behind. Methods and errors are those of `Hosts`.

    >>> with LocalHosts(2) as hosts:
    ...     hosts.popen(1, ["sleep", "60"]).poll() is None
    True
    """

    def __init__(self, num_hosts: int = 2) -> None:
        if isinstance(num_hosts, bool) or not isinstance(num_hosts, int) or num_hosts < 1:
            raise InvalidInputError.because("num_hosts", num_hosts, "is a whole number from 1 on", "use num_hosts=2")
        self.num_hosts = num_hosts
        self._mark = uuid.uuid4().hex
        self._on = set(range(num_hosts))
        self._started: list[subprocess.Popen] = []

    def __enter__(self) -> LocalHosts:
        return self

    def __exit__(self, *error: object) -> None:
        for host in list(self._on):
            self.kill(host)
        for process in self._started:
            process.wait()

    def address(self, host: int) -> str:
        """Loopback, for all of them."""
        self._checked(host)
        return "127.0.0.1"

    def free_port(self) -> int:
        """A port on which nobody listens now."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            return server.getsockname()[1]

    def popen(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen:
        """Start `argv` on `host`; `env` is added to this process's environment, `options` go to `subprocess.Popen`."""
        if self._checked(host) not in self._on:
            raise InvalidInputError.because("host", host, "is off", "start it again")
        loopback = dict.fromkeys(NETWORK_ENV, LOOPBACK.get(sys.platform, "lo"))
        environment = {**os.environ, **loopback, **(env or {}), MARK_ENV: f"{self._mark}-{host}"}
        process = subprocess.Popen(list(map(str, argv)), env=environment, **options)
        self._started.append(process)
        return process

    def launch(self, fn: Callable[..., Any], /, *args: Any, ranks_per_host: int = 1, **kwargs: Any) -> Run:
        """`vizkit.launch` with `ranks_per_host` ranks for each host."""
        return launch(fn, *args, world_size=ranks_per_host * self.num_hosts, device="cpu", **kwargs)

    def kill(self, host: int) -> None:
        """SIGKILL all processes of a host, and what they start meanwhile."""
        if self._checked(host) not in self._on:
            raise InvalidInputError.because("host", host, "is off", "start it again")
        self._on.discard(host)
        while alive := self._processes(host):
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(POLL_S)

    def start(self, host: int) -> None:
        """Turn on a host that is off."""
        if self._checked(host) in self._on:
            raise InvalidInputError.because("host", host, "is on", "kill it first")
        self._on.add(host)

    def is_on(self, host: int) -> bool:
        """Whether a host runs: it does until `kill`."""
        return self._checked(host) in self._on

    def _processes(self, host: int) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_dead = process.status() == psutil.STATUS_ZOMBIE
                if not is_dead and process.environ().get(MARK_ENV) == f"{self._mark}-{host}":
                    found.append(process)
        return found

    def _checked(self, host: int) -> int:
        if host not in range(self.num_hosts):
            raise InvalidInputError.because(
                "host", host, f"is not one of the {self.num_hosts} hosts", f"use 0 to {self.num_hosts - 1}"
            )
        return host


def hosts_here(num_hosts: int = 2, bandwidth_bytes_per_s: float = 12.5e6) -> Hosts | LocalHosts:
    """`Hosts` with limited cables where this machine allows it (`hosts_problem`), else `LocalHosts` without any."""
    return LocalHosts(num_hosts) if hosts_problem() else Hosts(num_hosts, bandwidth_bytes_per_s)
