"""Hosts of network namespaces: their network costs what α–β says, and nothing of them is left afterwards."""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import vizkit as vk
from tests.processes import MARK, marked_environment, new_mark, processes_with, wait_until_gone
from vizkit import collectives
from vizkit.errors import InvalidInputError
from vizkit.hardware import Link
from vizkit.runtime import namespaces
from vizkit.runtime.hosts import Hosts, hosts_problem
from vizkit.runtime.namespaces import HostsError

needs_hosts = pytest.mark.skipif(hosts_problem() is not None, reason=f"no hosts of namespaces: {hosts_problem()}")
LONG_ENOUGH_S = 0.4  # of repetitions of a size, for one of them to be left in peace by this machine's other work
KIB, MIB = 1 << 10, 1 << 20


def timed_all_reduces(repeats_of: dict[int, int]) -> list[list[float]]:
    """Wall seconds of each all-reduce, by size and repetition, each after a barrier."""
    seconds = []
    for size, repeats in repeats_of.items():
        x = torch.zeros(size // 4)
        seconds.append([])
        for _ in range(repeats):
            dist.barrier()
            started_s = time.perf_counter()
            dist.all_reduce(x)
            seconds[-1].append(time.perf_counter() - started_s)
    return seconds


def undisturbed_s(results: list[list[list[float]]], position: int) -> float:
    """The slowest rank's time, in the repetition in which this busy machine disturbed it least."""
    return min(map(max, zip(*(of_rank[position] for of_rank in results), strict=True)))


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [2, 3, 4])
def test_all_reduce_over_the_cables_takes_what_alpha_beta_says(num_hosts: int) -> None:
    """Within 25 %: β is the cable's rate as set, α a step of a 4-byte all-reduce, and the ring has 2(n−1) steps."""
    sizes = [256 * KIB, 512 * KIB, MIB]
    payloads = collectives.critical_path("all_reduce", "ring", num_hosts)[1]
    errors = {}
    with Hosts(num_hosts) as hosts:
        for rate in (5e6, 10e6, 20e6):
            hosts.limit(rate)
            repeats_of = {size: max(4, math.ceil(LONG_ENOUGH_S * rate / (payloads * size))) for size in sizes}
            results = hosts.launch(lambda r=repeats_of: (timed_all_reduces({4: 20}), timed_all_reduces(r))).results
            alpha_s = undisturbed_s([tiny for tiny, _ in results], 0) / (2 * (num_hosts - 1))
            for position, size in enumerate(sizes):
                measured_s = undisturbed_s([large for _, large in results], position)
                predicted_s = collectives.time_s("all_reduce", "ring", num_hosts, size, Link(alpha_s, rate))
                errors[rate, size] = measured_s / predicted_s - 1
                print(
                    f"{num_hosts} hosts, {rate / 1e6:4.0f} MB/s, {size / KIB:5.0f} KiB: α {alpha_s * 1e3:.2f} ms, "
                    f"measured {measured_s * 1e3:6.1f} ms, predicted {predicted_s * 1e3:6.1f} ms, "
                    f"{errors[rate, size]:+.0%}"
                )
    assert {case: error for case, error in errors.items() if abs(error) > 0.25} == {}


@needs_hosts
def test_the_slowest_cable_sets_the_pace_of_the_ring() -> None:
    """With one of three cables at a fifth of the rate, all ranks wait for it."""
    rate, size = 25e6, MIB
    with Hosts(3, bandwidth_bytes_per_s=rate) as hosts:
        hosts.limit(rate / 5, host=1)
        results = hosts.launch(timed_all_reduces, {size: 4}).results
    slow_s = 2 * 2 / 3 * size / (rate / 5)
    assert undisturbed_s(results, 0) == pytest.approx(slow_s, rel=0.25)


