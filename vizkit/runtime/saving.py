"""The files of ranks, from a run that `launch` gave back."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from vizkit.errors import InvalidInputError
from vizkit.formats.rank_file import Body, Header, Outcome, write_rank_file
from vizkit.formats.rank_folder import rank_files
from vizkit.runtime.attempts import clock_name
from vizkit.runtime.keeper import plain_result, read_clocks
from vizkit.runtime.run import Run


def checked_folder(folder: str | Path) -> Path:
    """The folder, which is made where it does not exist; raises `InvalidInputError` where it holds files of ranks."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError.because("trace", str(folder), "is a file", "name a folder")
    if rank_files(folder):
        raise InvalidInputError.because(
            "trace", str(folder), "holds files of another run", "give a new folder, or empty this one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_run(run: Run, folder: str | Path, target: str = "") -> Path:
    """Write one file for each rank into `folder`, which `vk.read_trace` and `python -m vizkit report` read.

    Raises `InvalidInputError` where the folder holds files of ranks already.
    """
    folder, name, now = checked_folder(folder), secrets.token_hex(4), read_clocks()
    for record, result in zip(run.record.ranks, run.results, strict=True):
        plain, is_text = plain_result(result)
        header = Header(
            run=name,
            rank=record.rank,
            world_size=run.world_size,
            attempt=0,
            host=socket.gethostname(),
            clock=clock_name(),
            began=now,
            target=target,
            cores=run.cores,
            num_threads=run.num_threads,
            notes=dict(run.record.notes),
        )
        body = Body(outcome=Outcome.RETURNED, ended=now, record=record, result=plain, is_result_text=is_text)
        write_rank_file(folder, header, body)
    return folder
