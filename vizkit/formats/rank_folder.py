"""A folder with the files of a run's ranks, from one node or gathered from many."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from vizkit.alignment import align, observed, on_common_clock, without_failed
from vizkit.errors import InvalidInputError, UnreadableTraceError
from vizkit.formats.gathered import Attempt, Ending, GatheredRun
from vizkit.formats.rank_file import SUFFIX, Body, Outcome, RankFile, read_rank_file
from vizkit.record import Record

_MOST_NAMED = 100
"""Of the missing ranks of an attempt; of the others only the number is said."""
_READ_THE_REST = "partial=True (on the command line: --partial) reads what is there"


def as_path(path: object) -> Path:
    """`path` as a `Path`; raises `InvalidInputError` for what names no file."""
    if isinstance(path, (str, os.PathLike)) and "\0" not in (text := os.fspath(path)):
        return Path(text)
    raise InvalidInputError.because("path", path, "names no file and no folder", "give a text or a pathlib.Path")


def rank_files(path: str | Path) -> list[Path]:
    """The files of ranks in a folder, or `path` itself if it is one; none where there are none."""
    path = as_path(path)
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.name.endswith(SUFFIX) and not file.name.startswith("."))
    return [path] if path.name.endswith(SUFFIX) and path.exists() else []


def read_run(path: str | Path, *, partial: bool = False, trust_hosts: bool = True) -> GatheredRun:
    """The run whose ranks left their files in the folder `path`, with clocks aligned on what the ranks did together.

    Ranks of one host share its clock; `trust_hosts=False` aligns them as if each had one of its own, which shows how
    well the alignment does. Raises `UnreadableTraceError` that names the file where a rank of the last attempt is
    missing, doubled, unfinished or cut off, or is of another run or world size; with `partial=True` such files are left
    out, and named in `left_out`. Earlier attempts ended in a failure, so what they lack is never an error.
    """
    files = rank_files(path)
    if not files:
        raise UnreadableTraceError(
            f"{path}: no file of a rank (*{SUFFIX}) in it; give the folder named after --trace, or one to which the "
            "files of all nodes were copied"
        )
    reading = _Reading(partial or not as_path(path).is_dir())  # of one file nobody expects the other ranks
    found = reading.of_one_run([file for path in files for file in reading.read(path)])
    attempts: dict[int, list[RankFile]] = defaultdict(list)
    for file in found:
        attempts[file.header.attempt].append(file)
    last = max(attempts, default=0)
    usable = [reading.complete(attempts[number], is_last=number == last) for number in sorted(attempts)]
    usable = [ranks for ranks in usable if ranks]
    if not usable:
        raise UnreadableTraceError(
            f"{path}: no rank has written what it did; " + "; ".join(reading.left_out or ["run it again"])
        )
    return _aligned(usable, trust_hosts, tuple(reading.left_out))


@dataclass
class _Finished:
    """A file with a record in it."""

    file: RankFile
    body: Body


@dataclass
class _Reading:
    """What was left out so far; where nothing may be, the first such thing is the error."""

    partial: bool
    left_out: list[str] = field(default_factory=list)

    def leave_out(self, path: Path, what: str, remedy: str) -> None:
        if not self.partial:
            raise UnreadableTraceError(f"{path}: {what}; {remedy}, or {_READ_THE_REST}")
        self.left_out.append(f"{path.name}: {what}")

    def read(self, path: Path) -> list[RankFile]:
        """The file, or nothing where it cannot be read."""
        try:
            return [read_rank_file(path)]
        except UnreadableTraceError as error:
            if not self.partial:
                raise
            self.left_out.append(str(error).removeprefix(f"{path.parent}/").split(";")[0])
            return []

    def of_one_run(self, files: Sequence[RankFile]) -> list[RankFile]:
        """Those of the run that has most files here; of several, the latest."""
        if not files:
            return []
        counts = Counter(file.header.run for file in files)
        latest = {file.header.run: file.header.began.unix_ns for file in files}
        run = max(counts, key=lambda run: (counts[run], latest[run]))
        for file in files:
            if file.header.run != run:
                self.leave_out(
                    file.path,
                    f"rank {file.header.rank} of another run ({file.header.run}; the other files are of {run})",
                    "move it to a folder of its own",
                )
        return [file for file in files if file.header.run == run]

    def complete(self, files: Sequence[RankFile], is_last: bool) -> list[_Finished]:
        """The ranks of one attempt that can be used, in order."""
        world_size = Counter(file.header.world_size for file in files).most_common(1)[0][0]
        number, folder = files[0].header.attempt, files[0].path.parent
        by_rank: dict[int, RankFile] = {}
        for file in files:
            header = file.header
            if header.world_size != world_size:
                self.leave_out(
                    file.path,
                    f"rank {header.rank} of {header.world_size} ranks, and the others are of {world_size}",
                    "move it to a folder of its own",
                )
            elif (other := by_rank.get(header.rank)) is not None:
                self.leave_out(
                    file.path,
                    f"rank {header.rank} of attempt {number} is in {other.path.name} too",
                    "keep one of the two",
                )
            else:
                by_rank[header.rank] = file
        missing = (rank for rank in range(world_size) if rank not in by_rank)
        for rank in islice(missing, _MOST_NAMED):
            self._lacks(
                folder,
                f"rank {rank} of {world_size} is missing (attempt {number})",
                "copy its file from the node where it ran",
                is_last,
            )
        if (unnamed := world_size - len(by_rank) - _MOST_NAMED) > 0:
            self._lacks(folder, f"{unnamed:,} more ranks are missing (attempt {number})", "copy their files", is_last)
        finished = []
        for rank, file in sorted(by_rank.items()):
            body = file.body
            if body is None or (body.outcome is Outcome.RUNNING and is_last):
                saved = "has written nothing yet" if body is None else "has saved only the beginning"
                self._lacks(
                    file.path,
                    f"rank {rank} on {file.header.host} {saved} (attempt {number}): it still runs, or was killed",
                    "wait for it",
                    is_last,
                )
            if body is not None:
                finished.append(_Finished(file, body))
        return finished

    def _lacks(self, path: Path, what: str, remedy: str, is_last: bool) -> None:
        """In an attempt that failed, a killed rank is a fact to tell and no error."""
        if is_last:
            self.leave_out(path, what, remedy)
        else:
            self.left_out.append(f"{path.name}: {what.removesuffix(': it still runs, or was killed')}")


def _aligned(attempts: Sequence[Sequence[_Finished]], trust_hosts: bool, left_out: tuple[str, ...]) -> GatheredRun:
    def clock_of(one: _Finished) -> str:
        header = one.file.header
        return header.clock if trust_hosts else f"{header.clock} {header.rank}"

    everything = [one for ranks in attempts for one in ranks]
    clocks = list(dict.fromkeys(clock_of(one) for one in everything))
    number_of = {clock: number for number, clock in enumerate(clocks)}
    stretches: list[list[tuple[int, int]]] = [[] for _ in clocks]
    guesses = [0] * len(clocks)
    for one in everything:
        number, record, began = number_of[clock_of(one)], one.body.record, one.file.header.began
        stretches[number].append((record.start_wall_ns, record.end_wall_ns))
        guesses[number] = began.unix_ns - began.monotonic_ns
    trusted = [
        [one.body.record if one.body.outcome is Outcome.RETURNED else without_failed(one.body.record) for one in ranks]
        for ranks in attempts
    ]
    bounds = observed(trusted, [[number_of[clock_of(one)] for one in ranks] for ranks in attempts])
    alignment = align(bounds, stretches, guesses)
    return GatheredRun(
        attempts=tuple(
            Attempt(
                number=ranks[0].file.header.attempt,
                world_size=ranks[0].file.header.world_size,
                record=Record(
                    tuple(on_common_clock(one.body.record, alignment, number_of[clock_of(one)]) for one in ranks),
                    notes=ranks[0].file.header.notes,
                ),
                endings={one.file.header.rank: Ending(one.body.outcome, one.body.detail) for one in ranks},
                results={one.file.header.rank: one.body.result for one in ranks},
            )
            for ranks in attempts
        ),
        hosts=tuple(dict.fromkeys(one.file.header.host for one in everything)),
        clock_error_s=alignment.error_s,
        left_out=left_out,
        cores=sum({one.file.header.clock: one.file.header.cores for one in attempts[-1]}.values()),
        num_threads=max(one.file.header.num_threads for one in attempts[-1]),
    )
