"""Durations stand in for measured time, in seconds by kind and stage."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vizkit.durations import Durations
from vizkit.errors import InvalidInputError
from vizkit.trace import SpanKind


@pytest.mark.parametrize(
    "kind, stage, nanoseconds",
    [
        ("F", -1, 1_000_000_000),
        (SpanKind.FORWARD, 7, 1_000_000_000),
        ("backward", 0, 2_000_000_000),
        ("B", 1, 3_500_000_000),
        ("optimizer", -1, 1),
        ("data", -1, 0),
    ],
)
def test_each_kind_has_its_time(kind: str, stage: int, nanoseconds: int):
    """One number for all stages or one for each; a kind left out takes none; whole nanoseconds."""
    assert Durations(F=1, backward=[2, 3.5], optimizer=1e-9).of_ns(kind, stage) == nanoseconds


def test_equal_durations_are_equal():
    """A frozen value: letters and names mean the same."""
    assert Durations(F=1) == Durations(forward=1.0)


@pytest.mark.parametrize(
    "seconds, message",
    [
        ({"F": -1}, "F=-1: a duration is finite and not negative; give seconds, such as 1e-3"),
        ({"B": [1, math.nan]}, "B=nan: a duration is finite and not negative; give seconds, such as 1e-3"),
        ({"W": math.inf}, "W=inf: a duration is finite and not negative; give seconds, such as 1e-3"),
        ({"all_reduce": 1}, "all_reduce=1: only compute has a duration of its own; give a link for communication"),
        ({"wait": 1}, "wait=1: only compute has a duration of its own; give a link for communication"),
    ],
)
def test_an_impossible_duration_is_refused(seconds: dict[str, Any], message: str):
    """Negative, undefined, or of something that is not compute."""
    with pytest.raises(InvalidInputError) as error:
        Durations(**seconds)
    assert str(error.value) == message


def test_an_unknown_kind_is_refused_with_the_known_ones():
    """A typo is answered with the list."""
    with pytest.raises(InvalidInputError, match="kind='forwards': is not a kind of span; use one of F, B, I, W, opt"):
        Durations(forwards=1)


@pytest.mark.parametrize("stage", [-1, 2])
def test_a_stage_without_a_duration_is_refused(stage: int):
    """Durations by stage need a span's stage."""
    with pytest.raises(InvalidInputError) as error:
        Durations(B=[2, 3]).of_ns("B", stage)
    assert str(error.value) == (
        f"stage={stage}: B has durations for 2 stages; give one duration for each stage, and a stage to each span"
    )
