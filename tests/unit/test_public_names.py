"""The names that users call exist, say what they are, and cost nothing until they are used."""

from __future__ import annotations

import inspect
import re

import pytest

import vizkit as vk

CONTRACT = (
    "schedule",
    "schedule_names",
    "Schedule",
    "simulate",
    "pipeline",
    "split_layers",
    "fit_durations",
    "pipeline_figure",
    "memory",
    "Transformer",
    "parity",
    "launch",
    "Run",
    "span",
    "device",
    "Link",
    "Durations",
    "Trace",
    "as_grid",
    "timeline",
    "compare",
    "traffic_map",
    "collective_steps",
    "to_html",
    "describe",
    "read_trace",
    "write_chrome_trace",
    "RankFailedError",
    "RanksStuckError",
    "fitness",
    "check",
    "plan",
    "predict",
    "hardware",
    "plan_figure",
    "diagnose",
    "fingerprint",
    "log",
    "export",
    "read_run",
    "save_run",
    "cluster_files",
)


@pytest.mark.parametrize("name", vk.__all__)
def test_the_name_resolves(name: str):
    """Nothing is announced that is not there."""
    assert getattr(vk, name) is not None


@pytest.mark.parametrize("name", CONTRACT)
def test_the_contract_is_announced(name: str):
    """What notebooks and the README call is public."""
    assert name in vk.__all__
    assert name in dir(vk)


@pytest.mark.parametrize("name", [name for name in vk.__all__ if not name.startswith("_")])
def test_the_name_has_a_docstring_of_one_sentence_first(name: str):
    """The first paragraph is one sentence, or ends where an example or the details begin."""
    text = inspect.getdoc(getattr(vk, name))
    if isinstance(getattr(vk, name), vk.Link):  # FREE_LINK is a value, and has the docstring of its type
        return
    assert text, f"{name} has no docstring"
    assert re.search(r"[.;:)]\s*$", text.split("\n\n")[0]), text.split("\n\n")[0]


@pytest.mark.parametrize("name", [n for n in vk.__all__ if inspect.isfunction(getattr(vk, n, None))])
def test_the_function_has_types(name: str):
    """A reader sees in the signature what goes in and what comes out."""
    signature = inspect.signature(getattr(vk, name))
    untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
    assert untyped == []
    assert signature.return_annotation is not signature.empty


def test_an_unknown_name_is_named():
    """The message is Python's own."""
    with pytest.raises(AttributeError, match="module 'vizkit' has no attribute 'lunch'"):
        vk.lunch  # noqa: B018
