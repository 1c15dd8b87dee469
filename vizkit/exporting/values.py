"""Constants as Python expressions: what a script can say is what has no life of its own."""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import math
import sys
import types
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

_PLAIN = (int, str, bytes, bool, types.NoneType, types.EllipsisType)
_BRACKETS: dict[type, str] = {list: "[{}]", tuple: "({})"}

Reference = Callable[[Any], str]
"""Gives the expression by which the script knows a class, function or module, and has it written or imported."""


class NoExpressionError(Exception):
    """A value that no expression gives back; `rule` and `remedy` say why, and what to do."""

    def __init__(self, rule: str, remedy: str) -> None:
        super().__init__(rule)
        self.rule, self.remedy = rule, remedy


def expression(value: Any, reference: Reference) -> str:
    """An expression whose value equals `value`; raises `NoExpressionError`.

    >>> expression({"sizes": (8, 4), "lr": float("inf")}, str)
    "{'sizes': (8, 4), 'lr': float('inf')}"
    """
    kind = type(value)

    def inner(item: Any) -> str:
        return expression(item, reference)

    if isinstance(value, enum.Flag):  # several together have no name that gives them back
        return f"{reference(kind)}({value.value!r})"
    if isinstance(value, enum.Enum):
        return f"{reference(kind)}[{value.name!r}]"
    if kind in _PLAIN:
        return repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if kind is complex:
        return f"complex({inner(value.real)}, {inner(value.imag)})"
    if kind in _BRACKETS:
        return _BRACKETS[kind].format(", ".join(map(inner, value)) + "," * (kind is tuple and len(value) == 1))
    if kind is set:
        return "{" + ", ".join(sorted(map(inner, value))) + "}" if value else "set()"
    if kind is frozenset:
        return f"frozenset({inner(sorted(value, key=repr))})"
    if kind is dict:
        return "{" + ", ".join(f"{inner(key)}: {inner(item)}" for key, item in value.items()) + "}"
    if kind is range:
        return repr(value)
    if isinstance(value, PurePath):
        return f"{reference(type(value).__mro__[1] if kind.__name__.startswith('Posix') else kind)}({str(value)!r})"
    if _is_torch(kind, "dtype", "memory_format", "layout"):
        return f"{reference(sys.modules['torch'])}.{str(value).removeprefix('torch.')}"
    if _is_torch(kind, "device"):
        return f"{reference(sys.modules['torch'])}.device({str(value)!r})"
    if any(base.__name__ == "generic" and base.__module__ == "numpy" for base in kind.__mro__):
        return f"{reference(sys.modules['numpy'])}.{kind.__name__}({inner(value.item())})"
    if kind is functools.partial:
        given = [inner_or_name(value.func, reference), *map(inner, value.args)]
        given += [f"{name}={inner(item)}" for name, item in value.keywords.items()]
        return f"{reference(functools)}.partial({', '.join(given)})"
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return f"{reference(kind)}({', '.join(map(inner, value))})"
    if dataclasses.is_dataclass(value) and all(field.init for field in dataclasses.fields(value)):
        given = [f"{field.name}={inner(getattr(value, field.name))}" for field in dataclasses.fields(value)]
        return f"{reference(kind)}({', '.join(given)})"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType):
        return inner_or_name(value, reference)
    raise refusal(value)


def inner_or_name(value: Any, reference: Reference) -> str:
    """Functions, classes and modules are called by their names."""
    if getattr(value, "__name__", "") == "<lambda>":
        raise refusal(value)
    return reference(value)


def refusal(value: Any) -> NoExpressionError:
    """Why a value cannot be written, and what to do instead."""
    kind = type(value)
    if getattr(value, "__name__", "") == "<lambda>":
        return NoExpressionError("is a lambda, which has no name to write it under", "write it with def")
    if any(base.__name__ in ("Tensor", "ndarray") for base in kind.__mro__):
        return NoExpressionError(
            "is data, which a script does not hold",
            "make or load it inside the function, or pass its size or its file's name as an argument",
        )
    if isinstance(value, io.IOBase):
        return NoExpressionError("is an open file", "open it inside the function")
    if any(base.__name__ == "Module" and base.__module__.startswith("torch.nn") for base in kind.__mro__):
        return NoExpressionError("is a model with weights of its own", "build it inside the function")
    return NoExpressionError(
        f"is a live {kind.__module__}.{kind.__qualname__}".replace("builtins.", ""),
        "make it inside the function, or pass plain data as an argument",
    )


def _is_torch(kind: type, *names: str) -> bool:
    return kind.__module__ == "torch" and kind.__name__ in names
