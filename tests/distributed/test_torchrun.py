"""`python -m vizkit run`, as real processes: under torchrun, with a restart; and alone, with clocks an hour apart."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import vizkit as vk
from vizkit.cli import main
from vizkit.exporting import export
from vizkit.formats.gathered import GatheredRun
from vizkit.formats.rank_file import Outcome, read_rank_file
from vizkit.formats.rank_folder import rank_files, read_run
from vizkit.record import RankRecord, SpanOpened

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * 240)]

PATIENCE_S = 240  # importing torch in several processes takes long where many share two cores
AHEAD_S = 3600
WIDTH = 16


class Model(torch.nn.Module):
    """Two layers, seeded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train(steps: int, lr: float = 0.1, fails_at: int = -1) -> list[float]:
    """Data-parallel steps; in its first attempt rank 1 fails at step `fails_at`."""
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for step in range(steps):
        with vk.span("forward", kind="F", microbatch=step):
            loss = model(torch.full((4, WIDTH), 0.1 * (rank + 1))).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 6))
        if step == fails_at and rank == 1 and os.environ.get("VIZKIT_ATTEMPT") == "0":
            raise ValueError("planted failure")
    print(f"last loss {losses[-1]}")
    return losses


def meet_and_hang(ready: str) -> None:
    """Twenty all-reduces; then rank 0 enters one more, and the others never come."""
    x = torch.ones(1000)
    for _ in range(20):
        dist.all_reduce(x)
        time.sleep(0.005)
    open(f"{ready}{dist.get_rank()}", "w").close()
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    time.sleep(PATIENCE_S)


def environment(folder: Path, **more: str) -> dict[str, str]:
    source = Path(vk.__file__).parents[1]
    return {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{source}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **more,
    }


@dataclass
class Finished:
    """A torchrun that has ended."""

    folder: Path
    status: int
    output: str

    @functools.cached_property
    def run(self) -> GatheredRun:
        return read_run(self.folder / "traces")


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """An exported function under torchrun with two ranks, which fails in the first attempt and is started again."""
    folder = tmp_path_factory.mktemp("torchrun")
    export(train, folder / "exported_training.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["-m", "vizkit", "run", "exported_training:train", "--trace", "traces", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--", "3", "lr=0.05", "fails_at=1"],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    return Finished(folder, done.returncode, done.stdout)


@pytest.fixture(scope="module")
def launched() -> vk.Run:
    """The same function from the notebook's side."""
    return vk.launch(train, 3, lr=0.05, world_size=2, device="cpu")


def test_torchrun_gives_what_launch_gives(restarted: Finished, launched: vk.Run):
    """The same losses on each rank, the same collectives with the same bytes, the same program with unit costs."""
    assert restarted.status == 0, restarted.output
    run = restarted.run
    assert run.results == launched.results
    assert run.collectives.to_dict() == launched.collectives.to_dict()
    units = {"durations": {"F": 1, "B": 2, "optimizer": 1}, "link": None}
    assert vk.as_grid(run.replay(**units)) == vk.as_grid(launched.replay(**units))
    theirs, ours = (vk.metrics.traffic(some.replay()).wire_bytes.tolist() for some in (launched, run))
    assert ours == theirs


def test_each_line_begins_with_its_rank(restarted: Finished, launched: vk.Run):
    """Whole lines, tracebacks too, and the words of the function itself."""
    for rank, losses in enumerate(launched.results):
        assert f"[rank {rank}] last loss {losses[-1]}\n" in restarted.output
    assert "[rank 1] ValueError: planted failure\n" in restarted.output
    assert re.search(r'\[rank 1\]   File ".*exported_training.py", line \d+, in train', restarted.output)


def test_the_first_rank_says_where_the_records_are(restarted: Finished):
    """Once, at the end of the attempt that went well, with the command that shows them."""
    said = "traces holds a file for each rank of this node; python -m vizkit report traces shows them\n"
    assert restarted.output.count(said) == 1


def test_the_restart_is_an_attempt_of_its_own(restarted: Finished):
    """Nothing is overwritten; the trace has both attempts and the gap between them."""
    names = [path.name for path in rank_files(restarted.folder / "traces")]
    assert names == [f"rank{rank:05d}-attempt{attempt:02d}.jsonl.gz" for rank in range(2) for attempt in range(2)]
    first, second = restarted.run.attempts
    assert str(first.endings[1]) == "raised ValueError: planted failure"
    assert first.endings[0].outcome in (Outcome.RAISED, Outcome.STOPPED)
    assert {ending.outcome for ending in second.endings.values()} == {Outcome.RETURNED}
    trace = restarted.run.trace
    gaps = [span for span in trace if span.name == "restart 1"]
    assert [span.rank for span in gaps] == [0, 1]
    busy = trace.filter(trace.name != trace.tables["name"].index("restart 1"))
    for gap in gaps:
        mine = busy.filter(rank=gap.rank)
        assert not ((mine.start_ns < gap.end_ns) & (mine.end_ns > gap.start_ns) & (mine.end_ns > mine.start_ns)).any()
    assert [steps_of(attempt.record.ranks[1]) for attempt in (first, second)] == [[0, 1], [0, 1, 2]]


