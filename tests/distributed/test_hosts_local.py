"""Hosts in name only: what a lesson falls back on where no namespaces can be made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from tests.processes import MARK, new_mark, processes_with, wait_until_gone
from vizkit.errors import InvalidInputError
from vizkit.runtime import local_hosts
from vizkit.runtime.hosts import Hosts
from vizkit.runtime.local_hosts import LocalHosts, hosts_here

FAMILY = ["sh", "-c", "setsid sleep 600 & sleep 600"]  # a child with a session of its own, as torchrun's may have


def test_a_killed_host_loses_all_its_processes_and_comes_back() -> None:
    """Its children too, whatever their session, and no other host's; how they ended is known."""
    mark = new_mark()
    with LocalHosts(2) as hosts:
        doomed, spared = (hosts.popen(host, FAMILY, env={MARK: mark}) for host in range(2))
        while len(processes_with(mark)) < 2 * 3:
            time.sleep(0.02)
        hosts.kill(0)
        assert doomed.wait(5) == -signal.SIGKILL
        assert len(processes_with(mark)) == 3
        assert (hosts.is_on(0), hosts.is_on(1), spared.poll()) == (False, True, None)
        with pytest.raises(InvalidInputError, match=r"^host=0: is off; start it again$"):
            hosts.popen(0, ["true"])
        hosts.start(0)
        assert hosts.popen(0, ["true"]).wait(5) == 0
    assert wait_until_gone(lambda: processes_with(mark)) == []


def test_processes_meet_on_the_loopback() -> None:
    """Address, port and interface are those at which two of them find each other."""
    ask = "import os; print(os.environ['GLOO_SOCKET_IFNAME'], os.environ['EXTRA'])"
    with LocalHosts(2) as hosts:
        assert hosts.address(1) == "127.0.0.1"
        assert 1024 <= hosts.free_port() < 65536
        process = hosts.popen(1, [sys.executable, "-c", ask], env={"EXTRA": "x"}, stdout=subprocess.PIPE, text=True)
        assert process.communicate(timeout=20)[0] in ("lo x\n", "lo0 x\n")


def test_a_launch_has_a_rank_for_each_host() -> None:
    """Or several."""
    with LocalHosts(2) as hosts:
        run = hosts.launch(lambda: (dist.get_rank(), os.environ["WORLD_SIZE"]), ranks_per_host=2)
    assert run.results == [(rank, "4") for rank in range(4)]


def test_unknown_hosts_are_refused() -> None:
    """With the errors that `Hosts` has."""
    with pytest.raises(InvalidInputError, match=r"^num_hosts=0: is a whole number from 1 on; use num_hosts=2$"):
        LocalHosts(0)
    with LocalHosts(2) as hosts:
        with pytest.raises(InvalidInputError, match=r"^host=2: is not one of the 2 hosts; use 0 to 1$"):
            hosts.address(2)
        with pytest.raises(InvalidInputError, match=r"^host=0: is on; kill it first$"):
            hosts.start(0)


@pytest.mark.parametrize(("problem", "kind"), [(None, Hosts), ("no root", LocalHosts)])
def test_hosts_here_are_the_best_that_this_machine_can_have(
    monkeypatch: pytest.MonkeyPatch, problem: str | None, kind: type
) -> None:
    """Namespaces where they can be made."""
    if kind is Hosts and local_hosts.hosts_problem():
        pytest.skip(f"no hosts of namespaces: {local_hosts.hosts_problem()}")
    monkeypatch.setattr(local_hosts, "hosts_problem", lambda: problem)
    assert type(hosts_here(2, 5e6)) is kind
