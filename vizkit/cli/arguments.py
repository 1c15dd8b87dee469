"""What the words of a command line mean."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from vizkit.errors import InvalidInputError

_KEYWORD = re.compile(r"([^\W\d]\w*)=(.*)", re.DOTALL)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; use 1 or more") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1; use 1 or more")
    return number


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; use one such as 600") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be positive and finite; use one such as 600")
    return number


def call_arguments(words: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and keywords of a function, from words that are JSON, or text where they are not, or `name=value`.

    >>> call_arguments(["3", "digits", "lr=0.1", "sizes=[1, 2]", "note=a=b"])
    ([3, 'digits'], {'lr': 0.1, 'sizes': [1, 2], 'note': 'a=b'})
    """
    arguments: list[Any] = []
    keywords: dict[str, Any] = {}
    for word in words:
        if found := _KEYWORD.fullmatch(word):
            if found[1] in keywords:
                raise InvalidInputError.because("arguments", word, f"{found[1]} was given before", "give it once")
            keywords[found[1]] = _value(found[2])
        elif keywords:
            raise InvalidInputError.because(
                "arguments", word, "stands after one with a name", "put those without a name first"
            )
        else:
            arguments.append(_value(word))
    return arguments, keywords


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def load(target: str) -> Callable[..., Any]:
    """The function that `module:function` or `file.py:function` names; the current folder is searched first.

    Raises `InvalidInputError` where there is none; what goes wrong inside the module comes through.
    """
    where, colon, name = target.rpartition(":")
    if not (colon and where and name):
        raise InvalidInputError.because(
            "target", target, "is no module:function", "write for instance train:main, or train.py:main"
        )
    module = _module(where, target)
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise InvalidInputError.unknown("target", name, f"is not in {where}", known or ["(nothing callable there)"])
        function = getattr(function, part)
    if not callable(function):
        raise InvalidInputError.because("target", target, "cannot be called", "name a function")
    return function


def _module(where: str, target: str) -> ModuleType:
    path = Path(where)
    folder = Path.cwd()
    if path.suffix == ".py":
        if not path.is_file():
            raise InvalidInputError.because("target", target, f"there is no file {where}", "check the path")
        folder, where = path.resolve().parent, path.stem
    elif not all(part.isidentifier() for part in where.split(".")):
        raise InvalidInputError.because(
            "target", target, f"{where} is no module's name", "write for instance train:main"
        )
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry not in ("", str(folder)))]
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(f"{error.name}.")):
            raise
        raise InvalidInputError.because(
            "target",
            target,
            f"there is no module {error.name} in {folder} or among the installed ones",
            "run it in the folder that holds it",
        ) from None
