"""A function reaches the ranks, and what it returns and prints comes back."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import subprocess
import sys
import textwrap
import threading

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

import vizkit as vk


def add_up(value: float) -> float:
    x = torch.tensor(value) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return x.item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_returns_its_result(world_size: int) -> None:
    """One entry a rank, in order of ranks, at every world size from 1 on."""
    run = vk.launch(add_up, 2.0, world_size=world_size)
    assert run.results == [2.0 * sum(range(1, world_size + 1))] * world_size
    assert run.world_size == world_size


def test_arguments_and_keywords_travel() -> None:
    """Positional and keyword arguments reach the function, those of launch apart."""
    run = vk.launch(lambda a, *, b: (a, b, dist.get_rank()), {"x": [1]}, world_size=2, b=(2, 3))
    assert run.results == [({"x": [1]}, (2, 3), 0), ({"x": [1]}, (2, 3), 1)]


def test_things_typed_in_a_cell_travel_both_ways(tmp_path) -> None:
    """Closures, dataclasses and modules of `__main__` reach the ranks, and what comes back is of the same class."""
    script = tmp_path / "cell.py"
    script.write_text(
        textwrap.dedent(
            """
            import dataclasses, torch, vizkit as vk
            print("main runs")

            @dataclasses.dataclass
            class Point:
                x: int

            class Doubler(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.inner = torch.nn.Linear(2, 2)
                def forward(self, x):
                    return 2 * self.inner(x)

            offset = 40
            def shift(point, model):
                def inner():
                    return Point(point.x + offset)
                assert isinstance(point, Point)
                return inner(), model, lambda x: x + offset

            model = Doubler()
            run = vk.launch(shift, Point(2), model, world_size=2)
            point, back, function = run.results[1]
            assert isinstance(point, Point) and point == Point(42)
            assert isinstance(back, Doubler) and torch.equal(back.inner.weight, model.inner.weight)
            assert isinstance(back.inner.weight, torch.nn.Parameter) and function(2) == 42
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "main runs\n", "the ranks must not run the script's own lines again"


def test_tensors_arrive_with_their_ties() -> None:
    """Views still share memory, parameters are parameters, and odd dtypes, shapes and strides survive both ways."""

    def there_and_back(things):
        things["base"][0, 1] = 7.0
        assert things["view"][1] == 7.0
        return things

    base = torch.zeros(2, 3)
    tied = torch.nn.Linear(2, 2)
    things = {
        "base": base,
        "view": base[0],
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "tied": torch.nn.ModuleList([tied, tied]),
        "array": np.arange(4.0),
    }
    back = vk.launch(there_and_back, things, world_size=1).results[0]
    assert base[0, 1] == 0, "what a rank writes stays in the rank"
    back["view"][2] = 5.0
    assert back["base"][0, 2] == 5.0
    assert torch.equal(back["transposed"], things["transposed"])
    assert [back[name].dtype for name in ("bfloat16", "complex", "bool")] == [
        torch.bfloat16,
        torch.complex64,
        torch.bool,
    ]
    assert back["empty"].shape == (0, 3)
    assert back["sparse"].is_sparse
    assert type(back["parameter"]) is torch.nn.Parameter
    assert not back["parameter"].requires_grad
    assert back["tied"][0].weight is back["tied"][1].weight
    assert np.array_equal(back["array"], np.arange(4.0))


@pytest.mark.slow
def test_a_result_of_a_gigabyte_comes_back() -> None:
    """Results of any size come back from each rank, though ranks end and `/dev/shm` is small."""
    run = vk.launch(lambda: torch.full((125_000_000,), dist.get_rank() + 1.0), world_size=2)
    assert [r.numel() * r.element_size() for r in run.results] == [500_000_000] * 2
    assert [r[-1].item() for r in run.results] == [1.0, 2.0]


def test_ranks_are_seeded_alike_and_anew() -> None:
    """torch, numpy and random start from the same seed on each rank and in each launch; None leaves them alone."""

    def draw():
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    first = vk.launch(draw, world_size=2, seed=3).results
    assert first[0] == first[1] == vk.launch(draw, world_size=1, seed=3).results[0]
    assert first[0] != vk.launch(draw, world_size=1, seed=4).results[0]


def test_ranks_see_todays_environment(monkeypatch, tmp_path) -> None:
    """Environment, working folder and import path are those of the moment of the launch, not of the first one."""
    vk.launch(lambda: None, world_size=1)
    (tmp_path / "only_here.py").write_text("VALUE = 11")
    monkeypatch.setenv("VIZKIT_TEST_VALUE", "today")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def look():
        import only_here

        return (
            os.environ["VIZKIT_TEST_VALUE"],
            os.getcwd(),
            only_here.VALUE,
            os.environ["RANK"],
            os.environ["WORLD_SIZE"],
        )

    assert vk.launch(look, world_size=2).results[1] == ("today", str(tmp_path), 11, "1", "2")


def test_lines_show_whole_tagged_and_in_one_order(capsys) -> None:
    """Line k of every rank comes before line k + 1 of any; a communication starts the count anew."""

    def talk():
        rank = dist.get_rank()
        print("first", rank)
        print("sec", end="")
        print("ond", rank)
        if rank == 0:
            print("only rank 0")
        dist.barrier()
        print("after")
        print("no line break", end="")

    run = vk.launch(talk, world_size=3)
    expected = (
        "[rank 0] first 0\n[rank 1] first 1\n[rank 2] first 2\n"
        "[rank 0] second 0\n[rank 1] second 1\n[rank 2] second 2\n"
        "[rank 0] only rank 0\n"
        "[rank 0] after\n[rank 1] after\n[rank 2] after\n"
        "[rank 0] no line break\n[rank 1] no line break\n[rank 2] no line break\n"
    )
    assert capsys.readouterr().out == expected
    assert run.logs[1] == "first 1\nsecond 1\nafter\nno line break\n"


def test_lines_show_while_ranks_run(tmp_path) -> None:
    """A line that all ranks have passed shows before the launch ends."""
    script = tmp_path / "live.py"
    script.write_text(
        textwrap.dedent(
            """
            import time, sys, torch.distributed as dist, vizkit as vk
            def talk():
                print("now")
                dist.barrier()
                time.sleep(1.5)
                print("later")
            class Stamp:
                def write(self, text):
                    for line in text.splitlines():
                        sys.__stdout__.write(f"{time.monotonic()} {line}\\n")
                def flush(self): pass
            sys.stdout = Stamp()
            vk.launch(talk, world_size=2)
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    times = {line.split(" ", 1)[1]: float(line.split()[0]) for line in done.stdout.splitlines()}
    assert times["[rank 0] later"] - times["[rank 1] now"] > 1.0, done.stdout + done.stderr


def test_errors_and_c_output_show_too(capfd) -> None:
    """Standard error goes to standard error, and what a child process writes is tagged like the rest."""

    def talk():
        print("warned", file=sys.stderr)
        os.system("echo from a child")

    vk.launch(talk, world_size=1)
    out, err = capfd.readouterr()
    assert "[rank 0] warned" in err
    assert "[rank 0] from a child" in out


def test_nothing_is_reachable_from_another_machine() -> None:
    """Whatever a rank listens on, it listens on loopback."""

    def listening():
        dist.all_reduce(torch.ones(1))
        own = psutil.Process().net_connections(kind="inet")
        return [c.laddr.ip for c in own if c.status == psutil.CONN_LISTEN]

    addresses = [ip for found in vk.launch(listening, world_size=2).results for ip in found]
    assert addresses
    assert set(addresses) <= {"127.0.0.1", "::1"}


def test_threads_follow_the_containers_cores() -> None:
    """Each rank computes with cores // ranks threads, at least one."""
    cores = len(os.sched_getaffinity(0))
    for world_size in (1, 4):
        run = vk.launch(torch.get_num_threads, world_size=world_size)
        assert run.results == [max(1, min(cores, run.cores) // world_size)] * world_size


def test_cpu_hides_gpus() -> None:
    """With device="cpu" a rank sees no GPU, whatever the machine has."""
    run = vk.launch(lambda: (str(vk.device()), torch.cuda.is_available()), world_size=1, device="cpu")
    assert run.results == [("cpu", False)]


def test_the_summary_tells_what_a_person_wants_to_know() -> None:
    """Ranks, device with its reason, backend, seconds, bytes moved, slowest rank, clock."""

    def work():
        with vk.span("forward", kind="F"):
            torch.randn(200, 200) @ torch.randn(200, 200)
        dist.all_reduce(torch.ones(1000))

    text = repr(vk.launch(work, world_size=2))
    for fact in ("2 ranks on cpu", "backend gloo", "wall clock", "8 kB moved", "slowest rank: ", "virtual clock"):
        assert fact in text, text


def test_replay_keeps_every_byte() -> None:
    """The virtual trace moves what the wall trace moved."""
    run = vk.launch(add_up, 1.0, world_size=3)
    moved = [vk.metrics.traffic(trace).wire_bytes.sum() for trace in (run.trace, run.replay())]
    assert moved[0] == moved[1] > 0
    assert run.trace.clock == "wall"
    assert run.replay().clock == "virtual"
    assert list(run.collectives["op"]) == ["all_reduce"]


def test_ten_launches_in_a_row_and_two_at_once() -> None:
    """Launches neither collide nor wear out."""
    results = {}

    def repeat(name):
        results[name] = [vk.launch(add_up, 1.0, world_size=2).results[0] for _ in range(5)]

    threads = [threading.Thread(target=repeat, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"a": [3.0] * 5, "b": [3.0] * 5}


@pytest.mark.parametrize("environment", [{"VIZKIT_START_METHOD": "spawn"}, {"VIZKIT_NO_MEMFD": "1"}])
def test_it_works_without_forkserver_or_memfd(environment, tmp_path) -> None:
    """Where the platform lacks one of them, ranks are spawned or objects travel in files."""
    script = tmp_path / "fallback.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, torch.distributed as dist, vizkit as vk
            print("main runs")
            class Mine:
                pass
            def work(x):
                dist.all_reduce(x)
                return x, Mine()
            run = vk.launch(work, torch.ones(1000), world_size=2)
            x, mine = run.results[1]
            assert x.sum() == 2000 and isinstance(mine, Mine)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=os.environ | environment
    )
    assert (done.returncode, done.stdout) == (0, "main runs\n"), done.stderr


def test_progress_is_for_people_only(capsys) -> None:
    """A long step reports how far it is without leaving a trace in captured output."""
    run = vk.launch(lambda: sum(vk.progress(range(10), label="step")), world_size=2)
    assert run.results == [45, 45]
    assert capsys.readouterr() == ("", "")


@dataclasses.dataclass(frozen=True)
class Refused:
    arguments: dict
    message: str


@pytest.mark.parametrize(
    "case",
    [
        Refused({"world_size": 0}, "world_size=0: a launch has at least one rank; use world_size=1 for one process"),
        Refused({"world_size": -1}, "world_size=-1: a launch has at least one rank; use world_size=1 for one process"),
        Refused(
            {"world_size": "four"}, "world_size='four': is a whole number of ranks; use world_size=2 or another int"
        ),
        Refused({"world_size": 2.0}, "world_size=2.0: is a whole number of ranks; use world_size=2 or another int"),
        Refused({"world_size": True}, "world_size=True: is a whole number of ranks; use world_size=2 or another int"),
        Refused({"world_size": 500}, "world_size=500: one machine runs at most 64 ranks; use world_size=64 or fewer"),
        Refused({"timeout_s": 0}, "timeout_s=0: is a positive number of seconds; use timeout_s=30"),
        Refused({"timeout_s": float("nan")}, "timeout_s=nan: is a positive number of seconds; use timeout_s=30"),
        Refused({"seed": "x"}, "seed='x': is None or a whole number from 0 on; use seed=0"),
        Refused({"device": "tpu"}, 'device=\'tpu\': is not a device; use "auto", "cpu" or "cuda"'),
    ],
    ids=lambda case: str(case.arguments),
)
def test_arguments_that_cannot_work_are_refused(case: Refused) -> None:
    """The message says the value, the rule and the remedy, and nothing is started."""
    with pytest.raises(vk.InvalidInputError) as caught:
        vk.launch(add_up, 1.0, **case.arguments)
    assert str(caught.value) == case.message


def test_a_call_in_place_of_a_function_is_refused() -> None:
    """`vk.launch(train())` is the usual slip."""
    with pytest.raises(
        vk.InvalidInputError, match=re.escape("fn=3.0: is called on each rank; pass the function itself")
    ):
        vk.launch(3.0)


def test_world_size_fits_the_memory(monkeypatch) -> None:
    """A launch that the machine's free memory cannot hold is refused with the number that fits."""
    monkeypatch.setattr("vizkit.runtime.launcher.available_memory_bytes", lambda: 100_000_000)
    with pytest.raises(vk.InvalidInputError, match="about 40 MB and 100 MB are free; use world_size=2"):
        vk.launch(add_up, 1.0, world_size=8)


def test_what_cannot_be_pickled_is_named() -> None:
    """The message names the argument, and its type."""
    with pytest.raises(vk.TransportError, match=r"argument 2 \(lock\) cannot travel to a rank: .*open files, locks"):
        vk.launch(add_up, 1.0, threading.Lock(), world_size=1)
    with pytest.raises(vk.TransportError, match=r"argument 'value' \(generator\) cannot travel"):
        vk.launch(add_up, world_size=1, value=(i for i in range(3)))


def test_a_rank_cannot_launch_ranks() -> None:
    """The message says where to launch instead."""
    with pytest.raises(vk.RankFailedError, match=r"a rank cannot launch ranks; call vk\.launch in the notebook"):
        vk.launch(lambda: vk.launch(add_up, 1.0, world_size=1), world_size=1)
