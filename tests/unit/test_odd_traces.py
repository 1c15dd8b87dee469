"""Odd files of ranks and odd traces: each fault is named with its file, and nothing is read wrong or waited for."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vizkit as vk
from tests.unit.test_trace_folder import write
from vizkit.alignment import Bounds, align
from vizkit.cli.arguments import load
from vizkit.formats.rank_file import file_name, read_rank_file, write_rank_file
from vizkit.formats.rank_folder import read_run
from vizkit.memory_samples import MemorySamples
from vizkit.trace import Span, Trace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks that did well."""
    for rank in range(2):
        write(tmp_path, rank)
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """Rank 1's file, rewritten after `change` of its header and body."""
    path = folder / file_name(1, 0)
    header, body, _ = gzip.decompress(path.read_bytes()).split(b"\n")
    known, did = json.loads(header), json.loads(body)
    change(known, did)
    path.write_bytes(gzip.compress(f"{json.dumps(known)}\n{json.dumps(did)}\n".encode()))
    return path


def event(did: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(one for one in did["record"]["events"] if one["event"] == kind)


def close_twice(_: dict[str, Any], did: dict[str, Any]) -> None:
    did["record"]["events"].insert(0, event(did, "SpanClosed"))


FAULTS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "version of letters": (lambda known, did: known.update(version="x"), "Expected `int`, got `str`"),
    "version zero": (lambda known, did: known.update(version=0), "there never was a format 0"),
    "rank beyond the world": (lambda known, did: known.update(rank=2), "rank 2 of 2, attempt 0"),
    "negative rank": (lambda known, did: known.update(rank=-1), "rank -1 of 2, attempt 0"),
    "negative attempt": (lambda known, did: known.update(attempt=-1), "rank 1 of 2, attempt -1"),
    "another rank's record": (lambda known, did: did["record"].update(rank=0), "it is of rank 0, and"),
    "end before start": (lambda known, did: did["record"].update(start_wall_ns=10**17), "it ends before it starts"),
    "time of 64 bits": (lambda known, did: did["record"].update(end_wall_ns=2**63), "a time of 9.22e+18 ns"),
    "times without sizes": (
        lambda known, did: did["record"].update(memory_wall_ns=[1]),
        "0 sizes of memory at 1",
    ),
    "sizes of no category": (
        lambda known, did: did["record"].update(tensors={"wall_ns": [1], "num_bytes": [[1, 2]]}),
        "cannot reshape",
    ),
    "closed before opened": (close_twice, "a span was closed that nobody had opened"),
    "no such microbatch": (
        lambda known, did: event(did, "SpanOpened")["label"].update(microbatch=10**18),
        "microbatch 1000000000000000000",
    ),
    "no such peer": (lambda known, did: event(did, "Call").update(peer=10**12), "peer 1000000000000, of 2"),
    "peer below none": (lambda known, did: event(did, "Call").update(peer=-2), "peer -2, of 2"),
    "negative member": (lambda known, did: event(did, "Call").update(members=[-1, 0]), "member -1, of 2"),
    "no such member": (lambda known, did: event(did, "Call").update(members=[0, 9]), "member 9, of 2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_contradicts_itself_is_named(name: str, folder: Path):
    """Well-formed JSON that no rank can have written; the other rank is still there with `partial=True`."""
    change, message = FAULTS[name]
    path = edit(folder, change)
    with pytest.raises(vk.UnreadableTraceError) as refused:
        vk.read_trace(folder)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)
    assert set(vk.read_trace(folder, partial=True).rank.tolist()) == {0}


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 99, b"{}", gzip.compress(b""), gzip.compress(b"\n\n"), b"\x1f\x8b\x08"]
)
def test_rubbish_is_no_file_of_a_rank(content: bytes, folder: Path):
    """Empty, binary, not packed, packed nothing."""
    path = folder / file_name(1, 0)
    path.write_bytes(content)
    with pytest.raises(vk.UnreadableTraceError, match=str(path)):
        vk.read_trace(folder)


def test_cut_off_anywhere(folder: Path):
    """At any byte of the packed file and of the text in it."""
    path = folder / file_name(1, 0)
    packed = path.read_bytes()
    text = gzip.decompress(packed)
    cuts = [packed[:end] for end in range(0, len(packed), 41)]
    cuts += [gzip.compress(text[:end]) for end in range(0, len(text), 97) if not text[:end].endswith(b"\n")]
    for cut in cuts:
        path.write_bytes(cut)
        with pytest.raises(vk.UnreadableTraceError):
            vk.read_trace(folder)


def test_pipes_and_links_are_not_waited_for(folder: Path):
    """A named pipe has no end; a link may lead nowhere, to itself, or to the other rank."""
    path = folder / file_name(1, 0)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(vk.UnreadableTraceError, match="is no file"):
        vk.read_trace(folder)
    for target, message in (
        ("/nowhere", "No such file"),
        (path.name, "Too many levels"),
        (file_name(0, 0), "rank 0 of attempt 0 is in"),
    ):
        path.unlink()
        path.symlink_to(target)
        with pytest.raises(vk.UnreadableTraceError, match=message):
            vk.read_trace(folder)