def steps_of(rank: RankRecord) -> list[int]:
    """The microbatches of the forwards that a rank opened."""
    return [
        event.label.microbatch for event in rank.events if isinstance(event, SpanOpened) and event.label.kind == "F"
    ]


def test_the_report_says_it_all(restarted: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One page, from the folder alone."""
    page = tmp_path / "page.html"
    assert main(["report", str(restarted.folder / "traces"), "-o", str(page)]) == 0
    said = capsys.readouterr().out
    assert "attempt 0: 2 ranks" in said
    assert "rank 1 raised ValueError: planted failure" in said
    assert "attempt 1: 2 ranks" in said
    assert page.read_text(encoding="utf-8").count('class="figure"') == 3


def time_namespace() -> list[str]:
    """Words in front of a command that put its monotonic clock an hour ahead; none where that is not allowed."""
    words = ["unshare", "--time", "--monotonic", str(AHEAD_S), "--fork", "--kill-child"]
    try:
        return words if subprocess.run([*words, "true"], capture_output=True).returncode == 0 else []
    except OSError:
        return []


def wait_for(condition: Callable[[], bool], processes: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        assert [process.poll() for process in processes] == [None] * len(processes), "a rank has ended"
        time.sleep(0.05)


@dataclass
class Ended:
    """Two ranks of `env://`, ended by SIGTERM; whether the second had a clock of its own."""

    folder: Path
    statuses: list[int]
    is_skewed: bool

    @functools.cached_property
    def run(self) -> GatheredRun:
        return read_run(self.folder)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """Started without torchrun, as Kubernetes or mpirun would; rank 1 lives an hour later, where the kernel lets us."""
    folder = tmp_path_factory.mktemp("stopped")
    export(meet_and_hang, folder / "exported_hang.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    skew = time_namespace()
    command = [sys.executable, "-m", "vizkit", "run", "exported_hang:meet_and_hang", "--trace", "traces"]
    command += ["--device", "cpu", "--", str(folder / "ready")]
    processes = [
        subprocess.Popen(
            [*(skew if rank else []), *command],
            cwd=folder,
            env=environment(
                folder, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            ),
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        wait_for(lambda: all((folder / f"ready{rank}").exists() for rank in range(2)), processes)
        time.sleep(0.5)  # rank 0 is inside its all-reduce by then
        for process in processes:
            (inner,) = psutil.Process(process.pid).children() if process is processes[1] and skew else [process]
            inner.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
        yield Ended(folder / "traces", [process.returncode for process in processes], bool(skew))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_sigterm_finds_a_record_also_of_a_blocked_rank(stopped: Ended):
    """Rank 0 was inside the library, where no exception reaches it; its last wait is there all the same."""
    run = stopped.run
    assert {str(ending) for ending in run.last.endings.values()} == {"stopped SIGTERM"}
    assert stopped.statuses[0] == 128 + signal.SIGTERM
    assert [len(list(rank.calls)) for rank in run.record.ranks] == [21, 20]
    waits = run.trace.filter(rank=0, kind="wait")
    last = max(waits, key=lambda span: span.end_ns)
    assert last.name == "wait for all_reduce"
    assert last.duration_ns > 400_000_000
    assert last.end_ns >= run.trace.filter(rank=0).end_ns.max() - 1_000_000


def test_clocks_an_hour_apart_come_together_within_the_bound(stopped: Ended):
    """The kernel says what the truth is: a time namespace that is 3,600 s ahead, to the nanosecond."""
    if not stopped.is_skewed:
        pytest.skip("this kernel or user may not make time namespaces (unshare --time)")
    raw = [read_rank_file(path).body.record.start_wall_ns for path in rank_files(stopped.folder)]
    assert raw[1] - raw[0] > (AHEAD_S - PATIENCE_S) * 1e9
    shown = [rank.start_wall_ns for rank in stopped.run.record.ranks]
    true_ns = raw[1] - AHEAD_S * 1_000_000_000 - raw[0]
    assert abs((shown[1] - shown[0]) - true_ns) / 1e9 <= stopped.run.clock_error_s
    assert 0 < stopped.run.clock_error_s < 0.1
