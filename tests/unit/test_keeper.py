"""A rank's record is kept in its file while the rank runs, and ranks of a new attempt find each other."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import vizkit as vk
from vizkit.formats.rank_file import Header, Outcome, file_name, read_rank_file, write_rank_file
from vizkit.lanes import Label
from vizkit.record import SpanClosed, SpanOpened
from vizkit.runtime import keeper as keeping
from vizkit.runtime.attempts import agent_name, clock_name, meet
from vizkit.runtime.keeper import Keeper, Stopped, plain_result, read_clocks, words_of
from vizkit.runtime.process_group import GroupInfo
from vizkit.runtime.recorder import Recorder

PATIENCE_S = 30


def header() -> Header:
    return Header(run="r", rank=0, world_size=1, attempt=0, host="here", clock="c", began=read_clocks())


@pytest.fixture
def recorder() -> Recorder:
    made = Recorder(rank=0)
    made.start()
    return made


def test_a_rank_leaves_its_name_first_and_then_what_it_did(tmp_path: Path, recorder: Recorder, monkeypatch):
    """A file at once, saves while it runs, and in the end the whole record; open spans end where the save was."""
    monkeypatch.setattr(keeping, "FIRST_SAVE_S", 0.05)
    path = tmp_path / file_name(0, 0)
    kept = Keeper(recorder, tmp_path, header())
    with kept.watching():
        assert read_rank_file(path).body is None
        recorder.open(Label(vk.SpanKind.FORWARD, "forward"))
        deadline = time.monotonic() + PATIENCE_S
        while (body := read_rank_file(path).body) is None or not body.record.events:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert body.outcome is Outcome.RUNNING
        assert [type(event) for event in body.record.events] == [SpanOpened, SpanClosed]
        recorder.stop()
        kept.finish(Outcome.RETURNED, recorder.harvest(), result={"loss": 0.5})
    body = read_rank_file(path).body
    assert (body.outcome, body.result, body.is_result_text) == (Outcome.RETURNED, {"loss": 0.5}, False)
    assert [path.name for path in tmp_path.iterdir()] == [file_name(0, 0)]


def test_sigterm_reaches_python_code_as_an_exception(tmp_path: Path, recorder: Recorder):
    """So that `finally` blocks run; the handler that was there before comes back."""
    before = signal.getsignal(signal.SIGTERM)

    def be_ended() -> None:
        with Keeper(recorder, tmp_path, header()).watching():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE_S)

    with pytest.raises(Stopped) as stop:
        be_ended()
    assert stop.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path, recorder: Recorder):
    """Whoever wrote it."""
    (tmp_path / file_name(0, 0)).write_bytes(b"precious")
    with pytest.raises(vk.InvalidInputError, match="is there already; give a new folder"):
        Keeper(recorder, tmp_path, header()).watching().__enter__()
    assert (tmp_path / file_name(0, 0)).read_bytes() == b"precious"


def test_ranks_of_a_new_attempt_find_each_other_in_a_store_full_of_old_keys():
    """Torchrun's store outlives a restart: what an earlier attempt left there leads nobody astray."""
    store = dist.HashStore()
    names = []
    for world_size in (3, 3, 2):
        with ThreadPoolExecutor(world_size) as pool:
            found = list(pool.map(lambda rank, size=world_size: meet(store, rank, size, PATIENCE_S), range(world_size)))
        assert len(set(found)) == 1
        names.append(found[0])
    assert len(set(names)) == 3


def test_a_rank_that_never_comes_is_named():
    """Instead of a hang."""
    with pytest.raises(TimeoutError, match=r"rank 0 has waited 0.1 s for ranks \[1, 2\], which never came"):
        meet(dist.HashStore(), 0, 3, timeout_s=0.1)


def test_names_of_clock_and_agent_hold_within_a_process():
    """Threads of one machine share its clock; the agent is the parent process."""
    found = []
    thread = threading.Thread(target=lambda: found.append((clock_name(), agent_name())))
    thread.start()
    thread.join()
    assert found == [(clock_name(), agent_name())]
    assert clock_name() != agent_name()


def test_what_a_program_may_return_raise_or_name_is_kept(tmp_path: Path, recorder: Recorder, monkeypatch):
    """NaN comes back as NaN, numpy's numbers as numbers, half a character escaped; also after chdir."""
    monkeypatch.chdir(tmp_path)
    kept = Keeper(recorder, Path("traces"), header())
    Path("traces").mkdir()
    with kept.watching():
        monkeypatch.chdir("/")
        group = GroupInfo("0", (0,))
        recorder.note_call((0, vk.SpanKind.SEND, group, 4, 0, np.int64(7), ()), None, time.monotonic_ns(), None, True)
        recorder.stop()
        detail = words_of(ValueError("half \udcff"))
        kept.finish(Outcome.RETURNED, recorder.harvest(), detail, {"loss": float("nan"), "best": [float("-inf")]})
    body = read_rank_file(tmp_path / "traces" / file_name(0, 0)).body
    assert repr(body.result) == "{'loss': nan, 'best': [-inf]}"
    assert body.detail == "ValueError: half \\udcff"
    assert [call.tag for call in body.record.calls] == [7]


def test_a_tensor_without_a_list_is_kept_as_text():
    """Torch raises RuntimeError for the elements of a sparse tensor; that is no reason to lose the record."""
    text, is_text = plain_result({"mask": torch.eye(2).to_sparse()})
    assert is_text
    assert text.startswith("{'mask': tensor(indices=")


def test_an_exception_without_a_text_is_kept():
    """Its class stays, and that it raised."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise KeyError("nothing")

    assert words_of(MuteError()) == "MuteError: <str() raised KeyError>"


def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch):
    """A full disk: neither half a file nor a hidden one stays."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_rank_file(tmp_path, header())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [None, "first", 1.5, 2**31])
def test_a_stage_or_microbatch_is_a_whole_number(value: object):
    """What no file could hold is refused where it is written, not where it is read."""
    with pytest.raises(vk.InvalidInputError) as refused:
        vk.span("forward", kind="F", microbatch=value)
    assert str(refused.value) == (
        f"microbatch={value!r}: is no whole number of 32 bits; count from 0, or leave microbatch out where it does "
        "not apply"
    )


def test_labels_of_numpy_and_names_of_half_characters_are_made_plain():
    """`for microbatch in np.arange(4)` is usual; half a character comes from names of files."""
    label = vk.span("a\udcff", microbatch=np.int64(3), stage=torch.tensor(1))._label
    assert (label.name, type(label.microbatch), label.microbatch, label.stage) == ("a\\udcff", int, 3, 1)
