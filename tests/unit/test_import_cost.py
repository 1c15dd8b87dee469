"""`import vizkit` is cheap: it loads none of the heavy libraries, and each name loads only what it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import vizkit

HEAVY = ("torch", "plotly", "ipywidgets", "pandas", "sklearn", "IPython")
ROUNDS = 5


def loaded_after(code: str) -> set[str]:
    """The heavy libraries that a fresh interpreter has loaded after this code."""
    report = f"{code}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def seconds_to_import(module: str) -> float:
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import vizkit", set()),
        ("import vizkit as vk; dir(vk); vk.__version__", set()),
        ("import vizkit as vk; vk.Trace, vk.Link, vk.Durations, vk.as_grid, vk.check", set()),
        ("import vizkit as vk; vk.metrics, vk.replay, vk.collectives, vk.read_trace, vk.write_chrome_trace", set()),
        ("import vizkit as vk; vk.timeline, vk.compare, vk.to_html", {"plotly"}),
        ("import vizkit as vk; vk.launch, vk.span, vk.device", {"torch"}),
    ],
)
def test_only_what_is_needed_is_loaded(code: str, allowed: set[str]):
    """Models load no library, figures only plotly, the runtime only torch."""
    assert loaded_after(code) <= allowed


def test_import_costs_less_than_numpy():
    """The best of five each, in turns, so that a busy machine slows both; numpy takes about 0.1 s."""
    pairs = [(seconds_to_import("vizkit"), seconds_to_import("numpy")) for _ in range(ROUNDS)]
    ours, numpys = (min(column) for column in zip(*pairs, strict=True))
    assert ours < numpys


def test_a_folder_of_the_same_name_does_not_hide_the_package(tmp_path: Path):
    """Who works in the folder that holds their clone has `vizkit/`, without `__init__.py`, in the working directory."""
    (tmp_path / "vizkit").mkdir()
    code = "import vizkit; print(vizkit.__version__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == vizkit.__version__, done.stderr
