"""Seconds that each kind of work takes, in place of measured time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vizkit.errors import InvalidInputError
from vizkit.trace import NONE, NS_PER_S, Role, SpanKind

Seconds = float | Sequence[float]


@dataclass(frozen=True, init=False)
class Durations:
    """Seconds for one span of each kind, on one stage; a sequence gives one value for each stage.

    Keywords are the values or lower-case names of compute kinds (`F`, `B`, `I`, `W`, `optimizer`, `data`, `compute`);
    a kind left out takes no time. Raises `InvalidInputError` for an unknown kind and for a duration that is negative
    or not finite.

    >>> d = Durations(F=1, B=[2, 3])
    >>> d.of_ns("F"), d.of_ns("B", stage=1), d.of_ns("optimizer")
    (1000000000, 3000000000, 0)
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
            for number in value if isinstance(value, Sequence) else [value]:
                if not (math.isfinite(number) and number >= 0):
                    raise InvalidInputError.because(
                        name, number, "a duration is finite and not negative", "give seconds, such as 1e-3"
                    )
            table[kind] = tuple(value) if isinstance(value, Sequence) else float(value)
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
