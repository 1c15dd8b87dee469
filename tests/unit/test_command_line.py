"""`python -m vizkit` explains itself, refuses what cannot work, and reports by its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vizkit as vk
from vizkit.cli import main
from vizkit.cli.demo import last_steps, mean_by_step
from vizkit.runtime.digits import Lesson, digits, network
from vizkit.runtime.fitness import Fact, Fitness
from vizkit.runtime.torchrun import place_here


@pytest.mark.parametrize(
    ("words", "mentions"),
    [
        (["--help"], ["demo", "doctor", "run", "report", "make lab"]),
        (
            ["demo", "--help"],
            ["--ranks", "--steps", "--batch", "--device", "--out", "(default: demo.html)", "no network"],
        ),
        (["doctor", "--help"], ["launches two ranks", "Exit status 1"]),
        (
            ["run", "--help"],
            [
                "module:function",
                "--trace FOLDER",
                "--ranks N",
                "--timeout S",
                "--slurm FILE",
                "--pytorch-job FILE",
                "torchrun --nnodes 2",
                "-- 10 lr=0.1",
                "name=value is a keyword",
                "Exit status: 0 when all is well",
            ],
        ),
        (
            ["report", "--help"],
            ["--partial", "--out PAGE", "(default: report.html)", "profiler", "no network", "status 2"],
        ),
    ],
)
def test_help_suffices(words: list[str], mentions: list[str], capsys: pytest.CaptureFixture[str]):
    """Every option with its default, every exit status that is not plain."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert [mention for mention in mentions if mention not in said] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: doctor | demo | run | report"),
        (["dance"], "invalid choice: 'dance'"),
        (["demo", "--ranks", "0"], "argument --ranks: 0: must be at least 1; use 1 or more"),
        (["demo", "--steps", "-3"], "argument --steps: -3: must be at least 1; use 1 or more"),
        (["demo", "--ranks", "four"], "argument --ranks: 'four' is not a whole number; use 1 or more"),
        (["run"], "the following arguments are required: module:function"),
        (["run", "m:f", "--timeout", "0"], "argument --timeout: 0: must be positive and finite; use one such as 600"),
        (["run", "m:f", "--timeout", "x"], "argument --timeout: 'x' is not a number of seconds; use one such as 600"),
        (["run", "m:f", "lr=0.1"], "unrecognized arguments: lr=0.1"),
        (["report"], "the following arguments are required: path"),
        (["doctor", "--", "3"], "unrecognized arguments after --: 3"),
    ],
)
def test_what_cannot_work_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    """Before anything starts, with exit status 2."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--ranks", "500", "--batch", "1000"], "vizkit: world_size=500: one machine runs at most 64 ranks"),
        (["demo", "--batch", "130"], "vizkit: batch=130: must divide by the 4 ranks; use 128 or 132"),
        (["demo", "--batch", "3"], "vizkit: batch=3: must divide by the 4 ranks; use 4 or 8"),
        (["demo", "--batch", "4000"], "vizkit: batch=4000: there are 1536 training samples; use 1536 or fewer"),
        (["demo", "--out", "/"], "vizkit: out='/': is a folder; name a file in it, such as demo.html"),
        (["demo", "--out", "/nowhere/demo.html"], "vizkit: out='/nowhere/demo.html': its folder does not exist"),
        (
            ["run", "train"],
            "vizkit: target='train': is no module:function; write for instance train:main, or train.py:main",
        ),
        (["run", "nowhere.py:f"], "vizkit: target='nowhere.py:f': there is no file nowhere.py; check the path"),
        (["run", "nowhere:f"], "vizkit: target='nowhere:f': there is no module nowhere in "),
        (["run", "math:sqr"], "vizkit: target='sqr': is not in math; did you mean sqrt? use one of "),
        (["run", "math:pi"], "vizkit: target='math:pi': cannot be called; name a function"),
        (
            ["run", "math:sqrt", "--", "a=1", "2"],
            "vizkit: arguments='2': stands after one with a name; put those without",
        ),
        (["run", "math:sqrt", "--", "a=1", "a=2"], "vizkit: arguments='a=2': a was given before; give it once"),
        (["run", "math:sqrt", "--trace", "/dev/null"], "vizkit: trace='/dev/null': is a file; name a folder"),
        (["run", "m:f", "--pytorch-job", "job.yaml"], "vizkit: image='': is no container image; name one that holds"),
        (["report", "/nowhere"], "vizkit: /nowhere: there is nothing; give the folder named after --trace"),
        (["report", "/nowhere", "-o", "/"], "vizkit: out='/': is a folder; name a file in it, such as report.html"),
        (["report", "/dev/null"], "vizkit: /dev/null: not JSON or cut off"),
    ],
)
def test_what_the_kit_refuses_has_no_traceback(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    """Value, rule, remedy, and exit status 2."""
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(message)


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Of what torchrun sets, a part: nobody knows what is meant."""
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert main(["run", "math:sqrt"]) == 2
    assert capsys.readouterr().err == (
        "vizkit: environment='RANK': WORLD_SIZE, MASTER_ADDR, MASTER_PORT is missing, which torchrun sets too; start "
        "with torchrun, or unset RANK to run on this machine alone\n"
    )


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("RANK", "x", "is no whole number from 0 to 1"),
        ("RANK", "2", "is no whole number from 0 to 1"),
        ("WORLD_SIZE", "0", "is no whole number from 1 on"),
        ("LOCAL_WORLD_SIZE", "0", "is no whole number from 1 on"),
        ("LOCAL_RANK", "2", "is no whole number from 0 to 1"),
        ("MASTER_PORT", "70000", "is no whole number from 0 to 65535"),
    ],
)
def test_an_environment_of_no_rank_is_refused(name: str, value: str, rule: str):
    """What should be a number and is none, or one that no rank can have."""
    here = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(vk.InvalidInputError) as refused:
        place_here({**here, name: value})
    assert str(refused.value) == f"{name}={value!r}: {rule}; start with torchrun, which sets it, or mend what sets it"


