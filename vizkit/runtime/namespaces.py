"""Linux namespaces: a process that holds a set of them, ways in, and what this machine allows.

They have no names: a set of namespaces lives as long as the process that holds it, and that one ends with this process,
however this process ends. So nothing is left behind, and there is nothing to clean up at the next start.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vizkit.errors import VizkitError

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "env": "coreutils",
}
COMMAND_LIMIT_S = 20.0
NETWORK = ("--net",)
MACHINE = ("--uts", "--mount", "--pid")
TYPES = {"user": 0x10000000, "net": 0x40000000, "uts": 0x04000000}
"""The kernel's numbers of the namespaces that a process can join, in the order in which they have to be joined."""

_PROBES = (
    ("ip link add name port type veth peer name cable", "this kernel has no veth (module veth)"),
    ("ip link add name bridge type bridge", "this kernel has no bridge (module bridge)"),
    ("tc qdisc add dev port root tbf rate 8mbit burst 20kb limit 1mb", "this kernel has no tbf (module sch_tbf)"),
)


class HostsError(VizkitError, RuntimeError):
    """Hosts of network namespaces cannot be made, or one of the system's tools refused."""


@dataclass(frozen=True)
class Way:
    """Whether namespaces can be made here (`problem` is None), and whether that takes a user namespace of their own."""

    problem: str | None
    in_user_namespace: bool = False

    @property
    def unshare(self) -> list[str]:
        return ["unshare", *(["--user", "--map-root-user"] if self.in_user_namespace else [])]


def way(platform: str = sys.platform) -> Way:
    """How this process can make namespaces: as root, or else in a user namespace, for which no rights are needed."""
    if platform != "linux":
        return Way(f"network namespaces are Linux's, and this is {platform}")
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    return Way(f"{' and '.join(missing)} not installed") if missing else _probed()


@functools.cache
def _probed() -> Way:
    refusals = []
    for candidate in [Way(None), Way(None, in_user_namespace=True)][os.geteuid() != 0 :]:
        script = "echo inside && " + " && ".join(f"{command} && echo {i}" for i, (command, _) in enumerate(_PROBES))
        done = _tried([*candidate.unshare, *NETWORK, *MACHINE, "--fork", "--mount-proc", "sh", "-c", script])
        reached = len(done.stdout.split())
        if reached > len(_PROBES):
            return candidate
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        if reached:
            return Way(f"{_PROBES[reached - 1][1]}: {said}")
        refusals.append(said)
    who = "root, but without CAP_SYS_ADMIN" if os.geteuid() == 0 else "not root"
    return Way(f"this process may make no namespaces ({who}): {'; '.join(refusals)}")


@functools.cache
def delay_problem() -> str | None:
    """Why `tc … netem` cannot delay packets here, or None if it can."""
    chosen = way()
    if chosen.problem:
        return chosen.problem
    done = _tried([*chosen.unshare, "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    return None if done.returncode == 0 else f"this kernel has no netem (module sch_netem): {done.stderr.strip()}"


def _tried(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(list(argv), 1, "", str(error))


class Holder:
    """A shell that does nothing but hold namespaces, until it is ended or this process is gone.

    `kinds` are the namespaces that it makes; with `--pid` among them it is their first process, and the kernel ends
    all others with it. `enter` begins a command line that runs in the namespaces from which it starts (`entering`), and
    `script` is run first in the new ones. Raises `HostsError` where that fails.
    """

    def __init__(
        self, unshare: Sequence[str], kinds: Sequence[str], *, enter: Sequence[str] = (), script: str = "true"
    ) -> None:
        fork = ["--fork", "--kill-child", "--mount-proc"] if "--pid" in kinds else []
        # the shell waits for the end of its input: that comes when this process closes the pipe, or dies
        argv = [*enter, *unshare, *kinds, *fork, "sh", "-c", f"{script} && echo ready && read _"]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interrupt at the terminal is not meant for it
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            said = self._process.communicate()[1].strip()
            raise HostsError(f"no namespaces were made: {' '.join(argv)} said {said!r}")
        self.pid = _only_child(self._process.pid) if fork else self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Kill it, and with it all processes of its process namespace; returns when they are gone."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._process.communicate()


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def entering(pid: int, kinds: Sequence[str], in_user_namespace: bool) -> list[str]:
    """The start of a command line whose rest runs in the namespaces of process `pid`."""
    user = ["--user", "--preserve-credentials"] if in_user_namespace else []
    return ["nsenter", f"--target={pid}", *user, *kinds, "--"]


def checked(argv: Sequence[str]) -> str:
    """What a command printed; raises `HostsError` with its words where it failed."""
    done = _tried(argv)
    if done.returncode:
        raise HostsError(f"{' '.join(argv)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def paths(pid: int, in_user_namespace: bool) -> tuple[str, ...]:
    """What `join` wants, for the namespaces of process `pid`."""
    return tuple(f"/proc/{pid}/ns/{kind}" for kind in TYPES if kind != "user" or in_user_namespace)


def join(namespaces: Sequence[str]) -> None:
    """Take this process, which may have one thread only, into `namespaces`; raises `OSError` where it may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptors = [os.open(path, os.O_RDONLY) for path in namespaces]  # all, before the first changes what may be read
    try:
        for path, descriptor in zip(namespaces, descriptors, strict=True):
            if libc.setns(descriptor, TYPES[os.path.basename(path)]):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), path)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def processes_in(network: str) -> list[int]:
    """Processes whose network namespace is that of the path `network`."""
    wanted, found = os.stat(network).st_ino, []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and os.stat(folder / "ns" / "net").st_ino == wanted:
                found.append(int(folder.name))
    return found
