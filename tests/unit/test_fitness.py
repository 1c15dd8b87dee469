"""The doctor's facts: each says what it found and, where that is not enough, what to do."""

from __future__ import annotations

import pytest

import vizkit as vk
from vizkit.runtime import fitness
from vizkit.runtime.fitness import Fact, Fitness


@pytest.mark.parametrize(
    ("fact", "value", "remedy"),
    [
        (fitness.python_fact((3, 11, 7)), "3.11.7 (needs 3.11 or later)", ""),
        (
            fitness.python_fact((3, 10, 2)),
            "3.10.2 (needs 3.11 or later)",
            "Install Python 3.11 or later, then run make lab again.",
        ),
        (fitness.torch_fact("2.13.0+cpu"), "2.13.0+cpu", ""),
        (
            fitness.torch_fact("2.9.1"),
            "2.9.1",
            "The lessons were checked with 2.13.0: pip install torch==2.13.0",
        ),
        (fitness.torch_fact(None), "not installed", "Install it: pip install torch==2.13.0, or run make lab again."),
        (fitness.cores_fact(8), "8", ""),
        (fitness.cores_fact(2), "2; four ranks share them, so read times off the virtual clock", ""),
        (fitness.memory_fact(2_000_000_000), "2 GB free (needs 1 GB)", ""),
        (
            fitness.memory_fact(300_000_000),
            "300 MB free (needs 1 GB)",
            "Close other notebooks' kernels, or launch two ranks, not four.",
        ),
        (fitness.memory_fact(None), "unknown (needs 1 GB)", ""),
        (fitness.disk_fact(5_000_000_000, "/tmp"), "5 GB free in /tmp (needs 100 MB)", ""),
        (
            fitness.disk_fact(1_000_000, "/tmp"),
            "1 MB free in /tmp (needs 100 MB)",
            "Free some space in /tmp, or point TMPDIR elsewhere.",
        ),
        (fitness.start_fact(True, True), "by forkserver, data travel through memory", ""),
        (
            fitness.start_fact(False, False),
            "by spawn, data travel through temporary files; works, and takes seconds longer",
            "",
        ),
        (fitness.gpus_fact([]), "none; ranks run on the CPU, and every lesson works there", ""),
        (fitness.gpus_fact(["H200", "H200"]), "2: H200, H200", ""),
    ],
)
def test_a_fact_and_its_remedy(fact: Fact, value: str, remedy: str):
    """Value and remedy for what is fit, what is not, and what cannot be known."""
    assert (fact.value, fact.remedy) == (value, remedy)
    assert fact.is_fit is (remedy == "")


def test_one_unfit_fact_makes_the_machine_unfit():
    """The text names it; the HTML escapes it and marks it in words."""
    report = Fitness((Fact("cores", "2"), Fact("disk", "<none>", "Free some.")))
    assert not report
    assert str(report).splitlines() == [
        "ok  cores  2",
        "NO  disk   <none>",
        "           Free some.",
        "This machine is not fit yet: disk.",
    ]
    assert "<strong>NO</strong>" in report._repr_html_()
    assert "&lt;none&gt;<br>Free some." in report._repr_html_()


def test_a_launch_that_fails_is_a_fact_too(monkeypatch: pytest.MonkeyPatch):
    """The doctor reports, it does not crash."""

    def fails(*_, **__):
        raise OSError("no loopback interface\nmore")

    monkeypatch.setattr("vizkit.runtime.launcher.launch", fails)
    assert fitness.ranks_fact() == Fact("two ranks", "failed", "no loopback interface (README.md, Troubleshooting)")


def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Ranks that run are not enough; the number has to be right."""

    class Wrong:
        results = (1.0, 2.0)

    monkeypatch.setattr("vizkit.runtime.launcher.launch", lambda *_, **__: Wrong)
    assert fitness.ranks_fact().remedy.startswith("The all-reduce gave a wrong sum")


def test_this_machine_is_fit():
    """Where the tests run, the lessons run."""
    report = vk.fitness()
    assert report, str(report)
    assert str(report).endswith("This machine is fit for every lesson.")
    assert [fact.name for fact in report.facts][-1] == "two ranks"
