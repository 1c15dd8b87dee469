"""Binder's image is what requirements.txt says, with torch's CPU build; rendered here without Docker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BINDER = REPOSITORY / "binder"


def requirements_of(path: Path) -> set[str]:
    return {line for line in path.read_text().splitlines() if line and not line.startswith("#")}


@pytest.fixture(scope="module")
def dockerfile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What repo2docker would build, as text."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(BINDER, folder / "binder")
    for name in ("requirements.txt", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, folder)
    command = [sys.executable, "-m", "repo2docker", "--no-build", "--debug", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_image_renders(dockerfile: str):
    """Python 3.11, our requirements, then postBuild."""
    assert "python-3.11" in (BINDER / "runtime.txt").read_text()
    assert "python=3.11" in dockerfile or "py-3.11" in dockerfile
    assert '/bin/pip install --no-cache-dir -r "binder/requirements.txt"' in dockerfile
    assert "RUN ./binder/postBuild" in dockerfile


def test_pip_gets_everything_but_torch():
    """The same pins as everywhere; pip would take torch's CUDA build, so uv, which can choose, takes torch."""
    ours = requirements_of(REPOSITORY / "requirements.txt")
    binder = requirements_of(BINDER / "requirements.txt")
    torch = {line for line in ours if line.startswith("torch==")}
    assert len(torch) == 1
    assert {line for line in binder if not line.startswith("uv==")} == ours - torch
    assert any(line.startswith("uv==") for line in binder)


@pytest.mark.slow
def test_the_pip_lines_install():
    """pip finds every pin and they fit together; needs the package registry, so a machine without one skips."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "-r", str(BINDER / "requirements.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    if any(word in done.stderr for word in ("NewConnectionError", "Max retries", "ConnectTimeoutError")):
        pytest.skip("no package registry within reach")
    assert done.returncode == 0, done.stderr


def test_post_build_asks_for_the_cpu_build_and_is_a_script(tmp_path: Path):
    """Run against stand-ins that note their arguments: torch's pin, the CPU backend, no dependency of ours again."""
    calls = tmp_path / "calls"
    for name in ("uv", "python"):
        stand_in = tmp_path / name
        stand_in.write_text(f'#!/bin/sh\necho {name} "$@" >> {calls}\n')
        stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run([str(BINDER / "postBuild")], cwd=REPOSITORY, env=environment, check=True)
    noted = calls.read_text().splitlines()
    (torch,) = (line for line in requirements_of(REPOSITORY / "requirements.txt") if line.startswith("torch=="))
    assert noted[0] == f"uv pip install --python {tmp_path}/python --torch-backend=cpu {torch}"
    assert noted[1] == "python -m pip install --no-cache-dir --no-deps -e ."
    assert "torch.version.cuda is None" in noted[2]
