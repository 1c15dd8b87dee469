"""The text of functions and classes, of cells as well as of files, and the import statements around them."""

from __future__ import annotations

import ast
import importlib
import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class SourceUnknownError(Exception):
    """No text is known for an object; the message says why."""


def source_of(value: FunctionType | type) -> str:
    """The definition with its decorators, from column 0; raises `SourceUnknownError`."""
    text = _class_source(value) if isinstance(value, type) else _function_source(value)
    try:
        (node,) = ast.parse(text).body
    except (SyntaxError, ValueError):
        raise SourceUnknownError("its definition is part of a larger expression") from None
    if not isinstance(node, Definition):
        raise SourceUnknownError("its source is no definition")
    return text


def _function_source(function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip() + "\n"
    except (OSError, TypeError, IndexError):
        raise SourceUnknownError("its source is not to be found; define it in a cell or in a file") from None


def _class_source(kind: type) -> str:
    """A cell's class has no file of its own: it is looked for where its methods are from, or in the last cell."""
    code = next((method.__code__ for method in written_methods(kind)), None)
    for name in [code.co_filename] if code else _files_of(kind.__module__):
        lines = linecache.getlines(name)
        for node in _classes(lines, kind.__name__):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if code is None or first <= code.co_firstlineno <= (node.end_lineno or 0):
                return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip() + "\n"
    raise SourceUnknownError("its source is not to be found; define it in a cell or in a file")


def written_methods(kind: type) -> list[FunctionType]:
    """The functions that stand in the body of a class, those of properties and class methods too.

    Not what a decorator such as `dataclass` has added.
    """
    files = set(_files_of(kind.__module__))
    found: list[FunctionType] = []
    for value in vars(kind).values():
        parts = [value.fget, value.fset, value.fdel] if isinstance(value, property) else [value]
        functions = [inspect.unwrap(getattr(part, "__func__", part)) for part in parts if part is not None]
        found += [f for f in functions if isinstance(f, FunctionType) and f.__code__.co_filename in files]
    return found


def _classes(lines: list[str], name: str) -> Iterator[ast.ClassDef]:
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return
    yield from reversed([node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name])


def _files_of(module_name: str) -> list[str]:
    """The file of a module, or for a notebook's `__main__` the cells that have run, the last one first."""
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if file and module_name != "__main__":
        return [file]
    cells = [name for name, entry in list(linecache.cache.items()) if len(entry) == 4 and entry[1] is None]
    return [*reversed(cells), *([file] if file else [])]


class Import(NamedTuple):
    """An import statement with one name in it, and the value that it gives."""

    statement: str
    value: Callable[[], Any]


def imports_around(module_name: str) -> dict[str, list[Import]]:
    """The import statements of the module, or of the notebook's cells, by the name that each binds; the last first."""
    found: dict[str, list[Import]] = {}
    for name in _files_of(module_name):
        try:
            tree = ast.parse("".join(linecache.getlines(name)))
        except (SyntaxError, ValueError):  # a cell with a magic in it
            continue
        for bound, statement in _imports(ast.walk(tree)):
            found.setdefault(bound, []).append(statement)
    return found


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, Import]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                renamed = f" as {alias.asname}" if alias.asname else ""
                value = _module_getter(alias.name if alias.asname else alias.name.partition(".")[0])
                yield alias.asname or alias.name.partition(".")[0], Import(f"import {alias.name}{renamed}", value)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module != "__future__":
            for alias in node.names:
                renamed = f" as {alias.asname}" if alias.asname else ""
                statement = f"from {node.module} import {alias.name}{renamed}"
                yield alias.asname or alias.name, Import(statement, _member_getter(node.module, alias.name))


def _module_getter(name: str) -> Callable[[], Any]:
    return lambda: sys.modules.get(name)


def _member_getter(module: str, name: str) -> Callable[[], Any]:
    def get() -> Any:
        known = sys.modules.get(module)
        if known is not None and not hasattr(known, name):
            return sys.modules.get(f"{module}.{name}")
        return getattr(known, name, None)

    return get


def import_of(name: str, value: Any) -> str | None:
    """A statement that binds `name` to a module, or to what a module holds under its own name; None for the rest."""
    if inspect.ismodule(value):
        module = value.__name__
        if module == "__main__" or sys.modules.get(module) is not value:
            return None
        return f"import {module}" if name == module else f"import {module} as {name}"
    home, path = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if not isinstance(home, str) or not isinstance(path, str) or home == "__main__" or "." in path:
        return None
    try:
        if getattr(importlib.import_module(home), path, None) is not value:
            return None
    except ImportError:
        return None
    return f"from {home} import {path}" + (f" as {name}" if name != path else "")
