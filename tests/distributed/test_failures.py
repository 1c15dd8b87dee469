"""Every way a launch can fail: the report leads with the rank at fault, no process stays, and the next launch works."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pytest
import torch
import torch.distributed as dist

import vizkit as vk

PATIENCE_S = 60  # a hang would last timeout_s, which these launches leave at 100 seconds


def rank() -> int:
    return dist.get_rank()


def all_reduce(*shape: int, dtype: torch.dtype = torch.float32, group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(torch.ones(shape, dtype=dtype), group=group)


def one_raises() -> None:
    all_reduce(4)
    if rank() == 2:
        raise ValueError("bad shard")
    all_reduce(4)


def one_raises_late() -> None:
    if rank() == 1:
        time.sleep(0.2)
        raise KeyError("missing")
    dist.barrier()


def one_exits_cleanly() -> None:
    if rank() == 1:
        sys.exit(0)
    dist.barrier()


def one_leaves_at_once() -> None:
    if rank() == 1:
        os._exit(0)
    dist.barrier()


def one_is_killed() -> None:
    if rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(4)


def one_segfaults() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    all_reduce(4)


def one_returns_early() -> None:
    for step in range(5):
        if rank() == 2 and step == 3:
            return
        all_reduce(4)


def one_skips_a_collective() -> None:
    for step in range(3):
        if not (rank() == 1 and step == 1):
            all_reduce(4)


def different_collectives() -> None:
    if rank() == 0:
        dist.broadcast(torch.ones(4), src=0)
    else:
        all_reduce(4)


def different_roots() -> None:
    dist.broadcast(torch.ones(4), src=1 if rank() == 3 else 0)


def different_reductions() -> None:
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank() == 1 else dist.ReduceOp.SUM)


def mismatched_shapes() -> None:
    all_reduce(5 if rank() == 2 else 4)


def mismatched_dtypes() -> None:
    all_reduce(4, dtype=torch.int32 if rank() == 1 else torch.float32)


def mismatched_message() -> None:
    if rank() == 0:
        dist.send(torch.ones(4), dst=1)
    elif rank() == 1:
        time.sleep(0.1)
        dist.recv(torch.ones(5), src=0)
    dist.barrier()


def all_send_first() -> None:
    size = dist.get_world_size()
    dist.send(torch.ones(1_000_000), dst=(rank() + 1) % size)
    dist.recv(torch.ones(1_000_000), src=(rank() - 1) % size)


def all_receive_first() -> None:
    size = dist.get_world_size()
    dist.recv(torch.ones(2), src=(rank() - 1) % size)
    dist.send(torch.ones(2), dst=(rank() + 1) % size)


def groups_in_opposite_order() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    if rank() < 2:
        for group in groups if rank() == 0 else reversed(groups):
            dist.all_reduce(torch.ones(3), group=group)


def one_skips_backward() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    if rank() != 1:
        loss.backward()


def one_waits_for_a_message_nobody_sends() -> None:
    if rank() == 0:
        dist.recv(torch.ones(2))


def unused_parameter() -> None:
    class Forgetful(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.forgotten = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = torch.nn.parallel.DistributedDataParallel(Forgetful())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


@dataclass(frozen=True)
class Fault:
    function: Callable[[], None]
    error: type[vk.RankFailedError]
    rank: int
    first_line: str
    """A regular expression for the first line of the message."""
    other: tuple[int, str] = (0, "")
    """Another rank, and what its report says."""


STUCK, FAILED = vk.RanksStuckError, vk.RankFailedError
FAULTS = [
    Fault(one_raises, FAILED, 2, r"rank 2 raised ValueError: bad shard", (0, "in all_reduce 2 of group (0, 1, 2, 3)")),
    Fault(one_raises_late, FAILED, 1, r"rank 1 raised KeyError: 'missing'", (0, "in barrier 1 of group (0, 1, 2, 3)")),
    Fault(
        one_exits_cleanly, FAILED, 1, r"rank 1 called sys.exit\(0\) and has no result; return from the function instead"
    ),
    Fault(one_leaves_at_once, FAILED, 1, r"rank 1 exited with code 0 and has no result"),
    Fault(one_is_killed, FAILED, 3, r"rank 3 was killed by SIGKILL"),
    Fault(one_segfaults, FAILED, 1, r"rank 1 was killed by SIGSEGV"),
    Fault(
        one_returns_early,
        STUCK,
        2,
        r"the ranks wait for each other and would do so for ever: rank 2 returned after 3 all_reduces; "
        r"ranks 0, 1, 3 wait in all_reduce 4 of group \(0, 1, 2, 3\), float32 \[4\], which rank 2 never entered; ",
        (3, "in all_reduce 4 of group (0, 1, 2, 3)"),
    ),
    Fault(
        one_skips_a_collective,
        STUCK,
        1,
        r".*: rank 1 returned after 2 all_reduces; ranks 0, 2, 3 wait in all_reduce 3 .* which rank 1 never entered; ",
    ),
    Fault(
        different_collectives,
        FAILED,
        0,
        r"rank 0 does not fit the others: in operation 1 of group \(0, 1, 2, 3\), rank 0 calls broadcast but "
        r"rank 1 calls "
        r"all_reduce; all ranks of a group have to call the same collectives in the same order",
    ),
    Fault(
        different_roots,
        FAILED,
        3,
        r"rank 3 does not fit the others: .*, rank 0 calls broadcast with root 0 but rank 3 calls broadcast "
        r"with root 1; ",
    ),
    Fault(
        different_reductions,
        FAILED,
        1,
        r"rank 1 does not fit the others: .*, rank 0 calls all_reduce with SUM but rank 1 calls all_reduce with MAX; ",
    ),
    Fault(
        mismatched_shapes,
        FAILED,
        2,
        r"rank 2 does not fit the others: .*, rank 0 passes float32 \[4\] but rank 2 passes float32 \[5\]; the "
        r"dtype and "
        r"the number of elements have to be the same on each rank",
    ),
    Fault(
        mismatched_dtypes,
        FAILED,
        1,
        r"rank 1 does not fit the others: .*, rank 0 passes float32 \[4\] but rank 1 passes int32 \[4\]; ",
    ),
    Fault(
        mismatched_message,
        FAILED,
        1,
        r"ranks 0 and 1 do not fit together: in message 1 between the two, rank 0 sends float32 \[4\] but rank "
        r"1 receives "
        r"float32 \[5\]; ",
    ),
    Fault(
        all_send_first,
        STUCK,
        0,
        r".*: ranks wait for each other in a circle \(0 -> 1 -> 2 -> 3 -> 0\); rank 0 waits in send 1 to rank 1",
    ),
    Fault(
        all_receive_first,
        STUCK,
        0,
        r".*in a circle \(0 -> 3 -> 2 -> 1 -> 0\); rank 0 waits in receive 1 from rank 3, "
        r"float32 \[2\], which rank 3 never sent",
    ),
    Fault(
        groups_in_opposite_order,
        STUCK,
        0,
        r".*in a circle \(0 -> 1 -> 0\); rank 0 waits in all_reduce 1 of group \(0, 1\)",
    ),
    Fault(one_skips_backward, STUCK, 1, r".*: rank 1 returned after .*; ranks 0, 2, 3 wait in all_reduce"),
    Fault(one_waits_for_a_message_nobody_sends, STUCK, 1, r".*rank 0 waits in receive 1 from any rank"),
    Fault(unused_parameter, FAILED, 0, r"rank \d raised RuntimeError: Expected to have finished reduction"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.function.__name__)
def test_a_fault_ends_in_a_diagnosis(fault: Fault) -> None:
    """In seconds, with the rank at fault first, each rank reported, no process left, and the next launch working."""
    started = time.monotonic()
    with pytest.raises(vk.RankFailedError) as caught:
        vk.launch(fault.function, world_size=4, timeout_s=100)
    assert time.monotonic() - started < PATIENCE_S
    error = caught.value
    assert type(error) is fault.error
    lines = str(error).splitlines()
    assert re.match(fault.first_line, lines[0]), lines[0]
    if "rank \\d" not in fault.first_line[:9]:
        assert error.rank == fault.rank
    reports = [line for line in lines if re.match(r"  rank \d: ", line)]
    assert len(reports) == len(error.ranks) == len(error.logs) == 4
    assert reports[0].startswith(f"  rank {error.rank}: ")
    other, text = fault.other
    assert text in str(error.ranks[other])
    assert vk.launch(rank, world_size=2).results == [0, 1]


def test_the_unused_parameters_are_named() -> None:
    """What DDP calls "finished reduction" comes with the names of the parameters that got no gradient."""
    with pytest.raises(
        vk.RankFailedError, match=r"forgotten\.weight, forgotten\.bias|forgotten\.bias, forgotten\.weight"
    ):
        vk.launch(unused_parameter, world_size=2)


def test_a_slow_rank_is_told_apart_from_a_hang() -> None:
    """Where a rank only computes for longer than the timeout allows, the message says so, and names it."""

    def slow() -> None:
        dist.barrier()
        if rank() == 1:
            end = time.monotonic() + 8
            while time.monotonic() < end:
                torch.ones(100).sum()
        all_reduce(2)

    with pytest.raises(vk.RanksStuckError) as caught:
        vk.launch(slow, world_size=2, timeout_s=2)
    assert caught.value.rank == 1
    assert "took longer than timeout_s=2 allows: rank 1 has entered 1 communication, rank 0 more" in str(caught.value)


def test_the_timeout_holds_while_the_backend_connects() -> None:
    """gloo tries to connect for several times its timeout; the launch ends after the timeout that was asked for."""

    def absent() -> None:
        if rank() == 1:
            time.sleep(60)
        all_reduce(2)

    started = time.monotonic()
    with pytest.raises(vk.RanksStuckError, match="took longer than timeout_s=3 allows: rank 1 has entered 0") as caught:
        vk.launch(absent, world_size=2, timeout_s=3)
    assert time.monotonic() - started < 20
    assert caught.value.rank == 1


def test_a_folder_too_deep_for_a_socket_is_named(tmp_path) -> None:
    """Where TMPDIR is too long for the forkserver's socket, the message says so, and what to do."""
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    script = (
        "import vizkit as vk\ntry:\n    vk.launch(int, world_size=1)\nexcept vk.InvalidInputError as e:\n    print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TMPDIR": str(deep)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "is too long a path for a socket; use a short one: TMPDIR=/tmp" in done.stdout, done.stderr


def test_slow_ranks_without_a_hang_are_left_alone() -> None:
    """Waiting for a rank that computes, sleeps or is busy in another group is no hang."""

    def late() -> float:
        if rank() == 1:
            time.sleep(3)
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    assert vk.launch(late, world_size=3).results == [3.0] * 3


def test_a_result_that_cannot_travel_is_named() -> None:
    """The message says which rank, which type, and what to return instead."""
    with pytest.raises(
        vk.RankFailedError, match=r"the result of rank \d \(generator\) cannot travel back: cannot pickle"
    ):
        vk.launch(lambda: (i for i in range(3)), world_size=2)


def test_an_exception_keeps_its_causes() -> None:
    """Cause, notes and the source line of each frame stand in the remote traceback."""

    def fail() -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            problem = RuntimeError("outer")
            problem.add_note("a note")
            raise problem from error

    with pytest.raises(vk.RankFailedError) as caught:
        vk.launch(fail, world_size=1)
    text = caught.value.remote_traceback
    assert text.index("KeyError: 'inner'") < text.index("direct cause") < text.index("RuntimeError: outer\na note")
    assert 'raise KeyError("inner")' in text
    assert "worker.py" not in text


def test_what_was_printed_before_a_failure_is_shown(capsys) -> None:
    """Lines that waited for their turn come out, in order, and stand in `logs`."""

    def talk() -> None:
        for step in range(3):
            if rank() == 1:
                print("step", step)
        if rank() == 1:
            raise ValueError("after talking")
        dist.barrier()

    with pytest.raises(vk.RankFailedError) as caught:
        vk.launch(talk, world_size=2)
    assert capsys.readouterr().out == "[rank 1] step 0\n[rank 1] step 1\n[rank 1] step 2\n"
    assert caught.value.logs == ["", "step 0\nstep 1\nstep 2\n"]


def test_an_exception_that_hides_itself_is_still_reported() -> None:
    """An exception whose text cannot be made, or whose class cannot be pickled, does not hide the failure."""

    class ShyError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

        def __reduce__(self):
            raise RuntimeError("no pickle")

    def fail() -> None:
        raise ShyError

    with pytest.raises(vk.RankFailedError, match=r"ShyError: .*its message cannot be shown"):
        vk.launch(fail, world_size=1)


NOTEBOOK_LIKE = """
import os, signal, sys, time, threading, torch, torch.distributed as dist, vizkit as vk

def stubborn():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    dist.barrier()
    while True:
        time.sleep(0.1)

def forever():
    dist.barrier()
    print("ready")
    dist.barrier()
    while True:
        time.sleep(0.1)
"""


def start(body: str, tmp_path) -> subprocess.Popen[str]:
    script = tmp_path / "cell.py"
    script.write_text(NOTEBOOK_LIKE + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, "-u", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until(process: subprocess.Popen[str], text: str) -> str:
    seen = ""
    assert process.stdout is not None
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came: {seen}")


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("function", ["forever", "stubborn"])
def test_stop_ends_all_ranks(function: str, tmp_path) -> None:
    """Stop interrupts the kernel's whole process group, as Jupyter does; ranks that ignore SIGTERM are killed."""
    process = start(
        f"""
        try:
            vk.launch({function}, world_size=2)
        except KeyboardInterrupt as stop:
            print("stopped:", stop)
        print(vk.launch(lambda: dist.get_rank(), world_size=2).results)
        import psutil
        print("ranks left:", sum("vizkit-rank" in " ".join(p.cmdline()) for p in psutil.Process().children(True)))
        """,
        tmp_path,
    )
    read_until(process, "[rank 1] ready")
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert "[0, 1]" in rest, rest
    if function == "stubborn":
        assert "stopped: ranks 0, 1 did not stop when asked and were killed" in rest, rest
    else:
        assert "stopped: the ranks were stopped" in rest, rest


def test_a_killed_kernel_takes_its_ranks_along(tmp_path) -> None:
    """When the notebook's kernel is killed, ranks and forkserver go too, within seconds."""
    process = start("vk.launch(stubborn, world_size=3)", tmp_path)
    read_until(process, "[rank 2] ready")
    family = descendants(process)
    assert len(family) >= 4
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []


def test_two_notebooks_at_once(tmp_path) -> None:
    """Launches of two kernels at the same moment do not meet."""
    body = "print([vk.launch(lambda: dist.get_world_size(), world_size=n).results for n in (2, 3, 2)])"
    first, second = (tmp_path / name for name in "ab")
    first.mkdir()
    second.mkdir()
    running = [start(body, folder) for folder in (first, second)]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert outputs == ["[[2, 2], [3, 3, 3], [2, 2]]\n"] * 2


def test_a_dead_forkserver_is_replaced() -> None:
    """Should the process from which ranks are born die, the next launch starts another."""
    vk.launch(rank, world_size=1)
    servers = [p for p in psutil.Process().children() if "vizkit.runtime.preload" in " ".join(p.cmdline())]
    assert servers
    for server in servers:
        server.kill()
        server.wait()
    assert vk.launch(rank, world_size=2).results == [0, 1]
