"""`python -m vizkit report`: one offline page from a trace."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vizkit as vk
from vizkit.formats.rank_folder import rank_files, read_run
from vizkit.metrics.memory import holdings
from vizkit.units import bytes_text


@dataclass(frozen=True)
class Story:
    """What a page tells: sections of words, and the traces to draw."""

    sections: tuple[tuple[str, str], ...]
    traces: tuple[vk.Trace, ...]
    """The first is the one to measure by."""


def report(arguments: argparse.Namespace) -> int:
    """Reads the traces, prints a summary, and writes the page."""
    check_out(arguments.out)
    story = told(arguments.path, arguments.partial)

    from vizkit.figures.html import write_html

    title = f"{arguments.path.resolve().name}: what each rank did"
    page = write_html(arguments.out, figures(story.traces), title=title, sections=story.sections)
    for heading, text in story.sections:
        print(f"{heading}\n{text}\n")
    print(f"{arguments.out} shows it; it needs no network ({bytes_text(page.stat().st_size)}).")
    return 0


def check_out(out: Path) -> None:
    if out.is_dir():
        raise vk.InvalidInputError.because("out", str(out), "is a folder", "name a file in it, such as report.html")
    if not out.absolute().parent.is_dir():
        raise vk.InvalidInputError.because(
            "out", str(out), "its folder does not exist", f"make {out.absolute().parent} first"
        )


def told(path: Path, partial: bool) -> Story:
    """Words and traces of what is at `path`."""
    if not path.exists():
        raise vk.UnreadableTraceError(
            f"{path}: there is nothing; give the folder named after --trace, a folder with one trace a rank, or a trace"
        )
    if not rank_files(path):
        trace = vk.read_trace(path)
        return Story((("Findings", str(vk.diagnose(trace))), ("In words", vk.describe(trace))), (trace,))
    run = read_run(path, partial=partial)
    last = run.without_earlier_attempts
    traces: tuple[vk.Trace, ...] = (run.trace,)
    try:
        replayed = run.replay()
        found, as_if = vk.diagnose(last), vk.describe(replayed)
        traces = (replayed, *traces)
    except vk.InvalidInputError as error:  # of a rank that was killed, the end of what it did is not known
        found, as_if = vk.diagnose(last.trace), f"Not to be told: {error}"
    sections = (
        ("The run", run.summary()),
        ("Findings", str(found)),
        ("With a device for each rank", as_if),
        ("As it happened", vk.describe(run.trace)),
    )
    return Story(sections, traces)


def figures(traces: tuple[vk.Trace, ...]) -> list[Any]:
    """Timelines on each clock, and of the first clock what moved between ranks, and memory where it is known."""
    first = traces[0]
    drawn = [vk.timeline(trace) for trace in traces]
    if vk.metrics.traffic(first).operations:
        drawn.append(vk.traffic_map(first))
    if holdings(first):  # a simulated trace counts activations too, in microbatches
        drawn.append(vk.memory_figure(first))
    return drawn


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    command = commands.add_parser(
        "report",
        help="one page, which needs no network, from a trace folder or a profiler's trace",
        description="Reads the folder that `run --trace` left, with the clocks of all hosts aligned; or traces of "
        "vk.write_chrome_trace or PyTorch's profiler, a file or a folder with one a rank. Prints a summary and writes "
        "one HTML page, which needs no network: summary, findings, animated timelines (wall clock, and virtual where "
        "it can be replayed), bytes moved between ranks, memory where it was tracked. Exit status 2 where a rank is "
        "missing, doubled, cut off or foreign: the message names the file.",
    )
    command.add_argument("path", type=Path, help="a folder or a trace file")
    command.add_argument("-o", "--out", type=Path, default=Path("report.html"), metavar="PAGE",
                         help="the page to write (default: report.html)")  # fmt: skip
    command.add_argument("--partial", action="store_true",
                         help="read what is there; what is left out is named on the page")  # fmt: skip
    command.set_defaults(run=report)
