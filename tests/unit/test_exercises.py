"""A check says what was expected, what came and one hint; an untouched stub is not a failure."""

from __future__ import annotations

import numpy as np
import pytest

import vizkit as vk
from vizkit.exercises import ExerciseFailedError, Status, at_least, at_most, near


def twice_three(candidate):
    yield "twice 3", 6, candidate(3), "add the number to itself"
    yield "twice 0", 0, candidate(0), "zero needs no special case"


def bare_stub(x):
    raise NotImplementedError


def worded_stub(x):
    raise NotImplementedError("your turn")


def blank_stub(x):
    return ...


@pytest.mark.parametrize("stub", [bare_stub, worded_stub, blank_stub, ...])
def test_an_untouched_stub_is_not_attempted_yet(stub):
    """Whatever shape the stub has, Run All does not stop at its check."""
    verdict = vk.check(stub, twice_three)
    assert verdict.status is Status.NOT_ATTEMPTED
    assert repr(verdict) == "not attempted yet"
    assert not verdict


def test_a_stub_on_every_rank_is_not_attempted_yet():
    """A stub that ran on ranks comes back as `...` from each, or as the failure of the first."""
    assert vk.check("any", lambda _: [("results", [6, 6], [..., ...], "")]).status is Status.NOT_ATTEMPTED

    def fails_on_a_rank(candidate):
        raise vk.RankFailedError(
            "rank 0 failed", rank=0, remote_traceback="Traceback (most recent call last):\n  ...\nNotImplementedError\n"
        )

    assert vk.check("any", fails_on_a_rank).status is Status.NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("candidate", "text"),
    [
        (lambda x: x + x, "passed: twice 3; twice 0"),
        (lambda x: x * x, "not yet: twice 3: expected 6, got 9; hint: add the number to itself"),
        (
            lambda x: 6 if x else 1,
            "not yet: twice 0: expected 0, got 1; hint: zero needs no special case; already right: twice 3",
        ),
        (lambda x: x / 0, "not yet: it raised ZeroDivisionError: division by zero"),
    ],
)
def test_the_message(candidate, text):
    """Expected, got, hint; and what was right already."""
    assert repr(vk.check(candidate, twice_three)) == text


def test_an_error_of_the_attempt_is_not_taken_for_a_stub():
    """torch raises NotImplementedError, with a message, for operations that a backend lacks."""

    def lacks(x):
        raise NotImplementedError("reduce_scatter on gloo")

    assert repr(vk.check(lacks, twice_three)) == "not yet: it raised NotImplementedError: reduce_scatter on gloo"


@pytest.mark.parametrize("wrong", [bare_stub, lambda x: 1])
def test_a_solution_must_pass(wrong):
    """`required=True` turns anything but a pass into an exception, so nbval sees it."""
    with pytest.raises(ExerciseFailedError, match="the solution does not pass its own check: not "):
        vk.check(wrong, twice_three, required=True)


def test_a_solution_shows_its_own_exception():
    """The traceback of a broken solution is not swallowed."""
    with pytest.raises(ZeroDivisionError):
        vk.check(lambda x: x / 0, twice_three, required=True)


def test_a_check_that_checks_nothing_is_an_error_of_the_author():
    """A generator without a yield would pass everything."""

    def empty_check(_):
        return iter(())

    with pytest.raises(ExerciseFailedError, match="empty_check yields no expectation, so it checks nothing"):
        vk.check(1, empty_check)


@pytest.mark.parametrize(
    ("expected", "got", "met"),
    [
        (near(0.273, 0.001), 0.2735, True),
        (near(0.273, 0.001), 0.28, False),
        (near(1.0, 0.1), [0.95, 1.05], True),
        (near(1.0, 0.1), [0.95, 1.25], False),
        (near(1.0, 0.1), [], False),
        (near(1.0, 0.1), float("nan"), False),
        (near(1.0, 0.1), "1.0", False),
        (at_most(24), 24, True),
        (at_most(24), 25, False),
        (at_least(3), 3, True),
        (at_least(3), 2, False),
        (at_least(3), np.array([3, 4]), True),
        ([1, 2], np.array([1, 2]), True),
        ([[1, 2], [3, 4]], [np.array([1, 2]), np.array([3, 4])], True),
        ({"a": np.array([1])}, {"a": [1]}, True),
        ([1, 2], np.array([1, 3]), False),
    ],
)
def test_what_counts_as_met(expected, got, met):
    """Values, tensors by value, and ranges with both ends included."""
    assert bool(vk.check("any", lambda _: [("it", expected, got, "")])) is met


def test_bounds_are_worded():
    """A range is named in the message as a person would."""
    texts = [repr(vk.check(1, lambda _, e=e: [("it", e, 99.123456789, "")])) for e in (near(2, 0.5), at_most(3))]
    assert texts == ["not yet: it: expected 2 ± 0.5, got 99.1235", "not yet: it: expected at most 3, got 99.1235"]


def test_html_speaks_in_words_and_escapes():
    """A screen reader hears the status; what the learner's code returned cannot inject markup."""
    html = vk.check(1, lambda _: [("it", "a", "<script>", "look <again>")])._repr_html_()
    assert html.startswith('<div role="status"')
    assert "<strong>not yet</strong>" in html
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
    assert "hint: look &lt;again&gt;" in html


def test_long_values_are_cut():
    """A verdict stays a line or two."""
    text = repr(vk.check(1, lambda _: [("it", 0, list(range(1000)), "")]))
    assert len(text) < 250
    assert text.endswith("…")
