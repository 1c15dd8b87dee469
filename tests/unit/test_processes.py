"""The instrument that finds left processes is itself seen to find them."""

from __future__ import annotations

import subprocess
import sys

import psutil

from tests.processes import leftover_descendants, marked_environment, new_mark, processes_with, stop, wait_until_gone


def test_a_child_is_found_and_its_end_is_noticed():
    """A sleeping child is a leftover; once it ends, nothing is left."""
    before = set(leftover_descendants())  # such as the browser that other tests of this run drive

    def left_by_this_test() -> list[psutil.Process]:
        return [process for process in leftover_descendants() if process not in before]

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert [process.pid for process in left_by_this_test()] == [child.pid]
        assert wait_until_gone(left_by_this_test, within_s=0)[0].startswith(f"{child.pid} (")
    finally:
        stop(left_by_this_test())
    child.wait()
    assert wait_until_gone(left_by_this_test) == []


def test_an_orphan_is_found_by_its_mark():
    """A grandchild whose parent has ended belongs to nobody, and is found all the same."""
    orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    mark = new_mark()
    before = leftover_descendants()
    subprocess.run([sys.executable, "-c", orphan], env=marked_environment(mark), check=True)
    try:
        assert len(processes_with(mark)) == 1
        assert leftover_descendants() == before
    finally:
        stop(processes_with(mark))
    assert wait_until_gone(lambda: processes_with(mark)) == []
