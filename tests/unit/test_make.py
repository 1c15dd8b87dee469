"""`make lab` for a newcomer: a Python is found, an interrupted installation goes on, a taken port does not stop it."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.processes import marked_environment, new_mark, processes_with, stop, wait_until_gone

REPOSITORY = Path(__file__).parents[2]
FAKE_PIP = """
import os, sys
log = os.environ["FAKE_PIP_LOG"]
words = [w for w in sys.argv[1:] if w != "--disable-pip-version-check"]
if words[:1] in (["--version"], ["show"]):
    sys.exit(words[:1] == ["show"])
open(log, "a").write(" ".join(words) + "\\n")
sys.exit(os.environ.get("FAKE_PIP_FAILS", "none") in " ".join(words))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the set-up reads, in a folder with a space in its name."""
    folder = tmp_path / "my copy"
    (folder / "notebooks").mkdir(parents=True)
    for name in (".ci", "binder"):
        shutil.copytree(REPOSITORY / name, folder / name)
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


def set_up(checkout: Path, extent: str = "user", **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(checkout / ".ci" / "setup"), extent]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def only(folder: Path, *tools: str) -> str:
    """A PATH of just these tools, and whatever else lies in the folder."""
    for tool in tools:
        (folder / tool).symlink_to(shutil.which(tool) or pytest.skip(f"{tool} is missing"))
    return str(folder)


TOOLS = ("bash", "dirname", "grep", "uname", "sed", "rm", "cat", "sh")


def test_no_python_is_said(checkout: Path, tmp_path: Path):
    """What was looked for, and what to install."""
    (tmp_path / "bin").mkdir()
    done = set_up(checkout, PATH=only(tmp_path / "bin", *TOOLS))
    assert done.returncode == 1
    assert (
        "found no Python 3.11 or later (looked for python3, python3.11, python3.12, python3.13, python)." in done.stderr
    )
    assert "make lab PYTHON=/path/to/python3" in done.stderr


def test_a_python_without_ensurepip_gets_the_remedy(checkout: Path, tmp_path: Path):
    """Debian splits venv from Python: the package is named."""
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "python3", 'case "$2" in *ensurepip*) exit 1;; esac')
    done = set_up(checkout, PATH=only(tmp_path / "bin", *TOOLS))
    assert done.returncode == 1
    assert "python3 has no venv and ensurepip modules" in done.stderr
    assert "apt-get install python3-venv" in done.stderr


def test_a_python_that_is_too_old_is_named(checkout: Path, tmp_path: Path):
    """PYTHON=... is taken at its word, or refused."""
    old = script(tmp_path / "old-python", "exit 1")
    done = set_up(checkout, PYTHON=str(old))
    assert done.returncode == 1
    assert f"PYTHON={old} is not a Python 3.11 or later" in done.stderr


@pytest.fixture
def installation(checkout: Path, tmp_path: Path) -> tuple[Path, dict[str, str], Path]:
    """A virtual environment whose pip only notes what it is asked, and fails on demand."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(checkout / ".venv")], check=True)
    (site_packages,) = (checkout / ".venv").glob("lib/python*/site-packages")
    (site_packages / "pip").mkdir()
    (site_packages / "pip" / "__main__.py").write_text(FAKE_PIP)
    log = tmp_path / "pip.log"
    log.touch()
    return checkout, {"FAKE_PIP_LOG": str(log), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}, log


def test_the_second_run_installs_nothing(installation):
    """A stamp, keyed on what is required, makes `make lab` quick."""
    checkout, environment, log = installation
    assert set_up(checkout, **environment).returncode == 0
    assert log.read_text().splitlines()[-1] == "install -q -r requirements.txt -e ."
    log.write_text("")
    assert set_up(checkout, **environment).returncode == 0
    assert log.read_text() == ""


