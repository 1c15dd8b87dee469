"""Unusual functions, arguments, results and children of ranks: they work, or the message says what to do instead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import vizkit as vk
from tests.processes import marked_environment, new_mark, processes_with, wait_until_gone


def test_classes_with_slots_come_back(tmp_path) -> None:
    """A slotted dataclass and a named tuple of `__main__` travel both ways and keep their class."""
    script = tmp_path / "cell.py"
    script.write_text(
        textwrap.dedent("""
            import dataclasses, typing
            import vizkit as vk

            @dataclasses.dataclass(slots=True)
            class Point:
                x: int

            class Pair(typing.NamedTuple):
                a: int

            if __name__ == "__main__":
                point, pair = vk.launch(lambda p: (Point(p.x + 1), Pair(2)), Point(1), world_size=1).results[0]
                assert type(point) is Point and point == Point(2) and type(pair) is Pair and pair.a == 2
                print("same")
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "same\n", done.stderr


def test_a_rank_may_have_children(capsys) -> None:
    """Workers of a data loader and of a pool run in a rank, and end without a word."""

    def count() -> tuple[int, list[int]]:
        loader = DataLoader(torch.ones(16, 2), batch_size=4, num_workers=2)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return len(list(loader)), pool.map(abs, [-1, -2])

    assert vk.launch(count, world_size=2).results == [(4, [1, 2])] * 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the ranks of a forkserver")
def test_a_killed_notebook_takes_along_what_its_ranks_started() -> None:
    """Jupyter kills the kernel's process group; programs that a rank has started go too."""
    mark = new_mark()
    program = textwrap.dedent("""
        import subprocess, time
        import vizkit as vk

        def start() -> None:
            subprocess.Popen(["sleep", "300"])
            print("started", flush=True)
            time.sleep(300)

        vk.launch(start, world_size=2)
    """)
    notebook = subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        env=marked_environment(mark),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert notebook.stdout is not None
    assert notebook.stdout.readline() == "[rank 0] started\n"
    assert any(process.name() == "sleep" for process in processes_with(mark))
    os.killpg(notebook.pid, signal.SIGKILL)
    notebook.wait()
    notebook.stdout.close()
    assert wait_until_gone(lambda: processes_with(mark)) == []


class Reluctant:
    """Can be pickled, and not unpickled."""

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}

    def __setstate__(self, state: dict[str, int]) -> None:
        raise RuntimeError("not here")


def test_a_result_that_cannot_be_built_again_is_named() -> None:
    """The message says which rank, why, and what to return instead."""
    with pytest.raises(vk.TransportError, match=r"^the result of rank 0 .* RuntimeError: not here; return plain data"):
        vk.launch(Reluctant, world_size=1)


def test_numbers_of_numpy_are_numbers() -> None:
    """World size, seed and timeout may be numpy scalars; a timeout longer than torch can count is cut."""
    run = vk.launch(dist.get_rank, world_size=np.int64(1), seed=np.int64(3), timeout_s=np.float32(5))  # type: ignore[arg-type]
    assert run.results == vk.launch(dist.get_rank, world_size=1, timeout_s=1e300).results == [0]


def test_a_coroutine_function_is_refused() -> None:
    async def train() -> None: ...

    with pytest.raises(vk.InvalidInputError, match=r"no event loop runs on a rank; call asyncio\.run"):
        vk.launch(train)


def test_control_characters_are_only_text(capsys) -> None:
    """Output that holds the marks with which ranks tag their lines shows as it is."""

    def write() -> None:
        os.write(1, b"\x1ehello\x1f\n")
        print("\x1e12\x1fz")

    assert vk.launch(write, world_size=1).logs == ["\x1ehello\x1f\n\x1e12\x1fz\n"]
    assert capsys.readouterr().out == "[rank 0] \x1ehello\x1f\n[rank 0] \x1e12\x1fz\n"
