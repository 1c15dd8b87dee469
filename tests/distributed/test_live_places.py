"""The live view where it is shown: a terminal, and a notebook that nobody watches."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import textwrap

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

SCRIPT = """
    import sys
    sys.path.insert(0, {repository!r})
    import vizkit as vk
    from tests.distributed.live_training import train
    if __name__ == "__main__":
        vk.launch(train, 150, world_size=2, live=True)
"""


def test_a_terminal_has_a_line_while_it_runs_and_the_summary_after(tmp_path, repository):
    """A pseudo terminal: the line is rewritten in place, then blanked."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(repository=str(repository))))
    here, there = pty.openpty()
    done = subprocess.Popen([sys.executable, script], stdout=there, stderr=there, close_fds=True)
    os.close(there)
    said = b""
    try:
        while data := os.read(here, 4096):
            said += data
    except OSError:  # a terminal whose last user has gone
        pass
    finally:
        os.close(here)
    assert done.wait(timeout=60) == 0, said
    lines = said.decode().split("\r")
    assert any("/150  " in line and "a step" in line and "\n" not in line for line in lines), lines
    assert "step 150 of 150 in " in said.decode()


CELL = """\
from tests.distributed.live_training import train
import vizkit as vk
run = vk.launch(train, 60, world_size=2, live=True)"""


def test_a_notebook_that_nobody_watches_keeps_the_summary_alone(repository):
    """nbclient, and so nbval: no widget, no state of one, nothing on standard error."""
    notebook = new_notebook(cells=[new_code_cell(CELL)])
    resources = {"metadata": {"path": str(repository)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources, allow_errors=False).execute()
    (output,) = notebook.cells[0].outputs
    assert output.name == "stdout"
    assert output.text.startswith("step 60 of 60 in ")
    assert "widgets" not in notebook.metadata
    assert "application/vnd.jupyter" not in nbformat.writes(notebook)
