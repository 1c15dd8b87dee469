"""Keeps a rank's record in a file, whatever becomes of the rank."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from vizkit.errors import InvalidInputError
from vizkit.formats.rank_file import Body, Header, Outcome, Reading, file_name, write_rank_file
from vizkit.record import RankRecord
from vizkit.runtime.recorder import Recorder
from vizkit.runtime.snapshot import snapshot

FIRST_SAVE_S = 10.0
SAVE_SHARE = 0.05
"""Saving while the rank runs takes at most this share of its time: the longer one took, the later the next."""
UNWINDING_S = 2.0
"""How long after SIGTERM the program may take to end by itself, before what is known is saved and the rank left."""
MAX_RESULT_BYTES = 1_000_000
_MAX_TEXT = 2_000
_MAX_ELEMENTS = 10_000
STATUS_OF_SIGTERM = 128 + signal.SIGTERM


class Stopped(SystemExit):
    """SIGTERM came, as torchrun sends it to the ranks that are left when one has failed."""


def read_clocks() -> Reading:
    """UTC and CLOCK_MONOTONIC at the same moment, to within microseconds."""
    before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    return Reading(unix_ns=unix, monotonic_ns=(before + after) // 2)


class Keeper:
    """Writes the file of one rank: its name at once, its record now and then, when it ends, and on SIGTERM.

    On SIGTERM the main thread gets `Stopped`; if it is blocked inside the communication library, where no Python
    exception reaches it, a thread of this class saves the record and ends the process.
    """

    def __init__(self, recorder: Recorder, folder: Path, header: Header) -> None:
        self._recorder = recorder
        self._folder = folder.absolute()  # the program may change its directory
        self._header = header
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Saves while what is inside runs; only on the main thread."""
        path = self._folder / file_name(self._header.rank, self._header.attempt)
        if path.exists():
            raise InvalidInputError.because("trace", str(path), "is there already", "give a new folder")
        write_rank_file(self._folder, self._header)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.signal(signal.SIGTERM, _stop)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # C code writes to it, also while Python waits
        thread = threading.Thread(target=self._watch, args=(reader,), name="vizkit-keeper", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, before)
            self._is_over.set()
            os.close(writer)
            thread.join()
            os.close(reader)

    def finish(self, outcome: Outcome, record: RankRecord, detail: str = "", result: Any = None) -> None:
        """Writes the whole file; nothing is written after it."""
        with self._lock:
            if not self._is_over.is_set():
                self._is_over.set()
                plain, is_text = plain_result(result)
                self._write(outcome, record, detail, plain, is_text)

    def _write(
        self, outcome: Outcome, record: RankRecord, detail: str = "", result: Any = None, is_text: bool = False
    ) -> None:
        body = Body(
            outcome=outcome,
            detail=detail,
            ended=read_clocks(),
            record=record,
            result=result,
            is_result_text=is_text,
        )
        write_rank_file(self._folder, self._header, body)

    def _watch(self, reader: int) -> None:
        # reading the device's time waits for all of its work: no saving meanwhile on a GPU
        pause: float | None = FIRST_SAVE_S if self._recorder.futures_tell_time else None
        while not self._is_over.is_set():
            ready, _, _ = select.select([reader], [], [], pause)
            if not ready:
                began = time.monotonic()
                self._save(Outcome.RUNNING)
                pause = max(FIRST_SAVE_S, (time.monotonic() - began) / SAVE_SHARE)
            elif not (received := os.read(reader, 64)):
                return
            elif signal.SIGTERM in received and not self._is_over.wait(UNWINDING_S):
                self._save(Outcome.STOPPED, "SIGTERM")
                os._exit(STATUS_OF_SIGTERM)

    def _save(self, outcome: Outcome, detail: str = "") -> None:
        with self._lock, contextlib.suppress(OSError):  # a full disk is no reason to stop the training
            if not self._is_over.is_set():
                self._write(outcome, snapshot(self._recorder), detail)


def _stop(signum: int, frame: object) -> None:
    raise Stopped(STATUS_OF_SIGTERM)


def words_of(error: BaseException) -> str:
    """What is kept of an exception, also where its text cannot be had or has no end.

    >>> words_of(ValueError("no")), words_of(KeyboardInterrupt())
    ('ValueError: no', 'KeyboardInterrupt')
    """
    try:
        text = str(error)
    except Exception as failure:
        text = f"<str() raised {type(failure).__name__}>"
    return f"{type(error).__name__}{': ' * bool(text)}{text}"[:_MAX_TEXT]


def plain_result(result: Any) -> tuple[Any, bool]:
    """The result as plain data and False, or where it is none, or too long, its text and True.

    >>> plain_result({"loss": [0.5], "weight": torch.ones(2)})
    ({'loss': [0.5], 'weight': [1.0, 1.0]}, False)
    >>> plain_result(print)
    ('<built-in function print>', True)
    """
    with contextlib.suppress(Exception):  # tensors of some layouts and objects of users raise whatever they like
        plain = msgspec.to_builtins(result, enc_hook=_plain)
        if len(msgspec.json.encode(plain)) <= MAX_RESULT_BYTES:
            return plain, False
    with contextlib.suppress(Exception):
        return repr(result)[:_MAX_TEXT], True
    return f"<{type(result).__name__}>", True


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() <= _MAX_ELEMENTS:
        return value.detach().cpu().tolist()
    if isinstance(value, np.generic | np.ndarray) and value.size <= _MAX_ELEMENTS:
        return value.tolist()
    raise NotImplementedError(type(value).__name__)
