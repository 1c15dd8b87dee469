"""What the README tells a newcomer to do works, and what it points at is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
MAKEFILE = (REPOSITORY / "Makefile").read_text()
TARGETS = sorted(set(re.findall(r"^([a-z]+):", MAKEFILE, re.M)) - {"help", "setup"})


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def test_there_are_examples():
    """The parametrised test below has something to run."""
    assert blocks("python")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_example_runs(number: int, tmp_path: Path):
    """Each Python block is whole: pasted into a file of its own, it runs and prints what its comments promise."""
    script = tmp_path / "example.py"
    script.write_text(blocks("python")[number], encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    promised = re.findall(r"# prints: (.+)", blocks("python")[number])
    for line in promised:
        assert line in done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_every_make_target_is_explained(target: str):
    """A reader finds each target in the README."""
    assert f"make {target}" in README


def test_every_make_command_exists():
    """And the README names no target that is not there."""
    named = set(re.findall(r"`make ([a-z]+)", README)) | set(re.findall(r"^make ([a-z]+)", README, re.M))
    assert named <= set(TARGETS) | {"help"}


@pytest.mark.parametrize("page", PAGES)
def test_links_inside_the_repository_lead_somewhere(page: str):
    """Relative links and pictures exist."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    missing = [target for target in targets if "://" not in target and not (REPOSITORY / target).exists()]
    assert missing == []


def test_every_notebook_is_in_the_table():
    """The table of notebooks is complete."""
    missing = [path.name for path in (REPOSITORY / "notebooks").glob("*.ipynb") if path.name not in README]
    assert missing == []


def test_plain_pip_lines_name_files_that_exist():
    """Those without make copy these lines."""
    shell = "\n".join(blocks("bash"))
    assert "-m venv .venv" in shell
    assert "-r requirements.txt" in shell
    assert "notebooks/00_start_here.ipynb" in shell
