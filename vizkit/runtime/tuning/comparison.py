"""One table of tunings: bytes by formula and as recorded, virtual time, and what was learned from the same samples."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from vizkit.collectives.exchanges import Moved, Nodes
from vizkit.durations import Durations, Seconds
from vizkit.errors import InvalidInputError
from vizkit.hardware import Link
from vizkit.links import Links
from vizkit.metrics import breakdown, traffic
from vizkit.runtime import digits
from vizkit.runtime.launcher import launch
from vizkit.runtime.run import Run
from vizkit.runtime.tuning.training import Trained, train
from vizkit.runtime.tuning.tunings import TUNINGS, Tuning
from vizkit.sizes import divides, whole_number
from vizkit.trace import NS_PER_S, Trace

if TYPE_CHECKING:
    import pandas as pd

LINKS = Links(inside=Link(5e-6, 10e9), between=Link(50e-6, 125e6), ranks_per_node=2)
"""Nodes of two ranks, joined by 1 Gbit/s Ethernet."""
WORK = Durations(F=1e-3, B=2e-3)
"""Seconds for a rank's share of one batch."""
WARM_UP_BATCHES = 8
"""Not measured: DDP arranges its buckets anew, PowerSGD begins with plain all-reduces."""


@dataclass(frozen=True)
class Row:
    """One tuning in numbers; bytes are those of all ranks for the measured batches, without protocol headers.

    `wire_bytes` and `crossing_bytes` (from node to node) are recorded, and follow from each collective's payload and
    algorithm; `expected` is the formula for both. `batch_s` is virtual time for one global batch, `exposed_s` the
    communication in it that no compute hides, on the rank with most. `test_loss` and `num_right` of `num_tested` are
    those of the parameters in the end, which differ between ranks by at most `replicas_differ_by`.
    """

    tuning: Tuning
    num_batches: int
    wire_bytes: int
    crossing_bytes: int
    expected: Moved
    batch_s: float
    exposed_s: float
    test_loss: float
    num_right: int
    num_tested: int
    replicas_differ_by: float

    @property
    def name(self) -> str:
        return self.tuning.name

    @property
    def matches_formula(self) -> bool:
        """Whether recorded bytes are the formula's, in all and from node to node, to the byte."""
        expected = (round(self.expected.total_bytes), round(self.expected.crossing_bytes))
        return (self.wire_bytes, self.crossing_bytes) == expected


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """`rows`, one a tuning, and the `runs` that they are read from; `str` shows a table, bytes and times a batch."""

    runs: tuple[Run, ...]
    tunings: tuple[Tuning, ...]
    links: Links
    durations: Durations
    rows: tuple[Row, ...]

    def row(self, name: str) -> Row:
        """The row of a tuning; raises `InvalidInputError` with those that there are."""
        for row in self.rows:
            if row.name == name:
                return row
        names = [row.name for row in self.rows]
        raise InvalidInputError.unknown("name", name, "is no tuning here", names)

    def trace(self, name: str, num_batches: int | None = None) -> Trace:
        """The last `num_batches` batches of one tuning on the virtual clock, from time 0; all measured ones by default.

        Raises `InvalidInputError` for more batches than were measured.
        """
        row = self.row(name)
        count = row.num_batches if num_batches is None else whole_number("num_batches", num_batches)
        if count > row.num_batches:
            raise InvalidInputError.because(
                "num_batches", count, f"{row.num_batches} were measured", f"use num_batches={row.num_batches}"
            )
        trace = _last_batches(self.runs[self.rows.index(row)], self.links, self.durations, count)
        return trace.shift(-trace.extent_ns[0])

    def replayed(
        self, links: Links | None = None, durations: Durations | Mapping[str, Seconds] | None = None
    ) -> Comparison:
        """The same runs over other links or with other compute; nothing runs again.

        Raises `InvalidInputError` for nodes of another size, which the runs were made with.
        """
        links = self.links if links is None else links
        if links.ranks_per_node != self.links.ranks_per_node:
            raise InvalidInputError.because(
                "ranks_per_node",
                links.ranks_per_node,
                f"the ranks ran in nodes of {self.links.ranks_per_node}",
                "keep it, or compare again",
            )
        given = _with_forward(self.durations if durations is None else durations)
        rows = []
        for row, run in zip(self.rows, self.runs, strict=True):
            batch_s, exposed_s = _times_s(_last_batches(run, links, given, row.num_batches), row.num_batches)
            rows.append(replace(row, batch_s=batch_s, exposed_s=exposed_s))
        return replace(self, links=links, durations=given, rows=tuple(rows))

    def __add__(self, other: Comparison) -> Comparison:
        """One table of both; raises `InvalidInputError` where they were replayed differently."""
        for name in ("links", "durations"):
            if (mine := getattr(self, name)) != (theirs := getattr(other, name)):
                raise InvalidInputError.because(name, str(theirs), f"differ from {mine}", "replay one like the other")
        runs, tunings, rows = self.runs + other.runs, self.tunings + other.tunings, self.rows + other.rows
        return replace(self, runs=runs, tunings=tunings, rows=rows)

    def to_frame(self) -> pd.DataFrame:
        """A pandas table with one row a tuning; bytes and seconds for one global batch."""
        import pandas as pd

        table = [
            {
                "tuning": row.name,
                "wire_bytes": row.wire_bytes / row.num_batches,
                "expected_wire_bytes": row.expected.total_bytes / row.num_batches,
                "crossing_bytes": row.crossing_bytes / row.num_batches,
                "expected_crossing_bytes": row.expected.crossing_bytes / row.num_batches,
                "batch_s": row.batch_s,
                "exposed_s": row.exposed_s,
                "test_loss": row.test_loss,
                "accuracy": row.num_right / row.num_tested,
            }
            for row in self.rows
        ]
        return pd.DataFrame(table).set_index("tuning")

    def __str__(self) -> str:
        lines = [f"{self.links}; virtual clock; bytes and times for one batch of all ranks", _line(*_TITLES)]
        for row in self.rows:
            per_batch = [count / row.num_batches for count in (row.wire_bytes, row.crossing_bytes)]
            formula = "equal" if row.matches_formula else f"{row.expected.total_bytes / row.num_batches:,.0f}"
            times = [f"{1e3 * seconds:.2f}" for seconds in (row.batch_s, row.exposed_s)]
            right = f"{row.num_right / row.num_tested:.0%}"
            lines.append(_line(row.name, *(f"{count:,.0f}" for count in per_batch), formula, *times, right))
        return "\n".join(lines)

    __repr__ = __str__


