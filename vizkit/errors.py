"""Every error that vizkit raises on purpose: the value, the rule it broke, and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class VizkitError(Exception):
    """Base of all errors that vizkit raises."""


class InvalidInputError(VizkitError, ValueError):
    """An argument breaks a rule; the message says the value, the rule and the remedy.

    >>> str(InvalidInputError.because("world_size", 0, "must be at least 1", "use world_size=1 for one process"))
    'world_size=0: must be at least 1; use world_size=1 for one process'
    """

    @classmethod
    def because(cls, name: str, value: object, rule: str, remedy: str) -> InvalidInputError:
        """The one shape that messages about arguments have."""
        return cls(f"{name}={value!r}: {rule}; {remedy}")

    @classmethod
    def unknown(cls, name: str, value: object, rule: str, known: Iterable[str]) -> InvalidInputError:
        """For a value that should be one of a few names: the remedy says the nearest, and all.

        >>> str(InvalidInputError.unknown("recompute", "ful", "is no way to recompute", ("none", "full")))
        "recompute='ful': is no way to recompute; did you mean full? use one of none, full"
        """
        names = list(known)
        meant = "".join(f"did you mean {found}? " for found in difflib.get_close_matches(str(value), names, n=1))
        return cls.because(name, value, rule, f"{meant}use one of {', '.join(names)}")


class UnreadableTraceError(VizkitError, ValueError):
    """A file is not a trace that vizkit can read."""


class TransportError(VizkitError):
    """A function, an argument or a result could not travel between the notebook and a rank."""


class CollectiveMismatchError(VizkitError):
    """Two ranks entered the same collective with different operations, dtypes or sizes."""


class RunStoppedError(VizkitError):
    """Somebody pressed Stop in the live view of a run; `run` has what was recorded until then, or is None."""

    def __init__(self, message: str, run: Any = None) -> None:
        super().__init__(message)
        self.run = run

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the person who pressed Stop knows where."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class RankReport:
    """What one rank was doing when the run ended."""

    rank: int
    state: str
    last_operation: str
    finished_operations: int = 0
    stack: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.state}; {self.last_operation}"


class RankFailedError(VizkitError, RuntimeError):
    """A rank raised, exited or was killed; the rank at fault leads the report.

    Attributes: `rank` (the one at fault), `remote_traceback` (its traceback as text, or ""), `ranks` (a `RankReport`
    for each rank) and `logs` (what each rank printed).
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        ranks: Sequence[RankReport] = (),
        logs: Sequence[str] = (),
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.ranks = tuple(ranks)
        self.logs = list(logs)
        self.remote_traceback = remote_traceback


class RanksStuckError(RankFailedError):
    """The ranks wait for each other and would do so for ever."""
