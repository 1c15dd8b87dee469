"""What the tests of the recorder read off a run."""

from __future__ import annotations

from itertools import groupby

from vizkit.runtime.run import Run
from vizkit.trace import Role


def table(run: Run) -> list[tuple[str, list[int], int, int]]:
    return [tuple(row) for row in run.collectives.values.tolist()]


def kinds(run: Run, rank: int = 0) -> list[str]:
    """The labelled compute of a rank on the virtual clock, in order; waits and unlabelled stretches are left out."""
    spans = sorted(run.replay().filter(rank=rank), key=lambda span: span.start_ns)
    labelled = (span.kind.value for span in spans if span.kind.role is Role.COMPUTE and span.name)
    return [kind for kind, _ in groupby(labelled)]
