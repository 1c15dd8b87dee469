"""Every committed notebook keeps every rule of the house, and every rule is seen to catch a notebook that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.notebooks.execute import clean
from tests.notebooks.lint import LARGEST_BYTES, RULES, Notebook, Rule

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
RULE_IDS = [rule.__name__ for rule in RULES]


def test_there_are_notebooks():
    """The rules below hold for something."""
    assert NOTEBOOKS


@pytest.mark.parametrize("rule", RULES, ids=RULE_IDS)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_keeps_the_rule(path: Path, rule: Rule):
    """What nbval lets pass, this does not."""
    assert list(rule(Notebook(path))) == []


def exercise(name: str) -> list[NotebookNode]:
    return [
        new_markdown_cell(f"**Exercise {name}.** Move at most 24 bytes."),
        new_code_cell(f"def {name}(x):\n    raise NotImplementedError", metadata={"tags": ["exercise"]}),
        new_code_cell(
            f"def is_{name}(f):\n    yield 'it', 2, f(1), 'double'\nvk.check({name}, is_{name})",
            metadata={"tags": ["check"]},
        ),
        new_code_cell(
            f"def {name}_solution(x):\n    return 2 * x\nvk.check({name}_solution, is_{name}, required=True)",
            metadata={"tags": ["solution"], "jupyter": {"source_hidden": True}},
        ),
    ]


def good_notebook() -> NotebookNode:
    first = (
        "# Two ranks\n\nThey meet.\n\nAfter this you can\n- launch\n- read\n- explain\n\n20 minutes. CPU, 4 ranks.\n\n"
        "Previous: [start](00_start.ipynb) · Next: [more](02_more.ipynb)"
    )
    cells = [
        new_markdown_cell(first),
        new_code_cell("import vizkit as vk"),
        new_markdown_cell("## Why\n\nThe all-reduce `allreduce` of each worker-free rank."),
        new_code_cell("assert 1 + 1 == 2\n1 + 1", outputs=[new_output("execute_result", {"text/plain": "2"})]),
        new_markdown_cell("**Takeaway** It adds up."),
        new_markdown_cell("## Your turn"),
        *exercise("ring"),
        *exercise("tree"),
        *exercise("star"),
    ]
    for count, cell in enumerate((c for c in cells if c.cell_type == "code"), start=1):
        cell.execution_count = count
    return clean(new_notebook(cells=cells))


def write(folder: Path, node: NotebookNode) -> Notebook:
    for neighbour in ("00_start.ipynb", "02_more.ipynb"):
        nbformat.write(new_notebook(), folder / neighbour)
    path = folder / "01_pair.ipynb"
    nbformat.write(node, path)
    return Notebook(path)


@pytest.mark.parametrize("rule", RULES, ids=RULE_IDS)
def test_a_good_notebook_passes(rule: Rule, tmp_path: Path):
    """The rules ask for nothing that cannot be had."""
    assert list(rule(write(tmp_path, good_notebook()))) == []


WHY, ADDS, STUB, CHECK, SOLUTION = 2, 3, 7, 8, 9
"""Positions in the good notebook."""


def source(cell: int, text: str) -> Callable[[NotebookNode], None]:
    return lambda node: node.cells[cell].update(source=text)


def appended(cell: int, text: str) -> Callable[[NotebookNode], None]:
    return lambda node: node.cells[cell].update(source=node.cells[cell].source + text)


def replaced(cell: int, old: str, new: str) -> Callable[[NotebookNode], None]:
    return lambda node: node.cells[cell].update(source=node.cells[cell].source.replace(old, new))


def output(cell: int, *outputs: NotebookNode) -> Callable[[NotebookNode], None]:
    return lambda node: node.cells[cell].update(outputs=list(outputs))


def html(text: str) -> NotebookNode:
    return new_output("display_data", {"text/html": text})


FAULTS: dict[str, list[tuple[Callable[[NotebookNode], object], str]]] = {
    "was_run_top_to_bottom": [
        (lambda n: n.cells[ADDS].update(execution_count=None), "cell 3 has count None, and 2 in a clean run"),
        (lambda n: n.cells[ADDS].update(execution_count=7), "cell 3 has count 7, and 2 in a clean run"),
        (source(ADDS, ""), "cell 3 is an empty code cell"),
    ],
    "stores_no_error": [
        (
            output(ADDS, new_output("error", ename="ValueError", evalue="no", traceback=[])),
            "cell 3 stores ValueError: no",
        ),
    ],
    "stores_no_stderr": [
        (output(ADDS, new_output("stream", name="stderr", text="careful")), "cell 3 wrote to stderr: 'careful'"),
    ],
    "has_plain_metadata": [
        (lambda n: n.metadata.kernelspec.update(name="conda-env"), "the kernel is 'conda-env', not 'python3'"),
        (lambda n: n.metadata.update(widgets={}), "the notebook's metadata hold ['widgets']"),
        (lambda n: n.metadata.language_info.update(version="3.11.7"), "language_info holds ['version']"),
        (lambda n: n.cells[ADDS].metadata.update(execution={"iopub": 1}), "cell 3 has metadata ['execution']"),
        (lambda n: n.cells[ADDS].metadata.update(jupyter={"x": 1}), "cell 3 has metadata jupyter.['x']"),
    ],
    "names_no_place_or_time": [
        (appended(WHY, " See /home/ada/run."), "the file holds the path '/home/ada'"),
        (output(ADDS, html("2026-11-30 10:38")), "the file holds the time stamp '2026-11-30 10:38'"),
    ],
    "is_small": [
        (output(ADDS, html("x" * LARGEST_BYTES)), "bytes, over 500,000"),
        (lambda n: n.cells.extend(new_markdown_cell("x") for _ in range(60)), "78 cells, over 60"),
        (source(ADDS, "x = 1\n" * 16), "cell 3 has 16 lines of code, over 15"),
    ],
    "uses_known_tags": [
        (lambda n: n.cells[ADDS].metadata.update(tags=["slow"]), "cell 3 has tags ['slow']; the list is"),
        (lambda n: n.cells[ADDS].metadata.update(tags=["nbval-skip"]), "cell 3 is skipped without a reason"),
        (source(ADDS, "# NBVAL_SKIP\nassert True"), "cell 3 is skipped without a reason"),
    ],
    "lays_out_exercises": [
        (lambda n: n.cells.pop(SOLUTION), "solution cells are [12, 16], exercise cells [7, 10, 14]"),
        (lambda n: n.cells[CHECK].metadata.update(tags=[]), "check cells are [12, 16], exercise cells [7, 11, 15]"),
        (source(STUB - 1, "Move few bytes."), "cell 6 should be the prompt of the exercise"),
        (source(STUB, "def ring(x):\n    return 2 * x"), "cell 7 should leave the work open"),
        (source(CHECK, "print('looks good')"), "cell 8 should call vk.check, without required"),
        (replaced(CHECK, "is_ring)", "is_ring, required=True)"), "cell 8 should call vk.check, without required"),
        (replaced(SOLUTION, ", required=True", ""), "cell 9 should end with vk.check(..., required=True)"),
        (lambda n: n.cells[SOLUTION].metadata.pop("jupyter"), "cell 9 should be folded"),
        (
            replaced(SOLUTION, "def ring_solution(x):\n    return", "ring_solution = lambda x:"),
            "cell 9 begins with its answer",
        ),
        (replaced(SOLUTION, "ring_solution", "ring"), "cell 9 reuses the stub's names ['ring']"),
    ],
    "has_enough_exercises": [(lambda n: n.cells.__delitem__(slice(6, 10)), "2 exercises, under 3")],
    "proves_something": [(source(ADDS, "1 + 1"), "no cell asserts anything")],
    "opens_as_a_lesson": [
        (replaced(0, "# Two", "Two"), "the first cell should open with a title"),
        (replaced(0, "After this you can", "Goals"), "the first cell should say what the reader can do afterwards"),
        (replaced(0, "- read\n", ""), "the first cell lists 2 goals; three to five"),
        (replaced(0, "20 minutes", "Short"), "the first cell should say how many minutes it takes"),
        (replaced(0, "CPU, 4 ranks", "Anything"), "the first cell should say the hardware"),
        (replaced(0, "00_start.ipynb", "02_more.ipynb"), "the first cell should link the previous notebook, 00_start"),
        (replaced(0, "02_more.ipynb", "00_start.ipynb"), "the first cell should link the next notebook, 02_more"),
    ],
    "links_what_exists": [
        (appended(WHY, " [gone](99_gone.ipynb)"), "cell 2 links '99_gone.ipynb', which does not exist")
    ],
    "imports_in_one_place": [
        (source(1, "x = 1"), "the second cell should hold the imports"),
        (appended(ADDS, "\nfrom math import pi"), "cell 3 imports; move that to the second cell"),
        (source(ADDS, "def f():\n    import os\nassert f"), "cell 3 imports; move that to the second cell"),
    ],
    "backs_what_it_ignores": [
        (source(ADDS, "# NBVAL_IGNORE_OUTPUT\n1 + 1"), "cell 3 ignores its output and asserts nothing"),
        (
            lambda n: n.cells[ADDS].update(source="1", metadata={"tags": ["nbval-ignore-output"]}),
            "cell 3 ignores its output and asserts nothing",
        ),
    ],
    "fetches_nothing": [
        (
            output(ADDS, html('<script src="https://a.example/x.js">')),
            "an output of cell 3 loads something from the network",
        ),
        (output(ADDS, html("<link href='//a.example/x.css'>")), "an output of cell 3 loads something from the network"),
        (appended(WHY, "![a](https://a.example/a.png)"), "cell 2 shows something from the network"),
        (appended(WHY, '<img width=3 src="https://a.example/a.png">'), "cell 2 shows something from the network"),
    ],
    "speaks_the_fields_words": [
        (appended(WHY, " An allreduce."), "cell 2 says 'allreduce'; the word is 'all-reduce'"),
        (appended(WHY, " Each Worker."), "cell 2 says 'Worker'; the word is 'rank'"),
        (appended(WHY, " Four micro-batches."), "cell 2 says 'micro-batches'; the word is 'microbatch'"),
    ],
    "sums_up": [(lambda n: n.cells.pop(4), "the section '## Why' ends without a **Takeaway**")],
}


def test_every_rule_has_a_fault():
    """A rule that has caught nothing may be unable to."""
    assert sorted(FAULTS) == sorted(RULE_IDS)


@pytest.mark.parametrize(
    ("rule", "fault", "complaint"),
    [(rule, *case) for rule in RULES for case in FAULTS.get(rule.__name__, [])],
    ids=[f"{rule.__name__}-{i}" for rule in RULES for i, _ in enumerate(FAULTS.get(rule.__name__, []))],
)
def test_the_rule_catches(rule: Rule, fault: Callable[[NotebookNode], object], complaint: str, tmp_path: Path):
    """The good notebook with one fault: the rule says which cell, and what is wrong with it."""
    node = good_notebook()
    fault(node)
    complaints = list(rule(write(tmp_path, node)))
    assert any(complaint in text for text in complaints), complaints


def test_a_figure_may_be_ignored_without_a_claim(tmp_path: Path):
    """A figure of measured times differs in every run; what the text says about it is asserted where it is said."""
    node = good_notebook()
    node.cells[ADDS].update(
        source="# NBVAL_IGNORE_OUTPUT\nfig",
        outputs=[new_output("display_data", {"application/vnd.plotly.v1+json": {"data": []}})],
    )
    rules = {rule.__name__: rule for rule in RULES}
    assert list(rules["backs_what_it_ignores"](write(tmp_path, node))) == []
