"""What the system tells about a rank's process."""

from __future__ import annotations

import contextlib
import resource
import signal


def exit_text(code: int | None) -> str:
    """How a process without a result ended.

    >>> exit_text(0), exit_text(-9)
    ('exited with code 0 and has no result', 'was killed by SIGKILL')
    """
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code} and has no result"


def processor_ticks(pid: int | None) -> int:
    """Processor time that a process has used, in the system's ticks; −2 where that cannot be read."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError):
        return -2


def resident_bytes(pid: int | None) -> int | None:
    """Memory of a process that is in RAM, pages that it shares with others included; None where that cannot be read."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return None