@needs_hosts
@pytest.mark.parametrize("num_hosts", [2, 4])
def test_the_cables_carry_the_bytes_that_the_ring_predicts(num_hosts: int) -> None:
    """2(n−1)/n of the payload leaves each host, plus at most 4 % for headers, acknowledgements and connecting."""
    size = 4 * MIB

    def reduce_once() -> None:
        dist.all_reduce(torch.zeros(size // 4))

    with Hosts(num_hosts, bandwidth_bytes_per_s=math.inf) as hosts:
        before = hosts.sent_bytes()
        hosts.launch(reduce_once)
        sent = [after - earlier for after, earlier in zip(hosts.sent_bytes(), before, strict=True)]
    predicted = collectives.wire_bytes("all_reduce", "ring", num_hosts, size).sum(axis=1)
    assert all(1 <= s / p < 1.04 for s, p in zip(sent, predicted, strict=True)), (sent, predicted)


@needs_hosts
def test_ranks_of_one_host_talk_without_the_cable() -> None:
    """Two ranks a host are a two-level mesh: what stays inside a host costs the cable nothing."""

    def reduce_inside() -> tuple[str, str]:
        inside, _ = dist.new_subgroups(2)
        dist.all_reduce(torch.zeros(MIB), group=inside)
        return socket.gethostname(), os.environ["LOCAL_RANK"]

    with Hosts(2) as hosts:
        before = hosts.sent_bytes()
        run = hosts.launch(reduce_inside, ranks_per_host=2)
        assert max(hosts.sent_bytes()) - max(before) < 0.02 * 4 * MIB
    assert run.results == [("host0", "0"), ("host0", "1"), ("host1", "0"), ("host1", "1")]


@needs_hosts
def test_a_launch_over_hosts_is_a_launch() -> None:
    """Arguments, printed lines, the trace and a failing rank's traceback come back as from `vk.launch`."""

    def greet(word: str, *, fail: bool) -> str:
        print(word, dist.get_rank())
        dist.all_reduce(torch.zeros(10))
        if fail and dist.get_rank() == 1:
            raise ValueError("host1 has no data")
        dist.barrier()
        return socket.gethostname()

    with Hosts(2) as hosts:
        run = hosts.launch(greet, "hello", fail=False)
        assert (run.results, run.logs) == (["host0", "host1"], ["hello 0\n", "hello 1\n"])
        assert run.collectives.op.tolist() == ["all_reduce", "barrier"]
        assert set(run.trace.rank.tolist()) == {0, 1}
        with pytest.raises(vk.RankFailedError, match="rank 1 raised ValueError: host1 has no data") as caught:
            hosts.launch(greet, "hello", fail=True)
    assert "in greet" in caught.value.remote_traceback


@needs_hosts
def test_hosts_have_names_and_networks_of_their_own() -> None:
    """Each reaches the others by name, and none reaches this machine's own ports."""
    with Hosts(3) as hosts, socket.create_server(("127.0.0.1", 0)) as ours:
        assert hosts.check(2, ["getent", "hosts", "host0"]).split() == [hosts.address(0), "host0"]
        assert hosts.check(1, ["hostname"]) == "host1\n"
        assert hosts.check(1, ["pwd"]) == f"{os.getcwd()}\n"
        connect = f"import socket; socket.create_connection(('127.0.0.1', {ours.getsockname()[1]}), 2)"
        with pytest.raises(HostsError, match="Connection refused"):
            hosts.check(0, [sys.executable, "-c", connect])


@needs_hosts
def test_a_killed_host_loses_all_its_processes_and_comes_back() -> None:
    """As in a power cut: children too, and no other host's; `start` turns it on again."""
    mark = new_mark()
    with Hosts(2) as hosts:
        doomed, spared = (
            hosts.popen(host, ["sh", "-c", "setsid sleep 600 & sleep 600"], env={MARK: mark}) for host in range(2)
        )
        while len(processes_with(mark)) < 2 * 3:  # nsenter, shell and sleep; the other sleep has a session of its own
            time.sleep(0.02)
        hosts.kill(0)
        assert doomed.wait(5) != 0
        assert spared.poll() is None
        assert not hosts.is_on(0)
        with pytest.raises(InvalidInputError, match=r"^host=0: is off; "):
            hosts.check(0, ["true"])
        hosts.start(0)
        assert hosts.check(0, ["hostname"]) == "host0\n"
    assert spared.wait(5) != 0
    assert wait_until_gone(lambda: processes_with(mark)) == []


@needs_hosts
def test_a_host_that_dies_under_a_launch_is_named() -> None:
    """The launch ends with the rank that was killed, in seconds and not after its timeout."""

    def wait_for_rank_1() -> None:
        if dist.get_rank() == 1:
            time.sleep(30)
        dist.barrier()

    with Hosts(2) as hosts:
        threading.Timer(1.5, hosts.kill, args=(1,)).start()
        with pytest.raises(vk.RankFailedError, match="rank 1 was killed by SIGKILL"):
            hosts.launch(wait_for_rank_1)


@needs_hosts
@pytest.mark.parametrize("end", ["raise", "kill"])
def test_nothing_is_left_however_the_notebook_ends(tmp_path: Path, end: str) -> None:
    """An exception in the block and a SIGKILL of the process end hosts and all that runs on them."""
    script = tmp_path / "notebook.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from vizkit.runtime.hosts import Hosts

            with Hosts(2) as hosts:
                work = [hosts.popen(i, ["sh", "-c", "setsid sleep 600 & sleep 600"]) for i in range(2)]
                print("ready", flush=True)
                sys.stdin.readline()
                raise RuntimeError("in the block")
            """
        )
    )
    mark = new_mark()
    notebook = subprocess.Popen(
        [sys.executable, script],
        env=marked_environment(mark),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert notebook.stdout is not None
    assert notebook.stdout.readline() == "ready\n"
    assert len(processes_with(mark)) > 2
    if end == "kill":
        notebook.send_signal(signal.SIGKILL)
    _, errors = notebook.communicate("\n" if end == "raise" else None, timeout=20)
    assert ("RuntimeError: in the block" in errors) == (end == "raise")
    assert wait_until_gone(lambda: processes_with(mark)) == []


@needs_hosts
def test_latency_is_added_where_the_kernel_can_delay_packets() -> None:
    """Where it has no netem, the error says so and names the virtual clock instead."""
    if namespaces.delay_problem():
        with pytest.raises(InvalidInputError, match=r"^latency_s=0.02: this kernel has no netem .*; use latency_s=0, "):
            Hosts(2, latency_s=0.02)
        pytest.skip(f"no delay on the cables: {namespaces.delay_problem()}")
    with Hosts(2, latency_s=0.02) as hosts:
        results = hosts.launch(timed_all_reduces, {4: 4}).results
    assert undisturbed_s(results, 0) == pytest.approx(2 * 0.02, rel=0.25)


@needs_hosts
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_hosts": 0}, "num_hosts=0: is a whole number from 1 to 16; use num_hosts=2"),
        ({"num_hosts": True}, "num_hosts=True: is a whole number from 1 to 16; use num_hosts=2"),
        ({"num_hosts": 17}, "num_hosts=17: is a whole number from 1 to 16; use num_hosts=2"),
        (
            {"bandwidth_bytes_per_s": 0},
            "bandwidth_bytes_per_s=0: is between 10000 and 1e+12 bytes a second; use 12.5e6",
        ),
        ({"bandwidth_bytes_per_s": math.nan}, "bandwidth_bytes_per_s=nan: is between 10000 and 1e+12 bytes a second;"),
        ({"latency_s": -1}, "latency_s=-1: is between 0 and 1 s; use 0 for none"),
    ],
)
def test_hosts_that_cannot_be_say_why(arguments: dict[str, float], says: str) -> None:
    """Value, rule and remedy, before anything is made."""
    with pytest.raises(InvalidInputError) as caught:
        Hosts(**arguments)
    assert str(caught.value).startswith(says)


@needs_hosts
def test_an_unknown_host_and_one_that_is_on_already_are_refused() -> None:
    """So is a network that nobody has entered."""
    with pytest.raises(InvalidInputError, match=r"^host=0: is off; enter `with Hosts\(\.\.\.\)`, or start it again$"):
        Hosts(2).check(0, ["true"])
    with Hosts(1) as hosts:
        with pytest.raises(InvalidInputError, match=r"^host=1: is not one of the 1 hosts; use 0 to 0$"):
            hosts.address(1)
        with pytest.raises(InvalidInputError, match=r"^host=0: is on; kill it first$"):
            hosts.start(0)
        with pytest.raises(HostsError, match="no-such-program"):
            hosts.check(0, ["no-such-program"])


def test_a_machine_that_cannot_have_hosts_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another system and a missing tool are named, for the reason of a skipped test."""
    assert namespaces.way("darwin").problem == "network namespaces are Linux's, and this is darwin"
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("ip", "tc") else f"/bin/{tool}")
    assert namespaces.way("linux").problem == "iproute2 not installed"
    with pytest.raises(HostsError, match=r"^no hosts can be made here: iproute2 not installed; use vk\.launch, "):
        Hosts(2)


@needs_hosts
def test_a_kernel_without_a_module_is_told_from_missing_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing that the kernel refuses is named, with the tool's own words."""
    monkeypatch.setattr(
        namespaces, "_PROBES", (("ip link add name x type nosuchtype", "this kernel has no such type"),)
    )
    namespaces._probed.cache_clear()
    assert "this kernel has no such type: Error: Unknown device type." in namespaces.way().problem
    monkeypatch.undo()
    namespaces._probed.cache_clear()
    assert hosts_problem() is None


@needs_hosts
def test_a_process_without_the_right_to_namespaces_says_so() -> None:
    """Here the right is taken away for real, by a limit of 0 network namespaces."""
    ask = "from vizkit.runtime import namespaces; print(namespaces.way().problem)"
    deprived = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$0" -c "$1"'
    argv = ["unshare", "--user", "--map-root-user", "sh", "-c", deprived, sys.executable, ask]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("this process may make no namespaces (root, but without CAP_SYS_ADMIN): "), (
        done.stderr
    )
    assert "No space left on device" in done.stdout


@needs_hosts
@pytest.mark.skipif(os.geteuid() != 0, reason="this process is not root: all tests above ran in a user namespace")
def test_hosts_need_no_root() -> None:
    """Without CAP_SYS_ADMIN they live in a user namespace, with the same network."""
    script = textwrap.dedent(
        """
        import socket
        import torch, torch.distributed as dist
        from vizkit.runtime import namespaces
        from vizkit.runtime.hosts import Hosts

        def add():
            x = torch.ones(1)
            dist.all_reduce(x)
            return socket.gethostname(), x.item()

        with Hosts(2) as hosts:
            print(namespaces.way().in_user_namespace, hosts.launch(add).results)
            hosts.kill(1)
            hosts.start(1)
            print(hosts.check(1, ["getent", "hosts", "host0"]).split())
        """
    )
    drop = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    done = subprocess.run([*drop, sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True [('host0', 2.0), ('host1', 2.0)]\n['10.77.0.1', 'host0']\n", done.stderr
