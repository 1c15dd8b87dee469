"""Seconds that each kind of work takes, in place of measured time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.trace import NONE, NS_PER_S, Role, SpanKind

Seconds = float | Sequence[float]


@dataclass(frozen=True, init=False)
class Durations:
    """Seconds for one span of each kind, on one stage; a sequence gives one value for each stage.

    Keywords are the values or lower-case names of compute kinds (`F`, `B`, `I`, `W`, `optimizer`, `data`, `compute`);
    a kind left out takes no time, but a full backward B is a backward for the inputs I and one for the weights W:
    what is left out of the three follows from B = I + W, and from B alone I and W take half each. Raises
    `InvalidInputError` for an unknown kind, for a duration that is negative or not finite, and where B < I or B < W.

    >>> d = Durations(F=1, B=[2, 3])
    >>> d.of_ns("F"), d.of_ns("B", stage=1), d.of_ns("W", stage=1), d.of_ns("optimizer")
    (1000000000, 3000000000, 1500000000, 0)
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
            numbers = _numbers(name, value)
            table[kind] = numbers if isinstance(value, _SEQUENCES) else numbers[0]
        _complete_backward(table)
        object.__setattr__(self, "seconds", table)

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


_SEQUENCES = (Sequence, np.ndarray)


def _numbers(name: str, value: Seconds) -> tuple[float, ...]:
    numbers = tuple(value) if isinstance(value, _SEQUENCES) else (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, Real) or not (math.isfinite(number) and number >= 0):
            raise InvalidInputError.because(
                name, number, "a duration is finite and not negative", "give seconds, such as 1e-3"
            )
    if not numbers:
        raise InvalidInputError.because(name, value, "has a duration for no stage", "give one for each stage")
    return tuple(float(number) for number in numbers)


def _complete_backward(table: dict[SpanKind, Seconds]) -> None:
    """Adds what is left out of B, I and W where the others determine it."""
    full, inputs, weights = SpanKind.BACKWARD, SpanKind.BACKWARD_INPUT, SpanKind.BACKWARD_WEIGHT
    known = {kind for kind in (full, inputs, weights) if kind in table}
    if known == {full}:
        table[inputs] = table[weights] = _by_stage(table[full], 0.0, lambda whole, _: whole / 2)
    elif known == {inputs, weights}:
        table[full] = _by_stage(table[inputs], table[weights], lambda a, b: a + b)
    for part, rest in ((inputs, weights), (weights, inputs)):
        if known == {full, part}:
            table[rest] = _by_stage(table[full], table[part], lambda whole, a: whole - a)
            if min(_numbers_of(table[rest])) < 0:
                raise InvalidInputError.because(
                    part.value,
                    table[part],
                    f"is a part of the backward, which takes {table[full]!r}",
                    "give B = I + W, or I and W alone",
                )


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
