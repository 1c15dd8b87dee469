"""Durations stand in for measured time, in seconds by kind and stage."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
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
        ({"B": "12"}, "B='12': a duration is finite and not negative; give seconds, such as 1e-3"),
        ({"F": np.ones((1, 2))}, "F=[1.0, 1.0]: a duration is finite and not negative; give seconds, such as 1e-3"),
        ({"F": []}, "F=[]: has a duration for no stage; give one for each stage"),
        (
            {"F": 1e10},
            "F=10000000000.0: a duration is 146 years at most, in nanoseconds of 64 bits; give seconds, such as 1e-3",
        ),
        (
            {"F": 1e-12, "B": [2e-12]},
            "durations=2e-12: is the longest, and times are whole nanoseconds; give seconds, such as 1e-3",
        ),
        ({"forward": 1, "F": 2}, "F=2: is F, which is given already; give it once"),
        ({"B": 1, "I": 2}, "I=2.0: is a part of the backward, which takes 1.0; give B = I + W, or I and W alone"),
        ({"wait": 1}, "wait=1: only compute has a duration of its own; give a link for communication"),
    ],
)
def test_an_impossible_duration_is_refused(seconds: dict[str, Any], message: str):
    """Negative, undefined, no number, out of the range of nanoseconds, twice, or of something that is not compute."""
    with pytest.raises(InvalidInputError) as error:
        Durations(**seconds)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "given, completed",
    [
        ({"B": 3}, (3, 1.5, 1.5)),
        ({"I": 2, "W": 1}, (3, 2, 1)),
        ({"B": 3, "I": 2}, (3, 2, 1)),
        ({"B": 3, "W": 2}, (3, 1, 2)),
        ({"I": 2}, (2, 2, 0)),
        ({"W": 2}, (2, 0, 2)),
        ({"B": 0.3, "I": 0.1 + 0.2}, (0.3, 0.3, 0)),  # the sum of floats is a little over 0.3
        ({"B": 5, "I": 2, "W": 1}, (5, 2, 1)),
        ({"F": 1}, (0, 0, 0)),
    ],
)
def test_what_is_left_out_of_a_backward_follows(given: dict[str, float], completed: tuple[float, ...]):
    """B = I + W, half each from B alone; all three are taken as they are."""
    durations = Durations(**given)
    assert tuple(durations.of_ns(kind) for kind in "BIW") == tuple(round(s * 1e9) for s in completed)


@pytest.mark.parametrize("by_stage", [[1, 2], (1.0, 2.0), np.array([1, 2]), range(1, 3), pd.Series([1, 2])], ids=type)
def test_a_sequence_of_any_type_has_one_duration_for_each_stage(by_stage: Any):
    assert Durations(F=by_stage) == Durations(F=[1, 2])


@pytest.mark.parametrize("number", [1, 1.0, np.float32(1), np.int64(1), np.array(1), Fraction(1)], ids=type)
def test_a_number_of_any_type_is_for_all_stages(number: Any):
    assert Durations(F=number) == Durations(F=1)


@pytest.mark.parametrize("given", [None, 5, "F", [1, 2]])
def test_what_holds_no_durations_is_refused(given: Any):
    with pytest.raises(InvalidInputError) as error:
        Durations.of(given)
    assert str(error.value) == (
        f'durations={given!r}: are seconds for each kind; use {{"F": 1, "B": 2}} or vk.Durations(F=1, B=2)'
    )


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