def test_a_changed_requirement_installs_again(installation):
    """And the developer's environment, which holds the user's, serves both."""
    checkout, environment, log = installation
    assert set_up(checkout, "dev", **environment).returncode == 0
    assert log.read_text().splitlines()[-1] == "install -q -r requirements.txt -e .[dev]"
    log.write_text("")
    assert set_up(checkout, "user", **environment).returncode == 0
    assert log.read_text() == ""
    with (checkout / "requirements.txt").open("a") as file:
        file.write("tqdm==4.0\n")
    assert set_up(checkout, "user", **environment).returncode == 0
    assert log.read_text().splitlines()[-1] == "install -q -r requirements.txt -e ."


def test_an_installation_that_stopped_goes_on(installation):
    """A failure says so and leaves no stamp, so the next run installs again."""
    checkout, environment, log = installation
    failed = set_up(checkout, **environment, FAKE_PIP_FAILS="-r requirements.txt")
    assert failed.returncode == 1
    assert "run make again: it goes on" in failed.stderr
    assert not list((checkout / ".venv").glob("vizkit-*"))
    assert set_up(checkout, **environment).returncode == 0
    assert list((checkout / ".venv").glob("vizkit-user"))
    assert log.read_text().count("-r requirements.txt -e .\n") == 2


def test_a_cpu_build_within_pips_reach_is_preferred(installation):
    """Without a GPU, pip is asked for +cpu, then uv; before the last resort, its size is announced."""
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU, and takes torch's CUDA build")
    checkout, environment, log = installation
    assert set_up(checkout, **environment).returncode == 0
    assert log.read_text().splitlines()[:2] == [
        "install -q --dry-run --no-deps torch==2.13.0+cpu",
        "install -q torch==2.13.0+cpu",
    ]
    shutil.rmtree(checkout / ".venv" / "bin", ignore_errors=False)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(checkout / ".venv")], check=True)
    (checkout / ".venv" / "vizkit-user").unlink()
    log.write_text("")
    done = set_up(checkout, **environment, FAKE_PIP_FAILS="+cpu")
    assert done.returncode == 0
    (uv,) = re.findall(r"^uv==.*", (checkout / "binder" / "requirements.txt").read_text(), re.M)
    assert log.read_text().splitlines()[:3] == [
        "install -q --dry-run --no-deps torch==2.13.0+cpu",
        f"install -q {uv}",
        "install -q torch==2.13.0",
    ]
    assert "takes the CUDA build, several GB" in done.stdout


def status_of(url: str, *, within_s: float = 20) -> int:
    """The page's HTTP status; JupyterLab prints its address a moment before it listens."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            with urllib.request.urlopen(url) as page:
                return page.status
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def listen_outside_ephemeral_ports() -> socket.socket:
    """Within them, asking whether anybody listens on a port can connect the asking socket to itself."""
    for port in random.sample(range(20_000, 32_000), 100):
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            continue
    pytest.skip("a hundred ports between 20000 and 32000 are taken")


@pytest.mark.slow
def test_lab_starts_where_the_port_is_taken(checkout: Path):
    """As whoever runs the tests (root in a container): it prints an address on another port, opens the first notebook,
    and listens on loopback only."""
    (checkout / ".ci" / "setup").write_text("#!/bin/sh\n")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    script(checkout / ".venv" / "bin" / "python", f'exec "{sys.executable}" "$@"')
    shutil.copy(REPOSITORY / "requirements.txt", checkout / "notebooks" / "00_start_here.ipynb")
    mark = new_mark()
    with listen_outside_ephemeral_ports() as taken:
        port = taken.getsockname()[1]
        lab = subprocess.Popen(
            ["make", "lab", f"LAB_ARGS=--no-browser --port={port}"],
            cwd=checkout,
            env=marked_environment(mark),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        watchdog = threading.Timer(60, lab.kill)
        watchdog.start()
        try:
            url = next(
                m.group() for line in lab.stdout if (m := re.search(r"http://127\.0\.0\.1:\d+/\S+token=\w+", line))
            )
            assert "/lab/tree/00_start_here.ipynb?token=" in url
            assert f":{port}/" not in url
            assert status_of(url) == 200
            listening = {
                connection.laddr.ip
                for process in processes_with(mark)
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
            assert listening == {"127.0.0.1"}
        finally:
            watchdog.cancel()
            stop(processes_with(mark))
            lab.wait()
    assert wait_until_gone(lambda: processes_with(mark)) == []
