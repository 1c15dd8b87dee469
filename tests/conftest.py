"""What every test may rely on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes import leftover_descendants, stop, wait_until_gone

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent


@pytest.fixture
def repository() -> Path:
    """The checkout's top folder."""
    return REPOSITORY


@pytest.fixture(autouse=True)
def no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that launches ranks fails where a process of its own outlives it."""
    if (TESTS / "distributed") not in request.path.parents:
        yield
        return
    before = set(leftover_descendants())
    yield

    def left_by_this_test() -> list[psutil.Process]:
        return [process for process in leftover_descendants() if process not in before]

    still_there = wait_until_gone(left_by_this_test)
    stop(left_by_this_test())
    assert still_there == [], "processes outlived the test"
