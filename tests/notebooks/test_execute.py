"""Saving a notebook twice gives the same file, and the strict run catches one that was tampered with."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.notebooks.execute import execute, main
from tests.notebooks.test_run import run_strictly


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    path = tmp_path / "n.ipynb"
    cells = [
        new_markdown_cell("# T"),
        new_code_cell("print(1)\nprint(2)"),
        new_code_cell("6 * 7"),
        new_code_cell("6 * 7"),
    ]
    cells[1].metadata["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00"}
    nbformat.write(
        new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "mine"}}), path
    )
    return path


@pytest.mark.slow
def test_two_saves_are_one_file(notebook: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Byte for byte; counts start at one, metadata are plain, equal cells have different names."""
    monkeypatch.setattr(sys, "argv", ["execute", str(notebook)])
    assert main() == 0
    first = notebook.read_bytes()
    assert main() == 0
    assert notebook.read_bytes() == first
    node = nbformat.read(notebook, as_version=4)
    assert [cell.get("execution_count") for cell in node.cells] == [None, 1, 2, 3]
    assert len({cell.id for cell in node.cells}) == 4
    assert all(not cell.metadata for cell in node.cells)
    assert node.metadata.language_info == {"name": "python"}
    assert node.cells[1].outputs[0].text == "1\n2\n"
    assert "n.ipynb: saved after" in capsys.readouterr().out


@pytest.mark.slow
def test_a_cell_that_raises_is_not_saved(notebook: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """The old file stays, and the error is shown."""
    node = nbformat.read(notebook, as_version=4)
    node.cells.append(new_code_cell("1 / 0"))
    nbformat.write(node, notebook)
    before = notebook.read_bytes()
    monkeypatch.setattr(sys, "argv", ["execute", str(notebook)])
    assert main() == 1
    assert notebook.read_bytes() == before
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.slow
def test_the_strict_run_catches_a_changed_output_and_a_process_left(notebook: Path):
    """A saved output that is not what the cell says fails; so does a child that outlives the kernel."""
    node = execute(notebook)
    nbformat.write(node, notebook)
    done, left = run_strictly(notebook)
    assert done.returncode == 0, done.stdout
    assert left == []

    node.cells[2].outputs[0].data["text/plain"] = "43"
    source = "import subprocess\nchild = subprocess.Popen(['sleep', '60'], start_new_session=True)"
    node.cells.append(new_code_cell(source, execution_count=4))
    nbformat.write(node, notebook)
    done, left = run_strictly(notebook)
    assert done.returncode == 1
    assert "1 failed, 3 passed" in done.stdout
    assert len(left) == 1
    assert "sleep 60" in left[0]
