"""From a notebook's cell to a module that torchrun can run."""

from __future__ import annotations

import importlib.util
import keyword
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vizkit.errors import InvalidInputError
from vizkit.exporting.collector import Collector

MARK = "Written by vizkit.export"

__all__ = ["MARK", "export", "module_text"]


def export(fn: Callable[..., Any], path: str | Path, *, overwrite: bool = False) -> Path:
    """Write the function, and all that it uses of its notebook, to the module `path` (`.py`); returns the path.

    Helper functions, classes and constants of the notebook are copied as they stand, with their comments; what comes
    from elsewhere is imported by the notebook's own statements. The module does nothing when it is imported, and
    `python -m vizkit run module:function` runs it, alone or under torchrun, as `vk.launch` runs it here. A file that
    `export` wrote is replaced; any other only with `overwrite`. Raises `InvalidInputError`, with the name and what to
    do, for what cannot go: lambdas, tensors, models, open files and other live objects, functions without source.

    >>> import tempfile
    >>> RATE = 0.5
    >>> def halve(x):
    ...     return x * RATE
    >>> path = export(halve, Path(tempfile.mkdtemp()) / "halving.py")
    >>> print(path.read_text().partition("RATE")[2])
     = 0.5
    <BLANKLINE>
    <BLANKLINE>
    def halve(x):
        return x * RATE
    <BLANKLINE>
    """
    if not isinstance(path, str | Path):
        raise InvalidInputError.because("path", path, "names no file", "name it for instance train_digits.py")
    path = Path(path)
    _check_path(path, overwrite)
    text = module_text(fn, path.stem)
    compile(text, str(path), "exec")
    path.write_text(text, encoding="utf-8")
    return path


def module_text(fn: Callable[..., Any], module: str) -> str:
    """The text of the module that `export` would write under the name `module`."""
    name = getattr(fn, "__name__", "")
    if not callable(fn) or isinstance(fn, type | types.MethodType) or not name:
        raise InvalidInputError.because("fn", fn, "is no function", "give the function itself: vk.export(train, path)")
    if not name.isidentifier() or not isinstance(getattr(fn, "__module__", None), str):
        raise InvalidInputError.because("fn", name, "has no name to write it under", "write it with def")
    collector = Collector(fn.__module__)
    collector.add(name, fn, name)
    if not collector.definitions:
        raise InvalidInputError.because(
            "fn", name, f"is in a module already ({fn.__module__})", f"run it from there: {fn.__module__}:{name}"
        )
    head = (
        f'"""{MARK}: `{name}`, as it stood in the notebook.\n\n'
        f"    torchrun --nproc-per-node 4 -m vizkit run {module}:{name} --trace traces\n"
        '"""\n'
    )
    future = "from __future__ import annotations\n" if collector.has_lazy_annotations else ""
    plain = sorted(statement for statement in collector.imports if statement.startswith("import "))
    members = sorted(statement for statement in collector.imports if statement.startswith("from "))
    imports = "".join(f"{statement}\n" for statement in [*plain, *members])
    top = [part for part in (head, future, imports, "".join(collector.constants)) if part]
    return "\n\n\n".join(["\n".join(top).rstrip("\n"), *(part.rstrip("\n") for part in collector.definitions)]) + "\n"


def _check_path(path: Path, overwrite: bool) -> None:
    stem = path.stem
    if path.suffix != ".py" or not stem.isidentifier() or keyword.iskeyword(stem):
        raise InvalidInputError.because(
            "path", str(path), "is to be a module that can be imported", "name it for instance train_digits.py"
        )
    if not path.absolute().parent.is_dir():
        raise InvalidInputError.because(
            "path", str(path), "its folder does not exist", f"make {path.absolute().parent} first"
        )
    if path.exists() and not overwrite and MARK not in path.read_text(encoding="utf-8", errors="replace")[:200]:
        raise InvalidInputError.because(
            "path", str(path), "exists and was not written by vk.export", "name another, or give overwrite=True"
        )
    found = importlib.util.find_spec(stem)
    if found is not None and (found.origin is None or Path(found.origin) != path.resolve()):
        raise InvalidInputError.because(
            "path", str(path), f"a module {stem} exists ({found.origin}), and one would hide the other", "name another"
        )
