"""Benchmarks compare two ways within one run; the table with all of them stands at the end of the test run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = pytest.StashKey[list["Row"]]()


@dataclass(frozen=True)
class Row:
    """`ours` and `peer` in the same `unit`; their ratio may be `limit` at the most."""

    what: str
    ours: float
    peer: float
    peer_name: str
    unit: str
    limit: float

    @property
    def ratio(self) -> float:
        return self.ours / self.peer


Compare = Callable[[Row], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.benchmark)


def pytest_configure(config: pytest.Config) -> None:
    config.stash.setdefault(ROWS, [])


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> Compare:
    """Add a row to the table and fail where the ratio is over its limit."""

    def judge(row: Row) -> None:
        request.config.stash[ROWS].append(row)
        assert row.ratio <= row.limit, (
            f"{row.what}: {row.ratio:.3f} of {row.peer_name}, at most {row.limit:.3f} allowed"
        )

    return judge


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section("speed and memory, ratios within this run")
        terminalreporter.line(f"{'what':52} {'ours':>12} {'peer':>12}  {'ratio':>7} {'limit':>7}  peer")
    for row in rows:
        ours, peer = (f"{value:.4g} {row.unit}" for value in (row.ours, row.peer))
        terminalreporter.line(
            f"{row.what:52} {ours:>12} {peer:>12}  {row.ratio:7.3f} {row.limit:7.3f}  {row.peer_name}"
        )
