"""The instrument that finds left processes is itself seen to find them."""

from __future__ import annotations

import subprocess
import sys

from tests.processes import leftover_descendants, marked_environment, new_mark, processes_with, stop, wait_until_gone


def test_a_child_is_found_and_its_end_is_noticed():
    """A sleeping child is a leftover; once it ends, nothing is left."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert child.pid in [process.pid for process in leftover_descendants()]
        assert f"{child.pid} (" in wait_until_gone(leftover_descendants, within_s=0)[0]
    finally:
        stop(leftover_descendants())
    child.wait()
    assert wait_until_gone(leftover_descendants) == []


def test_an_orphan_is_found_by_its_mark():
    """A grandchild whose parent has ended belongs to nobody, and is found all the same."""
    orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    mark = new_mark()
    subprocess.run([sys.executable, "-c", orphan], env=marked_environment(mark), check=True)
    try:
        assert len(processes_with(mark)) == 1
        assert leftover_descendants() == []
    finally:
        stop(processes_with(mark))
    assert wait_until_gone(lambda: processes_with(mark)) == []
