"""The command line: `python -m vizkit doctor | demo | run | report`, one module a command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import vizkit as vk
from vizkit.cli import demo, doctor, report, run

STATUS_OF_SIGPIPE = 128 + 13
_COMMANDS = (doctor, demo, run, report)


def parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    top = argparse.ArgumentParser(
        prog="python -m vizkit",
        description="Run parallel deep learning for real, and see what each device did.",
        epilog="`python -m vizkit COMMAND --help` says more. Exit status 2: the input cannot work; the message says "
        "why and what to do. Lessons are in notebooks/; `make lab` opens the first.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="doctor | demo | run | report")
    for command in _COMMANDS:
        command.add_to(commands)
    return top


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command; errors that vizkit raises on purpose are printed without a traceback.

    Exit status 2 for input that cannot work, 1 for ranks that failed.
    """
    given = list(sys.argv[1:] if words is None else words)
    cut = given.index("--") if "--" in given else len(given)
    top = parser()
    arguments = top.parse_args(given[:cut])
    arguments.words = given[cut + 1 :]
    if arguments.words and arguments.command != "run":
        top.error(f"unrecognized arguments after --: {' '.join(arguments.words)}")
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads, such as `head`, wants no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return STATUS_OF_SIGPIPE
    except (vk.InvalidInputError, vk.UnreadableTraceError, vk.TransportError) as error:
        print(f"vizkit: {error}", file=sys.stderr)
        return 2
    except vk.RankFailedError as error:
        print(f"vizkit: {error}", file=sys.stderr)
        return 1
