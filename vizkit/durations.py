"""Seconds that each kind of work takes, in place of measured time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from vizkit.errors import InvalidInputError
from vizkit.trace import NONE, NS_PER_S, Role, SpanKind

Seconds = float | Sequence[float]
LONGEST_S = 2**62 / NS_PER_S
"""Times are nanoseconds in 64 bits: 146 years, with a bit to spare for sums."""


@dataclass(frozen=True, init=False, repr=False)
class Durations:
    """Seconds for one span of each kind, on one stage; a sequence gives one value for each stage.

    Keywords are the values or lower-case names of compute kinds (`F`, `B`, `I`, `W`, `optimizer`, `data`, `compute`);
    a kind left out takes no time, but a full backward B is a backward for the inputs I and one for the weights W:
    what is left out of the three follows from B = I + W, and from B alone I and W take half each. A sequence may be an
    array or a pandas column. Raises `InvalidInputError` for an unknown kind and one given twice, for a duration that is
    negative, not finite or over 146 years, where all would be rounded to 0 nanoseconds, and where B < I or B < W.

    >>> d = Durations(F=1, B=[2, 3])
    >>> d.of_ns("F"), d.of_ns("B", stage=1), d.of_ns("W", stage=1), d.of_ns("optimizer")
    (1000000000, 3000000000, 1500000000, 0)
    >>> d
    Durations(F=1, B=[2, 3], I=[1, 1.5], W=[1, 1.5])
    """

    seconds: Mapping[SpanKind, Seconds] = field(default_factory=dict)

    def __init__(self, **seconds: Seconds) -> None:
        table: dict[SpanKind, Seconds] = {}
        for name, value in seconds.items():
            kind = SpanKind.parse(name)
            if kind.role is not Role.COMPUTE:
                raise InvalidInputError.because(
                    name, value, "only compute has a duration of its own", "give a link for communication"
                )
            if kind in table:
                raise InvalidInputError.because(name, value, f"is {kind.value}, which is given already", "give it once")
            table[kind] = _checked(name, value.tolist() if hasattr(value, "tolist") else value)
        _refuse_what_rounds_to_nothing(table)
        _complete_backward(table)
        object.__setattr__(self, "seconds", table)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k.value}={_text(v)}' for k, v in self.seconds.items())})"

    @classmethod
    def of(cls, given: Durations | Mapping[str, Seconds]) -> Durations:
        """`given` itself, or the durations in a mapping; raises `InvalidInputError` where it is neither.

        >>> Durations.of({"F": 1}) == Durations(F=1)
        True
        """
        if isinstance(given, Durations):
            return given
        if not isinstance(given, Mapping):
            raise InvalidInputError.because(
                "durations",
                given,
                "are seconds for each kind",
                'use {"F": 1, "B": 2} or vk.Durations(F=1, B=2)',
            )
        return Durations(**{str(name): value for name, value in given.items()})

    def of_ns(self, kind: SpanKind | str, stage: int = NONE) -> int:
        """Nanoseconds that one span of this kind takes on this stage; 0 for a kind that was left out.

        Raises `InvalidInputError` where durations differ by stage and this stage has none.
        """
        value = self.seconds.get(SpanKind.parse(kind), 0.0)
        if isinstance(value, Sequence):
            if not 0 <= stage < len(value):
                raise InvalidInputError.because(
                    "stage",
                    stage,
                    f"{SpanKind.parse(kind).value} has durations for {len(value)} stages",
                    "give one duration for each stage, and a stage to each span",
                )
            value = value[stage]
        return round(value * NS_PER_S)


def _text(value: Seconds) -> str:
    return f"[{', '.join(f'{v:.4g}' for v in value)}]" if isinstance(value, Sequence) else f"{value:.4g}"


def _checked(name: str, value: Any) -> Seconds:
    """A float, or a tuple of one for each stage."""
    by_stage = isinstance(value, Sequence) and not isinstance(value, str)
    numbers = tuple(value) if by_stage else (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= float(number) < math.inf:
            raise InvalidInputError.because(
                name, number, "a duration is finite and not negative", "give seconds, such as 1e-3"
            )
        if float(number) > LONGEST_S:
            raise InvalidInputError.because(
                name, number, "a duration is 146 years at most, in nanoseconds of 64 bits", "give seconds, such as 1e-3"
            )
    if not numbers:
        raise InvalidInputError.because(name, value, "has a duration for no stage", "give one for each stage")
    return tuple(map(float, numbers)) if by_stage else float(value)


def _refuse_what_rounds_to_nothing(table: Mapping[SpanKind, Seconds]) -> None:
    longest = max((number for value in table.values() for number in _numbers_of(value)), default=0.0)
    if longest > 0 and round(longest * NS_PER_S) == 0:
        raise InvalidInputError.because(
            "durations", longest, "is the longest, and times are whole nanoseconds", "give seconds, such as 1e-3"
        )


def _complete_backward(table: dict[SpanKind, Seconds]) -> None:
    """Adds what is left out of B, I and W where the others determine it."""
    full, inputs, weights = SpanKind.BACKWARD, SpanKind.BACKWARD_INPUT, SpanKind.BACKWARD_WEIGHT
    known = {kind for kind in (full, inputs, weights) if kind in table}
    if known == {full}:
        table[inputs] = table[weights] = _by_stage(table[full], 0.0, lambda whole, _: whole / 2)
    elif known and full not in known:
        table[full] = _by_stage(table.get(inputs, 0.0), table.get(weights, 0.0), lambda a, b: a + b)
    for part, rest in ((inputs, weights), (weights, inputs)):
        if known == {full, part}:
            table[rest] = _by_stage(table[full], table[part], _difference)
            if min(_numbers_of(table[rest])) < 0:
                raise InvalidInputError.because(
                    part.value,
                    table[part],
                    f"is a part of the backward, which takes {table[full]!r}",
                    "give B = I + W, or I and W alone",
                )


def _difference(whole: float, part: float) -> float:
    """In nanoseconds, so that a part as long as the whole leaves 0, whatever was rounded on the way."""
    return (whole - part) if round((whole - part) * NS_PER_S) else 0.0


def _by_stage(a: Seconds, b: Seconds, combine: Callable[[float, float], float]) -> Seconds:
    """`combine` for each stage; one number stands for all stages."""
    if not isinstance(a, Sequence) and not isinstance(b, Sequence):
        return combine(a, b)
    stages = max(len(_numbers_of(a)), len(_numbers_of(b)))
    both = [_numbers_of(x) * (stages if len(_numbers_of(x)) == 1 else 1) for x in (a, b)]
    if len(both[0]) != len(both[1]):
        raise InvalidInputError.because(
            "durations", [len(x) for x in both], "differ in their number of stages", "give one value for each stage"
        )
    return tuple(map(combine, *both))


def _numbers_of(value: Seconds) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,)
