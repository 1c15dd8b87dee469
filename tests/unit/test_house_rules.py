"""Rules of the house that no other tool keeps: layers, sizes, and no address of a package registry."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MODULES = sorted((REPOSITORY / "vizkit").rglob("*.py"))
LONGEST_MODULE_LINES = 400
TOP_LEVEL = {
    "README.md",
    "requirements.txt",
    "notebooks",
    "vizkit",
    "tests",
    "binder",
    "pyproject.toml",
    "Makefile",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
}
# In two parts each, so that this file names none of them.
REGISTRIES = [
    f"{name}.{rest}"
    for name, rest in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download.pytorch", "org"),
        ("registry.npmjs", "org"),
        ("deb.debian", "org"),
        ("archive.ubuntu", "com"),
        ("conda.anaconda", "org"),
        ("unpkg", "com"),
        ("cdn.jsdelivr", "net"),
    )
]


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.split("\0") if name and (path := REPOSITORY / name).is_file()]


def test_layers_hold():
    """import-linter's contracts: the layer table, and torch, plotly and ipywidgets in one layer each."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_the_module_is_short_and_says_what_it_is(path: Path):
    """One job a module: at most 400 lines, with a docstring."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_MODULE_LINES
    assert not text or ast.get_docstring(ast.parse(text)), "no docstring"


def test_no_file_names_a_registry():
    """Clients know their registries; a fixed address breaks behind a mirror. Notebooks' outputs count."""
    named = [
        f"{path.relative_to(REPOSITORY)}: {host}"
        for path in tracked_files()
        if path.suffix not in (".png", ".gif")
        for host in REGISTRIES
        if host in path.read_text(encoding="utf-8", errors="replace")
    ]
    assert named == []


def test_the_top_level_stays_small():
    """A visitor sees these names and no other; dot-folders apart."""
    names = {path.relative_to(REPOSITORY).parts[0] for path in tracked_files()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_requirements_are_exact_and_enough():
    """requirements.txt pins each line, and holds all that the package itself depends on, within its bounds."""
    from packaging.requirements import Requirement

    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    versions = {}
    for requirement in pinned:
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{requirement} is not exact"
        versions[requirement.name] = specifier.version
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for needed in map(Requirement, project["dependencies"]):
        assert needed.specifier.contains(versions[needed.name]), f"{needed} against {versions[needed.name]}"


def test_the_version_is_one():
    """The package, the project and the changelog agree."""
    import vizkit

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert vizkit.__version__ == project["version"]
    assert f"## {project['version']}" in changelog