def test_a_world_of_a_billion_ranks_is_not_counted_out(folder: Path):
    """A hundred missing ranks are named, and of the others their number."""
    (folder / file_name(1, 0)).unlink()
    path = folder / file_name(0, 0)
    text = gzip.decompress(path.read_bytes()).replace(b'"world_size":2', b'"world_size":1000000000')
    path.write_bytes(gzip.compress(text))
    left_out = read_run(folder, partial=True).left_out
    assert len(left_out) == 101
    assert left_out[-1].endswith("999,999,899 more ranks are missing (attempt 0)")


@pytest.mark.parametrize("path", [None, 1, 1.5, [], b"/tmp", "a\0b"])
def test_what_names_no_folder(path: Any):
    """Said as an argument's fault."""
    for read in (vk.read_trace, vk.read_run):
        with pytest.raises(vk.InvalidInputError, match=r"names no file and no folder; give a text or a pathlib\.Path"):
            read(path)


@pytest.mark.parametrize("tables", ["send", [0], None, {"name": 1}])
def test_a_chrome_trace_with_damaged_tables(tables: Any, tmp_path: Path):
    """What vizkit wrote beside the events is not what it writes."""
    path = vk.write_chrome_trace(Trace.from_spans(spans("compute", 0, 9), clock="wall"), tmp_path / "trace.json")
    known = json.loads(path.read_text())
    known["otherData"]["vizkit"]["tables"] = tables
    path.write_text(json.dumps(known))
    with pytest.raises(vk.UnreadableTraceError, match="its vizkit part is damaged"):
        vk.read_trace(path)


def test_memory_that_was_never_sampled_comes_back(folder: Path):
    """No sample is a list without columns, and still has four."""
    found = read_rank_file(folder / file_name(0, 0))
    samples = MemorySamples(np.zeros(0, np.int64), np.zeros((0, 4), np.int64))
    body = type(found.body)(
        outcome=found.body.outcome,
        ended=found.body.ended,
        record=type(found.body.record)(
            **{name: getattr(found.body.record, name) for name in found.body.record.__slots__ if name != "tensors"},
            tensors=samples,
        ),
    )
    write_rank_file(folder, found.header, body)
    assert read_rank_file(folder / file_name(0, 0)).body.record.tensors.num_bytes.shape == (0, 4)
    assert vk.read_trace(folder).world_size == 2


@pytest.mark.parametrize(
    ("rows", "extents_ns", "guesses_ns", "drift", "name"),
    [
        ([], [], [], 0.0, "extents_ns"),
        ([], [[]], [0], 0.0, "extents_ns"),
        ([], [[(0, 1)], [(0, 1)]], [0], 0.0, "guesses_ns"),
        ([(5, 1, 0, 0)], [[(0, 1)]], [0], 0.0, "bounds"),
        ([(-1, 1, 0, 0)], [[(0, 1)]], [0], 0.0, "bounds"),
        ([], [[(0, 1)]], [0], float("nan"), "drift"),
        ([], [[(0, 1)]], [0], -1.0, "drift"),
        ([(1, 2, 3)], [[(0, 1)]], [0], 0.0, "rows"),
    ],
)
def test_clocks_of_hosts_that_there_are_not(rows: list, extents_ns: list, guesses_ns: list, drift: float, name: str):
    """Numbers of hosts, their stretches and guesses go together."""
    with pytest.raises(vk.InvalidInputError, match=f"^{name}="):
        align(Bounds.of(rows), extents_ns, guesses_ns, drift)


def spans(kind: str, start_ns: int, end_ns: int, ranks: range = range(3)) -> list[Span]:
    return [Span(rank, kind, start_ns, end_ns, operation=0 if kind == "all_reduce" else -1) for rank in ranks]


@pytest.mark.parametrize("clock", ["wall", "virtual", "ideal"])
@pytest.mark.parametrize(
    "given",
    [[], spans("compute", 0, 9, range(1)), spans("compute", 5, 5), spans("wait", 0, 9), spans("all_reduce", 0, 0)],
    ids=["empty", "one rank", "no length", "only waits", "collectives of no length"],
)
def test_nothing_is_found_in_nothing(given: list[Span], clock: str):
    """No division by the time or the ranks that there are not."""
    found = vk.diagnose(Trace.from_spans(given, clock=clock))
    assert not list(found)
    assert f"on the {clock} clock" in str(found)


@pytest.mark.parametrize("target", ["../x:f", ".x:f", "a..b:f"])
def test_a_target_that_is_no_module_name(target: str):
    """Neither a file nor a module, and no traceback."""
    with pytest.raises(vk.InvalidInputError, match="is no module's name; write for instance train:main"):
        load(target)