def test_a_reader_that_wants_no_more_gets_no_traceback(repository: Path, tmp_path: Path):
    """`report … | head -1`: the page is written, and the status is the shell's for SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", "import sys; from vizkit.cli import main; sys.exit(main(sys.argv[1:]))"]
    trace = tmp_path / "trace.json"
    vk.write_chrome_trace(vk.Trace.from_spans([vk.Span(0, "F", 0, 5_000_000)], clock="wall"), trace)
    page = tmp_path / "page.html"
    done = subprocess.run(
        [*words, "report", str(trace), "-o", str(page)], stdout=writer, stderr=subprocess.PIPE, cwd=repository
    )
    os.close(writer)
    assert (done.returncode, done.stderr, page.exists()) == (141, b"", True)


def test_a_report_of_a_simulated_trace(tmp_path: Path):
    """Its counter of activations has no bytes, so the page has no figure of memory."""
    ideal = vk.simulate(vk.schedule("GPipe", num_ranks=2, num_microbatches=2), vk.Durations(F=1, B=2))
    path = vk.write_chrome_trace(ideal, tmp_path / "run.json")
    assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 0


MODULE = """
import torch
import torch.distributed as dist
import vizkit as vk


def add_up(start, factor=1.0, *, fail=False):
    x = torch.tensor([float(start)])
    with vk.span("work", kind="F"):
        dist.all_reduce(x)
    if fail and dist.get_rank() == 1:
        raise ValueError("planted failure")
    print("sum", x.item() * factor)
    return x.item() * factor
