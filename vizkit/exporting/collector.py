"""Gathers all that a function needs of its notebook, in an order in which a module can define it."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import types
from typing import Any

from vizkit.errors import InvalidInputError
from vizkit.exporting.changes import check_defaults, check_unchanged, differ
from vizkit.exporting.names import changed_from_inside, outer_names
from vizkit.exporting.sources import SourceUnknownError, import_of, imports_around, source_of, written_methods
from vizkit.exporting.values import NoExpressionError, expression, refusal

_LAZY_ANNOTATIONS = __import__("__future__").annotations.compiler_flag
_OF_EVERY_MODULE = frozenset([*vars(types.ModuleType("any")), "__annotations__", "__builtins__", "__file__"])
_ONLY_IN_NOTEBOOKS = ("get_ipython", "display")


class Collector:
    """Imports, constants and definitions of a module to be, starting from one function.

    What the function's own module (a notebook's `__main__`) defines is copied; the rest is imported.
    """

    def __init__(self, module_name: str) -> None:
        self._home = module_name
        self._written_imports = imports_around(module_name)
        self._bound: dict[str, Any] = {}
        self.imports: dict[str, None] = {}
        self.constants: list[str] = []
        self.definitions: list[str] = []
        self._defined: set[str] = set()
        self._unfinished: set[str] = set()
        self.has_lazy_annotations = False

    def add(self, name: str, value: Any, user: str) -> None:
        """Has `name` mean `value` in the module; `user` is the definition that needs it."""
        if name in self._bound:
            if differ(self._bound[name], value):
                raise InvalidInputError.because(
                    name,
                    value,
                    f"means something else in another function than in {user}",
                    "give one of them another name",
                )
            return
        same = next((known for known, bound in self._bound.items() if bound is value), None)
        self._bound[name] = value
        if self._import(name, value):
            return
        raw = _unwrapped(value)
        if isinstance(raw, types.FunctionType | type):
            self._define(name, value, raw, user)
            return
        try:
            # what may change is one thing under two names, also in the module
            is_alias = same is not None and isinstance(value, list | dict | set)
            if is_alias and same in self._unfinished:
                raise NoExpressionError(f"is what {same} is, and {same} needs it first", "use one name for both")
            self._unfinished.add(name)
            text = str(same) if is_alias else expression(value, lambda needed: self._name_of(needed, user))
        except NoExpressionError as error:
            raise _refused(name, value, error, user) from None
        except RecursionError:
            endless = NoExpressionError("holds itself, or is nested too deeply", "build it inside the function")
            raise _refused(name, type(value).__name__, endless, user) from None
        self._unfinished.discard(name)
        needs = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)} & self._defined
        is_plain = not needs and not any(isinstance(node, ast.Call) for node in ast.walk(ast.parse(text)))
        if is_plain:
            self.constants.append(f"{name} = {text}\n")
        else:
            self._write(name, f"{name} = {text}\n")

    def _import(self, name: str, value: Any) -> bool:
        """The notebook's own statement where it has one, else one that does the same."""
        own = [found.statement for found in self._written_imports.get(name, ()) if found.value() is value]
        if inspect.ismodule(value):
            # `import torch` and `import torch.distributed.fsdp` bind one name, and both may be needed
            statements = own or [statement for statement in [import_of(name, value)] if statement]
        elif own:
            statements = own[:1]
        elif getattr(value, "__module__", None) != self._home and (statement := import_of(name, value)):
            statements = [statement]
        else:
            return False
        self.imports.update(dict.fromkeys(statements))
        return bool(statements)

    def _name_of(self, value: Any, user: str) -> str:
        name = value.__name__.rpartition(".")[2]
        if getattr(builtins, name, None) is value:
            return name
        self.add(name, value, user)
        return name

    def _define(self, name: str, value: Any, raw: types.FunctionType | type, user: str) -> None:
        try:
            if raw.__name__ == "<lambda>":
                raise refusal(raw)
            text = source_of(raw)
            (node,) = ast.parse(text).body
            if raw is not value and not node.decorator_list:  # type: ignore[attr-defined]
                raise NoExpressionError(
                    "is wrapped outside of its definition", "write the wrapper as a decorator above the function"
                )
        except (SourceUnknownError, NoExpressionError) as error:
            raise _refused(name, value, error, user) from None
        if name != raw.__name__:
            self.add(raw.__name__, value, user)
            self._write(name, f"{name} = {raw.__name__}\n")
            return
        check_unchanged(value, raw, node)
        functions = [raw] if isinstance(raw, types.FunctionType) else written_methods(raw)
        is_lazy = any(function.__code__.co_flags & _LAZY_ANNOTATIONS for function in functions)
        self.has_lazy_annotations |= is_lazy
        scope = _scope(raw, functions, name)
        eager, lazy = outer_names(text, is_lazy)
        self._add_all(eager, scope, name)
        for function in functions:
            check_defaults(function, node)
        self._write(name, text)
        self._add_all(lazy, scope, name)

    def _write(self, name: str, text: str) -> None:
        self.definitions.append(text)
        self._defined.add(name)

    def _add_all(self, names: tuple[str, ...], scope: dict[str, Any], user: str) -> None:
        for name in names:
            if name in _OF_EVERY_MODULE:
                continue
            if name in _ONLY_IN_NOTEBOOKS and name not in scope:
                raise InvalidInputError.because(
                    "fn",
                    user,
                    f"uses {name}, which only a notebook has",
                    "print, or return what the notebook is to show",
                )
            if name in scope:
                self.add(name, scope[name], user)
            elif not hasattr(builtins, name):
                raise InvalidInputError.because(
                    "fn", user, f"uses {name}, which is not defined", "run the cell that defines it first"
                )


def _unwrapped(value: Any) -> Any:
    """The function behind decorators that say what they wrap."""
    return inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value


def _scope(raw: types.FunctionType | type, functions: list[types.FunctionType], name: str) -> dict[str, Any]:
    """What each name outside the definition means: globals, and variables of an enclosing function."""
    if isinstance(raw, types.FunctionType):
        known = dict(raw.__globals__)
    else:
        known = dict(vars(sys.modules[raw.__module__])) if raw.__module__ in sys.modules else {}
    for function in functions:
        if changed := changed_from_inside(function.__code__):
            raise InvalidInputError.because(
                min(changed),
                name,
                "is changed through nonlocal, and a module has no enclosing function",
                "return the new value",
            )
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if variable != "__class__":
                try:
                    known[variable] = cell.cell_contents
                except ValueError:
                    raise InvalidInputError.because(
                        variable, name, "has no value yet in the enclosing function", "export after it has been set"
                    ) from None
    return known


def _refused(name: str, value: Any, error: Exception, user: str) -> InvalidInputError:
    rule = getattr(error, "rule", str(error))
    remedy = getattr(error, "remedy", "write it with def at the left of a cell")
    return InvalidInputError.because(name, _short(value), f"{rule}, and {user} uses it", remedy)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
