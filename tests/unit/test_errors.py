"""Errors say the value, the rule and the remedy, and can be caught as what a reader expects."""

from __future__ import annotations

import pytest

from vizkit import errors


def test_a_bad_argument_reads_value_rule_remedy():
    """One shape for all: `name=value: rule; remedy`."""
    error = errors.InvalidInputError.because("world_size", "four", "must be a whole number", "use world_size=4")
    assert str(error) == "world_size='four': must be a whole number; use world_size=4"


@pytest.mark.parametrize(
    "kind, python_kind",
    [
        (errors.InvalidInputError, ValueError),
        (errors.UnreadableTraceError, ValueError),
        (errors.TransportError, Exception),
        (errors.CollectiveMismatchError, Exception),
        (errors.RankFailedError, RuntimeError),
        (errors.RanksStuckError, RuntimeError),
    ],
)
def test_each_error_is_vizkits_and_pythons(kind: type[Exception], python_kind: type[Exception]):
    """`except VizkitError` catches all; `except ValueError` and the like catch what they would elsewhere."""
    assert issubclass(kind, errors.VizkitError)
    assert issubclass(kind, python_kind)


def test_a_stuck_run_is_a_failed_run():
    """Whoever catches failures catches hangs too."""
    assert issubclass(errors.RanksStuckError, errors.RankFailedError)


def test_a_failure_carries_who_what_and_the_logs():
    """The exception has the rank at fault, its traceback, a report for each rank, and what each printed."""
    reports = [errors.RankReport(0, "waiting", "all_reduce 4"), errors.RankReport(1, "failed", "backward")]
    error = errors.RankFailedError("rank 1 failed", rank=1, ranks=reports, logs=("a", "b"), remote_traceback="ZeroDiv")
    assert (str(error), error.rank, error.remote_traceback) == ("rank 1 failed", 1, "ZeroDiv")
    assert (error.ranks, error.logs) == (tuple(reports), ["a", "b"])
    assert [str(report) for report in error.ranks] == ["rank 0: waiting; all_reduce 4", "rank 1: failed; backward"]


def test_a_failure_needs_only_a_message_and_a_rank():
    """The rest is empty, not missing."""
    error = errors.RanksStuckError("stuck", rank=0)
    assert (error.ranks, error.logs, error.remote_traceback) == ((), [], "")
