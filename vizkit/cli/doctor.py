"""`python -m vizkit doctor`: is this machine fit."""

from __future__ import annotations

import argparse
from typing import Any

import vizkit as vk


def doctor(arguments: argparse.Namespace) -> int:
    """Says whether this machine is fit; the exit status is 1 where it is not."""
    report = vk.fitness()
    print(report)
    return 0 if report else 1


def add_to(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "doctor",
        help="is this machine fit for the lessons",
        description="Looks at Python, torch, cores, memory, disk and GPUs, and launches two ranks. Exit status 1 where "
        "something is missing; each such line says what to do.",
    )
    command.set_defaults(run=doctor)