"""


def test_run_alone_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Without torchrun the ranks start here; the folder they leave opens as one page; a rank that fails is status 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    Path("adding_up.py").write_text(MODULE)
    words = ["run", "adding_up.py:add_up", "--ranks", "2", "--device", "cpu", "--trace", "traces"]
    assert main([*words, "--", "3", "factor=0.5"]) == 0
    said = capsys.readouterr().out
    assert "[rank 0] sum 3.0" in said
    assert "traces holds a file for each rank; python -m vizkit report traces shows them" in said
    assert main(["report", "traces"]) == 0
    said = capsys.readouterr().out
    assert "attempt 0: 2 ranks" in said
    assert "report.html shows it; it needs no network" in said
    page = Path("report.html").read_text(encoding="utf-8")
    assert page.count('class="figure"') == 3
    assert "<h2>The run</h2>" in page
    assert main([*words, "--", "3"]) == 2
    assert "trace='traces': holds files of another run; give a new folder" in capsys.readouterr().err
    assert main(["run", "adding_up:add_up", "--ranks", "2", "--device", "cpu", "--", "3", "fail=true"]) == 1
    assert "planted failure" in capsys.readouterr().err


def test_a_report_of_a_profilers_trace(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Any trace that `vk.read_trace` reads."""
    trace = vk.Trace.from_spans([vk.Span(0, "F", 0, 5_000_000), vk.Span(1, "F", 0, 3_000_000)], clock="wall")
    path = vk.write_chrome_trace(trace, tmp_path / "run.json")
    assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 0
    assert "2 ranks, 2 spans, 5 ms on the wall clock" in capsys.readouterr().out
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count('class="figure"') == 1


@pytest.mark.parametrize(("remedy", "status"), [("", 0), ("Free some.", 1)])
def test_the_doctors_exit_status(remedy: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys):
    """A script can ask whether the machine is fit."""
    monkeypatch.setattr(vk, "fitness", lambda: Fitness((Fact("disk", "1 MB", remedy),)), raising=False)
    assert main(["doctor"]) == status
    assert "disk" in capsys.readouterr().out


def test_the_demo_on_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Few steps: the bytes are the ring's, the loss is one process's, and the page is there."""
    page = tmp_path / "page.html"
    assert main(["demo", "--ranks", "2", "--steps", "5", "--device", "cpu", "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert "2 ranks on cpu" in said
    assert "(equal)" in said
    assert "the same as one process at every step" in said
    assert "last 3 steps" in said
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_the_demo_on_one_rank_has_no_traffic(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Nothing to reduce: 0 B, which is what the formula says too."""
    assert main(["demo", "--ranks", "1", "--steps", "2", "--device", "cpu", "--out", str(tmp_path / "p.html")]) == 0
    assert "0 B on the wire" in capsys.readouterr().out


def test_the_digits_are_real_and_the_network_is_the_same_for_a_seed():
    """1797 images from 0 to 1, ten classes; equal weights for equal seeds, others for another."""
    images, labels = digits()
    assert tuple(images.shape) == (1797, 1, 8, 8)
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert sorted(set(labels.tolist())) == list(range(10))
    first, again, other = (network(seed)[0].weight for seed in (0, 0, 1))
    assert bool((first == again).all())
    assert not bool((first == other).all())


def test_the_mean_loss_is_over_ranks():
    """Shards are equal, so the global batch's loss is the plain mean."""
    lessons = [Lesson((1.0, 4.0), 0, 0, 0), Lesson((3.0, 0.0), 0, 0, 0)]
    assert mean_by_step(lessons) == [2.0, 2.0]


def test_the_last_steps_are_cut_rank_by_rank():
    """From the end of one optimizer step to the end of another, for each rank at its own times."""
    spans = [
        vk.Span(rank, kind, start + delay, start + delay + 10)
        for rank, delay in ((0, 0), (1, 3))
        for step in range(4)
        for kind, start in (("F", 100 * step), ("optimizer", 100 * step + 20))
    ]
    trace = vk.Trace.from_spans([*spans, vk.Span(1, "compute", 400, 500)], clock="virtual")
    shown = last_steps(trace, 2)
    assert [(span.rank, span.start_ns) for span in shown] == [
        *((0, start) for start in (200, 220, 300, 320)),
        *((1, start) for start in (203, 223, 303, 323)),
    ]
    assert len(last_steps(trace, 9)) == 16
