"""Hosts of network namespaces: what a cluster's network does to collectives, on one machine."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vizkit.errors import InvalidInputError
from vizkit.runtime import namespaces
from vizkit.runtime.launcher import Home, launch_at
from vizkit.runtime.namespaces import MACHINE, NETWORK, Holder, HostsError, checked, entering
from vizkit.runtime.run import Run

MAX_HOSTS = 16
INTERFACE = "eth0"
FREE_PORT = 29500
NETWORK_ENV = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), INTERFACE)
MTU_BYTES = 9000  # jumbo frames, as between the nodes of a cluster: headers are 0.7 % of the wire
FRAME_BYTES = MTU_BYTES + 14  # what tbf counts
BURST_S = 1e-3  # so late may the kernel's timer be, and no bandwidth is lost
QUEUE_BYTES = 64 << 20  # nothing is dropped: TCP's own window ends the queue
MIN_BANDWIDTH = 1e4
MAX_BANDWIDTH = 1e12


def hosts_problem() -> str | None:
    """Why no hosts can be made on this machine, in words; None where they can."""
    return namespaces.way().problem


class Hosts:
    """Two or more hosts on this machine, each a network of its own behind a link of limited bandwidth, on one switch.

    Each host is a set of Linux namespaces (network, process numbers, mounts, host name) with one interface, `eth0`, at
    the end of a veth cable to a bridge; `tc … tbf` limits both directions of the cable to `bandwidth_bytes_per_s`
    (bytes a second of wall time, frame headers included; `inf` leaves it unlimited). `latency_s` is added to each
    message by `tc … netem`, where the kernel has it. Hosts share this machine's processors, memory, files and clock.

    Use it as a context manager: leaving it ends all processes of the hosts; so does the death of this process.

    Raises `InvalidInputError` for numbers that cannot work, and for a latency where there is no netem; `HostsError`
    where namespaces cannot be made (`hosts_problem` says so beforehand).

    >>> if hosts_problem() is None:
    ...     with Hosts(2, bandwidth_bytes_per_s=20e6) as hosts:
    ...         assert hosts.check(1, ["hostname"]) == "host1\\n"
    """

    def __init__(self, num_hosts: int = 2, bandwidth_bytes_per_s: float = 12.5e6, latency_s: float = 0.0) -> None:
        if isinstance(num_hosts, bool) or not isinstance(num_hosts, int) or not 1 <= num_hosts <= MAX_HOSTS:
            raise InvalidInputError.because(
                "num_hosts", num_hosts, f"is a whole number from 1 to {MAX_HOSTS}", "use num_hosts=2"
            )
        self.num_hosts = num_hosts
        self.bandwidth_bytes_per_s = _checked_bandwidth(bandwidth_bytes_per_s)
        self.latency_s = _checked_latency(latency_s)
        way = namespaces.way()
        if way.problem:
            raise HostsError(f"no hosts can be made here: {way.problem}; use vk.launch, and a vk.Link for the network")
        self._in_user_namespace = way.in_user_namespace
        self._unshare = way.unshare
        self._cleanup = contextlib.ExitStack()
        self._machines: dict[int, Holder] = {}

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as cleanup:
            self._names = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="vizkit-hosts-"))) / "hosts"
            self._names.write_text("127.0.0.1 localhost\n" + "".join(f"{self.address(i)} host{i}\n" for i in self._all))
            self._switch = self._held(cleanup, Holder(self._unshare, NETWORK))
            inside = entering(self._switch.pid, (), self._in_user_namespace)
            self._cables = [self._held(cleanup, Holder(["unshare"], NETWORK, enter=inside)) for _ in self._all]
            self._connect()
            cleanup.callback(self._kill_all)
            for i in self._all:
                self.start(i)
            self.limit(self.bandwidth_bytes_per_s)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

    @staticmethod
    def _held(cleanup: contextlib.ExitStack, holder: Holder) -> Holder:
        cleanup.callback(holder.end)
        return holder

    @property
    def _all(self) -> range:
        return range(self.num_hosts)

    def address(self, host: int) -> str:
        """The IP address of a host on their network."""
        return f"10.77.0.{self._checked_host(host) + 1}"

    def free_port(self) -> int:
        """A port on which no host listens: each has all of them to itself."""
        return FREE_PORT

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """A command line that runs `argv` on `host`, in this process's working directory."""
        machine = self._machine(host)
        assignments = [f"{name}={value}" for name, value in NETWORK_ENV.items()]
        inside = ["setpriv", "--pdeathsig", "KILL", "env", "-C", os.getcwd(), *assignments, *map(str, argv)]
        return [*entering(machine.pid, (*NETWORK, *MACHINE), self._in_user_namespace), *inside]

    def popen(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen:
        """Start `argv` on `host`; `env` is added to this process's environment, `options` go to `subprocess.Popen`."""
        return subprocess.Popen(self.command(host, argv), env={**os.environ, **(env or {})}, **options)

    def check(self, host: int, argv: Sequence[str]) -> str:
        """Run `argv` on `host` and return what it printed; raises `HostsError` where it fails."""
        return checked(self.command(host, argv))

    def launch(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        ranks_per_host: int = 1,
        timeout_s: float = 60,
        seed: int | None = 0,
        **kwargs: Any,
    ) -> Run:
        """`vizkit.launch` over the hosts: call `fn(*args, **kwargs)` on `ranks_per_host` ranks on each, with gloo.

        Rank r runs on host r // `ranks_per_host`. Ranks of one host reach each other without the cable. Results, logs,
        errors and the trace are those of `vk.launch`.
        """
        if isinstance(ranks_per_host, bool) or not isinstance(ranks_per_host, int) or ranks_per_host < 1:
            raise InvalidInputError.because(
                "ranks_per_host", ranks_per_host, "is a whole number from 1 on", "use ranks_per_host=1"
            )
        homes = [self._home(rank, ranks_per_host) for rank in range(self.num_hosts * ranks_per_host)]
        return launch_at(
            homes.__getitem__,
            fn,
            args,
            kwargs,
            world_size=len(homes),
            device="cpu",
            timeout_s=timeout_s,
            seed=seed,
            where=f"{self.num_hosts} hosts of network namespaces",
        )

    def _home(self, rank: int, ranks_per_host: int) -> Home:
        machine = self._machine(rank // ranks_per_host)
        local = {"LOCAL_RANK": str(rank % ranks_per_host), "LOCAL_WORLD_SIZE": str(ranks_per_host)}
        return Home(namespaces.paths(machine.pid, self._in_user_namespace), NETWORK_ENV | local)

    def limit(self, bandwidth_bytes_per_s: float, host: int | None = None) -> None:
        """Set the bandwidth of one host's cable, or of all, in both directions, from now on."""
        rate = _checked_bandwidth(bandwidth_bytes_per_s)
        for i in self._all if host is None else [self._checked_host(host)]:
            for end, name in ((self._cables[i], INTERFACE), (self._switch, f"port{i}")):
                self._inside(end, f"tc qdisc del dev {name} root 2>/dev/null; {self._shaping(name, rate)}")
        if host is None:
            self.bandwidth_bytes_per_s = rate

    def _shaping(self, name: str, rate: float) -> str:
        """Commands that shape what leaves through an interface: a delay at the host's end only, the rate at both."""
        place, commands = "root handle 1:", []
        if self.latency_s and name == INTERFACE:
            commands.append(f"tc qdisc add dev {name} {place} netem delay {self.latency_s * 1e6:.0f}us limit 100000")
            place = "parent 1: handle 2:"
        if not math.isinf(rate):
            burst = max(2 * FRAME_BYTES, round(rate * BURST_S))
            commands.append(
                f"tc qdisc add dev {name} {place} tbf rate {round(rate * 8)}bit burst {burst}b limit {QUEUE_BYTES}b"
            )
        return " && ".join(commands) or "true"

    def sent_bytes(self) -> list[int]:
        """Bytes that each host has sent so far, frame headers included, as its port on the switch counted them."""
        links = json.loads(self._inside(self._switch, "ip -json -statistics link show type veth"))
        received = {link["ifname"]: link["stats64"]["rx"]["bytes"] for link in links}
        return [received[f"port{i}"] for i in self._all]

    def kill(self, host: int) -> None:
        """SIGKILL all processes of a host at once, as a power cut does; its cable stays. `start` turns it on again."""
        machine = self._machine(host)
        del self._machines[host]
        network = f"/proc/{self._cables[host].pid}/ns/net"
        machine.end()
        for pid in set(namespaces.processes_in(network)) - {self._cables[host].pid}:  # ranks of `launch`
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        for host in list(self._machines):
            self.kill(host)

    def start(self, host: int) -> None:
        """Turn on a host that is off."""
        if self._checked_host(host) in self._machines:
            raise InvalidInputError.because("host", host, "is on", "kill it first")
        script = f"hostname host{host} && mount --bind {shlex.quote(str(self._names))} /etc/hosts"
        inside = entering(self._cables[host].pid, NETWORK, self._in_user_namespace)
        self._machines[host] = Holder(["unshare"], MACHINE, enter=inside, script=script)

    def is_on(self, host: int) -> bool:
        """Whether a host runs: it does until `kill`."""
        return self._checked_host(host) in self._machines

    def _connect(self) -> None:
        """A bridge in the switch, and from it a cable to each host."""
        lines = ["ip link set lo up", f"ip link add name bridge mtu {MTU_BYTES} type bridge"]
        for i, cable in enumerate(self._cables):
            ends = f"name port{i} mtu {MTU_BYTES} type veth peer name {INTERFACE} mtu {MTU_BYTES} netns {cable.pid}"
            lines += [f"ip link add {ends}", f"ip link set port{i} master bridge", f"ip link set port{i} up"]
        self._inside(self._switch, " && ".join([*lines, "ip link set bridge up"]))
        for i, cable in enumerate(self._cables):
            own = [f"ip address add {self.address(i)}/24 dev {INTERFACE}", f"ip link set {INTERFACE} up"]
            self._inside(cable, " && ".join(["ip link set lo up", *own]))

    def _inside(self, holder: Holder, script: str) -> str:
        return checked([*entering(holder.pid, NETWORK, self._in_user_namespace), "sh", "-c", script])

    def _machine(self, host: int) -> Holder:
        if self._checked_host(host) not in self._machines:
            raise InvalidInputError.because("host", host, "is off", "enter `with Hosts(...)`, or start it again")
        return self._machines[host]

    def _checked_host(self, host: int) -> int:
        if host not in self._all:
            raise InvalidInputError.because(
                "host", host, f"is not one of the {self.num_hosts} hosts", f"use 0 to {self.num_hosts - 1}"
            )
        return host


def _checked_bandwidth(value: float) -> float:
    if value != math.inf and not MIN_BANDWIDTH <= value <= MAX_BANDWIDTH:
        raise InvalidInputError.because(
            "bandwidth_bytes_per_s",
            value,
            f"is between {MIN_BANDWIDTH:g} and {MAX_BANDWIDTH:g} bytes a second",
            "use 12.5e6 for 100 Mbit/s, or float('inf') for no limit",
        )
    return float(value)


def _checked_latency(value: float) -> float:
    if not 0 <= value <= 1:
        raise InvalidInputError.because("latency_s", value, "is between 0 and 1 s", "use 0 for none")
    if value and (problem := namespaces.delay_problem()):
        raise InvalidInputError.because(
            "latency_s", value, problem, "use latency_s=0, and a vk.Link's latency on the virtual clock"
        )
    return float(value)
