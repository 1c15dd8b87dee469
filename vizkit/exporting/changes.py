"""What has changed since its cell ran: an export of the cell's text would bring the old state back, unnoticed."""

from __future__ import annotations

import ast
import enum
import types
from collections.abc import Iterator
from typing import Any

from vizkit.errors import InvalidInputError

_WITHOUT_EFFECTS = (
    ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare,
    ast.IfExp, ast.Starred, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_ABSENT = object()


def differ(one: Any, other: Any) -> bool:
    """Whether two values are not the same; where they cannot be compared, as arrays, only one and the same is."""
    if one is other:
        return False
    try:
        return bool(one != other)
    except Exception:
        return True


def check_defaults(function: types.FunctionType, node: ast.AST) -> None:
    """A default is computed once, when the cell runs: a name in it may mean something else by now."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for argument, default in _defaults(node):
        values = _default_values(function)
        names = {part.id for part in ast.walk(default) if isinstance(part, ast.Name)}
        is_known = names and names <= function.__globals__.keys() and argument in values
        if not is_known or not all(isinstance(part, _WITHOUT_EFFECTS) for part in ast.walk(default)):
            continue
        text = ast.unparse(default)
        try:
            now = eval(text, function.__globals__)
        except Exception:
            now = _ABSENT
        if differ(now, values[argument]):
            raise InvalidInputError.because(
                argument,
                values[argument],
                f"is the default since the cell of {function.__name__} ran, but {text} is "
                f"{'an error' if now is _ABSENT else repr(now)} by now",
                "run that cell again",
            )


def check_unchanged(value: Any, raw: types.FunctionType | type, node: ast.AST) -> None:
    """Raises `InvalidInputError` for what was added to a definition, or changed in it, after its cell ran."""
    name = raw.__name__
    if isinstance(raw, types.FunctionType):
        more = [key for key in vars(raw) if key != "__wrapped__"]
        if more and not getattr(node, "decorator_list", ()):
            raise InvalidInputError.because(
                f"{name}.{more[0]}", vars(raw)[more[0]], "is no part of the definition", "make it a name of its own"
            )
        if len(getattr(value, "registry", ())) > 1:
            raise InvalidInputError.because(
                name, value, "has implementations registered outside of it", "choose by isinstance inside of it"
            )
        return
    if isinstance(raw, enum.EnumMeta):
        return
    for attribute, then in _plain_attributes(node):
        now = vars(raw).get(attribute, _ABSENT)
        if type(now) is type(then) and now != then:
            raise InvalidInputError.because(
                f"{name}.{attribute}", now, f"is {then!r} in the cell of {name}, and was changed since", "set it there"
            )


def _defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr]]:
    places = [*node.args.posonlyargs, *node.args.args]
    for place, default in zip(reversed(places), reversed(node.args.defaults), strict=False):
        yield place.arg, default
    for place, keyword_default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        if keyword_default is not None:
            yield place.arg, keyword_default


def _default_values(function: types.FunctionType) -> dict[str, Any]:
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    return {**dict(zip(names, given, strict=True)), **(function.__kwdefaults__ or {})}


def _plain_attributes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Names that a class body sets to a constant, once, and that its methods leave alone."""
    found: dict[str, list[ast.expr]] = {}
    for statement in getattr(node, "body", ()):
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(statement.value)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            found.setdefault(statement.target.id, []).append(statement.value)
    stored = {
        part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
    }
    for name, values in found.items():
        if len(values) == 1 and name not in stored and isinstance(values[0], ast.Constant):
            yield name, values[0].value
