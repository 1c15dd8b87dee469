"""`python -m vizkit demo`: digits, real ranks, and what theory says."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import vizkit as vk
from vizkit.cli.arguments import positive
from vizkit.units import bytes_text

STEPS_SHOWN = 3
"""Training steps on the demo's timeline: few enough to tell the buckets apart."""
LOSS_TOLERANCE = 1e-3


def demo(arguments: argparse.Namespace) -> int:
    """Trains the digits on real ranks, prints what happened beside what theory says, and writes the page."""
    check_demo(arguments)
    print(f"Training a digits CNN on {arguments.ranks} ranks, {arguments.steps} steps of {arguments.batch} samples ...")
    run = train_on(arguments.ranks, arguments)
    print(run, end="\n\n")
    for line in findings(run, arguments):
        print(line)

    from vizkit.figures.html import write_html

    virtual = run.replay()
    figures = [vk.timeline(last_steps(virtual, STEPS_SHOWN)), vk.traffic_map(virtual)]
    page = write_html(arguments.out, figures, title=f"Digits on {arguments.ranks} ranks")
    size = bytes_text(page.stat().st_size)
    print(f"\n{arguments.out} plays back the last {STEPS_SHOWN} steps; it needs no network ({size}).")
    return 0


def check_demo(arguments: argparse.Namespace) -> None:
    """Refuses what would fail only after the training, or on each rank at once."""
    from vizkit.runtime.digits import NUM_TRAINING_SAMPLES

    ranks, batch, folder = arguments.ranks, arguments.batch, arguments.out.absolute().parent
    if batch % ranks:
        below = max(ranks, batch - batch % ranks)
        raise vk.InvalidInputError.because(
            "batch", batch, f"must divide by the {ranks} ranks", f"use {below} or {below + ranks}"
        )
    if batch > NUM_TRAINING_SAMPLES:
        raise vk.InvalidInputError.because(
            "batch", batch, f"there are {NUM_TRAINING_SAMPLES} training samples", f"use {NUM_TRAINING_SAMPLES} or fewer"
        )
    if arguments.out.is_dir():
        raise vk.InvalidInputError.because(
            "out", str(arguments.out), "is a folder", "name a file in it, such as demo.html"
        )
    if not folder.is_dir():
        raise vk.InvalidInputError.because(
            "out", str(arguments.out), "its folder does not exist", f"make {folder} first"
        )


def train_on(num_ranks: int, arguments: argparse.Namespace) -> vk.Run:
    from vizkit.runtime.digits import digits, train

    settings = {"num_steps": arguments.steps, "global_batch": arguments.batch}
    return vk.launch(train, *digits(), world_size=num_ranks, device=arguments.device, **settings)


def findings(run: vk.Run, arguments: argparse.Namespace) -> list[str]:
    """Accuracy, bytes against the formula, loss against one process."""
    lessons = run.results
    tested = sum(lesson.num_tested for lesson in lessons)
    right = sum(lesson.num_right for lesson in lessons)
    losses = mean_by_step(lessons)
    lines = [f"test accuracy     {right / tested:.1%} of {tested} digits the network never saw"]

    measured = int(vk.metrics.traffic(run.replay().filter(kind="all_reduce")).wire_bytes.sum())
    theory = 2 * (arguments.ranks - 1) * lessons[0].gradient_bytes * arguments.steps
    agreement = (
        "equal" if measured == theory else f"differs by {measured / theory - 1:+.1%}" if theory else "no traffic"
    )
    lines.append(
        f"gradient traffic  {bytes_text(measured)} on the wire, all ranks; ring all-reduce, 2(n-1)/n of "
        f"{bytes_text(lessons[0].gradient_bytes)} a rank and step: {bytes_text(theory)} ({agreement})"
    )
    alone = train_on(1, arguments)
    expected = mean_by_step(alone.results)
    gap = max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True))
    verdict = "the same" if gap < LOSS_TOLERANCE else "NOT the same"
    lines.append(
        f"loss              {losses[0]:.3f} to {losses[-1]:.3f}; {verdict} as one process at every step "
        f"(largest gap {gap:.0e}, allowed {LOSS_TOLERANCE:.0e})"
    )
    return lines


def mean_by_step(lessons: Sequence) -> list[float]:
    """The global batch's loss at each step: shards are equal, so it is the mean of theirs."""
    return [sum(shards) / len(shards) for shards in zip(*(lesson.losses for lesson in lessons), strict=True)]


def last_steps(trace: vk.Trace, count: int) -> vk.Trace:
    """Each rank's last `count` training steps: from the end of one optimizer step to the end of another."""
    keep = np.zeros(len(trace), bool)
    for rank in range(trace.world_size):
        ends = np.sort(trace.filter(rank=rank, kind="optimizer").end_ns)
        start = ends[-count - 1] if len(ends) > count else trace.extent_ns[0]
        keep |= (trace.rank == rank) & (trace.start_ns >= start) & (trace.end_ns <= ends[-1])
    return trace.filter(keep)


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    command = commands.add_parser(
        "demo",
        help="train digits on real ranks; print a summary; write a page that plays it back",
        description="Trains a small CNN on scikit-learn's handwritten digits with DistributedDataParallel, on real "
        "ranks. Prints accuracy, bytes moved and loss beside what theory says, and writes one HTML file that plays the "
        "last steps back with no kernel and no network.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("--ranks", type=positive, default=4, help="how many ranks, each a process of its own")
    command.add_argument("--steps", type=positive, default=80, help="training steps")
    command.add_argument("--batch", type=positive, default=128, help="samples in a step, over all ranks")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the ranks compute")
    command.add_argument("--out", type=Path, default=Path("demo.html"), help="the page to write")
    command.set_defaults(run=demo)