def compare(
    tunings: Sequence[Tuning] = TUNINGS,
    *,
    data: tuple[torch.Tensor, torch.Tensor] | None = None,
    world_size: int = 4,
    links: Links = LINKS,
    durations: Durations | Mapping[str, Seconds] = WORK,
    num_batches: int = 80,
    global_batch: int = 128,
    timeout_s: float = 60,
) -> Comparison:
    """Trains the kit's network on handwritten digits with each tuning, on real ranks, and compares what came.

    All tunings see the same `num_batches` batches. Bytes and times are those after the first `WARM_UP_BATCHES`. Times
    are a replay with `durations` (seconds for a rank's share of a batch; kind "compute" is what one exchange by the
    kit's or PowerSGD's hook computes) over `links`, so they are the same in every run. Ranks are on the CPU with gloo.

    Raises `InvalidInputError` where sizes do not divide: ranks by those of a node, samples of a batch by the ranks,
    batches by each tuning's cycle.
    """
    Nodes(whole_number("world_size", world_size), links.ranks_per_node)
    divides("global_batch", digits.batch_of_digits(global_batch), "world_size", world_size)
    for tuning in tunings:
        for name, count in (("num_batches", num_batches), ("warm-up batches", WARM_UP_BATCHES)):
            divides(name, whole_number(name, count), f"cycle of {tuning.name!r}", tuning.cycle)
    if num_batches <= WARM_UP_BATCHES:
        raise InvalidInputError.because(
            "num_batches",
            num_batches,
            f"the first {WARM_UP_BATCHES} warm up and are not measured",
            f"use num_batches={10 * WARM_UP_BATCHES}",
        )
    images, labels = digits.digits() if data is None else data
    given = _with_forward(durations)
    train_so = functools.partial(
        train, num_batches=num_batches, global_batch=global_batch, ranks_per_node=links.ranks_per_node
    )
    runs = [
        launch(train_so, tuning, images, labels, world_size=world_size, device="cpu", timeout_s=timeout_s)
        for tuning in tunings
    ]
    rows = [
        _row(tuning, run, links, given, num_batches - WARM_UP_BATCHES, images, labels)
        for tuning, run in zip(tunings, runs, strict=True)
    ]
    return Comparison(tuple(runs), tuple(tunings), links, given, tuple(rows))


