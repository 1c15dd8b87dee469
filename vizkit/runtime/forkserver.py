"""A process handle for a forkserver of our own, apart from the one that user code may configure."""

from __future__ import annotations

import io
import os
from multiprocessing import forkserver, popen_forkserver, reduction, util
from multiprocessing.context import set_spawning_popen
from typing import Any

from vizkit.runtime.nursery import preparation


class ForkserverPopen(popen_forkserver.Popen):
    """`multiprocessing`'s handle, with the server as an argument and without re-running the parent's `__main__`."""

    def __init__(self, process: Any, server: forkserver.ForkServer) -> None:
        self._server = server
        super().__init__(process)

    def _launch(self, process: Any) -> None:
        buffer = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation(process._name), buffer)
            reduction.dump(process, buffer)
        finally:
            set_spawning_popen(None)
        self.sentinel, writer = self._server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        # the child watches this end: it closes when the parent dies
        parent_alive = os.dup(writer)
        self.finalizer = util.Finalize(self, util.close_fds, (parent_alive, self.sentinel))  # type: ignore[attr-defined]
        with open(writer, "wb", closefd=True) as file:
            file.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)
