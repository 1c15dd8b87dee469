"""Which names a definition takes from outside itself, read off what Python compiles it to."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

_READ = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_WRITTEN = ("STORE_GLOBAL", "DELETE_GLOBAL")


class OuterNames(NamedTuple):
    """`eager` are needed when the definition is executed (decorators, defaults, bases), `lazy` when it is called."""

    eager: tuple[str, ...]
    lazy: tuple[str, ...]


def outer_names(source: str, has_lazy_annotations: bool = False) -> OuterNames:
    """The names that the definition in `source`, a function or a class, does not bind itself.

    >>> outer_names("@decorate\\ndef f(x=DEFAULT):\\n    y = helper(x)\\n    return y + math.pi")
    OuterNames(eager=('decorate', 'DEFAULT'), lazy=('helper', 'math'))
    """
    flags = __import__("__future__").annotations.compiler_flag if has_lazy_annotations else 0
    code = compile(source, "<export>", "exec", flags=flags, dont_inherit=True)
    eager: dict[str, None] = {}
    lazy: dict[str, None] = {}
    _collect(code, eager, lazy, is_eager=True)
    return OuterNames(tuple(eager), tuple(name for name in lazy if name not in eager))


def _collect(code: CodeType, eager: dict[str, None], lazy: dict[str, None], is_eager: bool) -> None:
    bound = {step.argval for step in _steps(code) if step.opname == "STORE_NAME"}
    for step in _steps(code):
        is_outer = step.opname in _READ and not (step.opname == "LOAD_NAME" and step.argval in bound)
        if is_outer or step.opname in _WRITTEN:
            (eager if is_eager else lazy)[step.argval] = None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            _collect(inner, eager, lazy, is_eager and not _is_function(inner))


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    return dis.get_instructions(code)


def _is_function(code: CodeType) -> bool:
    """Bodies of classes, and comprehensions, run where they stand."""
    is_comprehension = code.co_name.startswith("<") and code.co_name != "<lambda>"
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not is_comprehension


def changed_from_inside(code: CodeType) -> frozenset[str]:
    """Variables of an enclosing function that this one, or one inside it, binds anew (`nonlocal`)."""
    changed = {step.argval for step in _steps(code) if step.opname in ("STORE_DEREF", "DELETE_DEREF")}
    inner = (changed_from_inside(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(changed.union(*inner)) & frozenset(code.co_freevars)