_TITLES = ("", "wire (B)", "between nodes (B)", "formula", "batch (ms)", "exposed (ms)", "right")


def _line(name: str, *cells: str) -> str:
    widths = [len(title) + 2 for title in _TITLES[1:]]
    return f"{name:22}" + "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _with_forward(durations: Durations | Mapping[str, Seconds]) -> Durations:
    given = Durations.of(durations)
    if not given.of_ns("F"):
        raise InvalidInputError.because(
            "durations", given, "a forward has to take time, as batches are told apart by it", 'use {"F": 1e-3}'
        )
    return given


def _row(
    tuning: Tuning,
    run: Run,
    links: Links,
    durations: Durations,
    num_batches: int,
    images: torch.Tensor,
    labels: torch.Tensor,
) -> Row:
    trace = _last_batches(run, links, durations, num_batches)
    wire = traffic(trace).wire_bytes
    batch_s, exposed_s = _times_s(trace, num_batches)
    ranks: list[Trained] = run.results
    loss, num_right = _tested(ranks[0].parameters, images, labels)
    nodes = Nodes(run.world_size, links.ranks_per_node)
    shapes = [tuple(p.shape) for p in ranks[0].parameters]
    return Row(
        tuning=tuning,
        num_batches=num_batches,
        wire_bytes=int(wire.sum()),
        crossing_bytes=links.crossing_bytes(wire),
        expected=num_batches // tuning.cycle * tuning.moved(shapes, nodes, run.backend),
        batch_s=batch_s,
        exposed_s=exposed_s,
        test_loss=loss,
        num_right=num_right,
        num_tested=len(labels) - digits.NUM_TRAINING_SAMPLES,
        replicas_differ_by=max(
            float((a - b).abs().max())
            for rank in ranks
            for a, b in zip(rank.parameters, ranks[0].parameters, strict=True)
        ),
    )


def _last_batches(run: Run, links: Links, durations: Durations, num_batches: int) -> Trace:
    """What each rank did from the forward of its last `num_batches` batches on; each batch has one forward."""
    trace = run.replay(links, durations)
    begins = np.zeros(trace.world_size, np.int64)
    for rank in range(trace.world_size):
        begins[rank] = np.sort(trace.filter(rank=rank, kind="F").start_ns)[-num_batches]
    return trace.filter(trace.start_ns >= begins[trace.rank])


def _times_s(trace: Trace, num_batches: int) -> tuple[float, float]:
    exposed_ns = breakdown(trace).exposed_communication.max()
    return trace.duration_ns / NS_PER_S / num_batches, float(exposed_ns) / NS_PER_S / num_batches


def _tested(parameters: Sequence[torch.Tensor], images: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    """Loss, and how many are right, of the digits that nobody trained on."""
    model = digits.network()
    names = [name for name, _ in model.named_parameters()]
    rest = slice(digits.NUM_TRAINING_SAMPLES, None)
    with torch.no_grad():
        scores = functional_call(model, dict(zip(names, parameters, strict=True)), (images[rest],))
    loss = cross_entropy(scores, labels[rest])
    return float(loss), int((scores.argmax(dim=1) == labels[rest]).sum())
