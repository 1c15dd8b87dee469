"""Every notebook runs from top to bottom, and says again exactly what it said when it was saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import marked_environment, new_mark, processes_with, stop, wait_until_gone

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
NBVAL = ("-m", "pytest", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=120", "--color=no")
OF_ITS_OWN = ("-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=0")


def run_strictly(path: Path, *, within_s: float = 300) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """nbval's answer, with nothing sanitised, and the processes that the notebook left."""
    mark = new_mark()
    done = subprocess.run(
        [sys.executable, *NBVAL, *OF_ITS_OWN, str(path)],
        env=marked_environment(mark),
        capture_output=True,
        text=True,
        timeout=within_s,
    )
    left = wait_until_gone(lambda: processes_with(mark))
    stop(processes_with(mark))
    return done, left


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_says_the_same_again(path: Path):
    """nbval, strict: an output that differs from the saved one fails, and so does a process left behind."""
    done, left = run_strictly(path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert left == []
