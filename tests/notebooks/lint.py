"""What nbval lets pass: rules of the house that a committed notebook keeps. Each returns what is wrong, in words."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import nbformat
from nbformat import NotebookNode

LARGEST_BYTES = 500_000
MOST_CELLS = 60
MOST_CODE_LINES = 15
TAGS = {
    "exercise",
    "check",
    "solution",
    "hide-input",
    "raises-exception",
    "nbval-ignore-output",
    "nbval-skip",
}
FEWEST_EXERCISES = {"00": 0, "01": 3, "02": 3}
FEWEST_EXERCISES_ELSEWHERE = 2
FIGURE_MIMES = {"application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json"}
SYNONYMS = {
    r"all ?reduce": "all-reduce",
    r"all ?gather": "all-gather",
    r"reduce ?scatter": "reduce-scatter",
    r"all ?to ?all": "all-to-all",
    r"micro[ -]batch(es)?": "microbatch",
    r"workers?": "rank",
    r"world-size": "world size",
    r"device grid": "device mesh",
}


@dataclass(frozen=True)
class Notebook:
    """One notebook file, as a reader and as JSON."""

    path: Path

    @cached_property
    def node(self) -> NotebookNode:
        return nbformat.read(self.path, as_version=4)

    @cached_property
    def raw(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def cells(self) -> list[NotebookNode]:
        return self.node.cells

    def code(self) -> Iterator[tuple[int, NotebookNode]]:
        return ((i, cell) for i, cell in enumerate(self.cells) if cell.cell_type == "code")

    def outputs(self) -> Iterator[tuple[int, NotebookNode, NotebookNode]]:
        return ((i, cell, output) for i, cell in self.code() for output in cell.outputs)

    def markdown(self) -> Iterator[tuple[int, NotebookNode]]:
        return ((i, cell) for i, cell in enumerate(self.cells) if cell.cell_type == "markdown")

    def tagged(self, tag: str) -> list[int]:
        return [i for i, cell in enumerate(self.cells) if tag in tags_of(cell)]


Rule = Callable[[Notebook], Iterator[str]]


def tags_of(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", []))


def tree_of(source: str) -> ast.Module:
    """The cell's syntax tree, without IPython's magics."""
    return ast.parse("\n".join("pass" if re.match(r"\s*[%!]", line) else line for line in source.splitlines()))


def calls_of(source: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree_of(source)) if isinstance(node, ast.Call)]


def is_check(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("vk.check", "check", "vk.exercises.check")


def is_ignored(cell: NotebookNode) -> bool:
    return "nbval-ignore-output" in tags_of(cell) or bool(re.search(r"^#\s*NBVAL_IGNORE_OUTPUT\s*$", cell.source, re.M))


def was_run_top_to_bottom(notebook: Notebook) -> Iterator[str]:
    """nbval compares nothing in a cell that was never run."""
    for expected, (i, cell) in enumerate(notebook.code(), start=1):
        if not cell.source.strip():
            yield f"cell {i} is an empty code cell"
        elif cell.execution_count != expected:
            yield f"cell {i} has count {cell.execution_count}, and {expected} in a clean run; execute and save again"


def stores_no_error(notebook: Notebook) -> Iterator[str]:
    """An error that is meant has the tag raises-exception."""
    for i, cell, output in notebook.outputs():
        if output.output_type == "error" and "raises-exception" not in tags_of(cell):
            yield f"cell {i} stores {output.ename}: {output.evalue[:80]}"


def stores_no_stderr(notebook: Notebook) -> Iterator[str]:
    """A warning on stderr is a fault of ours."""
    for i, _, output in notebook.outputs():
        if output.output_type == "stream" and output.name == "stderr":
            yield f"cell {i} wrote to stderr: {output.text[:80]!r}"


def has_plain_metadata(notebook: Notebook) -> Iterator[str]:
    """Kernel python3, and nothing that differs between machines: no path, no time stamp, no widget state."""
    metadata = notebook.node.metadata
    kernel = metadata.get("kernelspec", {})
    if kernel.get("name") != "python3":
        yield f"the kernel is {kernel.get('name')!r}, not 'python3'"
    if extra := sorted(set(metadata) - {"kernelspec", "language_info"}):
        yield f"the notebook's metadata hold {extra}"
    if extra := sorted(set(metadata.get("language_info", {})) - {"name"}):
        yield f"language_info holds {extra}; only the name is the same everywhere"
    for i, cell in enumerate(notebook.cells):
        if extra := sorted(set(cell.metadata) - {"tags", "jupyter"}):
            yield f"cell {i} has metadata {extra}"
        if extra := sorted(set(cell.metadata.get("jupyter", {})) - {"source_hidden"}):
            yield f"cell {i} has metadata jupyter.{extra}"


def names_no_place_or_time(notebook: Notebook) -> Iterator[str]:
    """No path of somebody's machine and no time stamp anywhere in the file."""
    for found in re.finditer(r"/(work|root|home|Users|tmp)/[\w.-]+", notebook.raw):
        yield f"the file holds the path {found.group()!r}"
    for found in re.finditer(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d", notebook.raw):
        yield f"the file holds the time stamp {found.group()!r}"


def is_small(notebook: Notebook) -> Iterator[str]:
    """What grows past this belongs in vizkit."""
    if (size := len(notebook.raw.encode())) > LARGEST_BYTES:
        yield f"{size:,} bytes, over {LARGEST_BYTES:,}"
    if len(notebook.cells) > MOST_CELLS:
        yield f"{len(notebook.cells)} cells, over {MOST_CELLS}"
    for i, cell in notebook.code():
        if (lines := len(cell.source.splitlines())) > MOST_CODE_LINES:
            yield f"cell {i} has {lines} lines of code, over {MOST_CODE_LINES}"


def uses_known_tags(notebook: Notebook) -> Iterator[str]:
    """A closed list, and a skipped cell says why."""
    for i, cell in enumerate(notebook.cells):
        if unknown := sorted(set(tags_of(cell)) - TAGS):
            yield f"cell {i} has tags {unknown}; the list is {sorted(TAGS)}"
        skipped = "nbval-skip" in tags_of(cell) or re.search(r"^#\s*NBVAL_SKIP\s*$", cell.source, re.M)
        if skipped and not re.search(r"^#[ ]*(\S+[ ]+){2}", cell.source, re.M):
            yield f"cell {i} is skipped without a reason; say it in a comment in the cell"


def lays_out_exercises(notebook: Notebook) -> Iterator[str]:
    """Prompt with a number, stub, check, folded solution: neighbours, in this order."""
    exercises = notebook.tagged("exercise")
    for tag, offset in (("check", 1), ("solution", 2)):
        if notebook.tagged(tag) != [i + offset for i in exercises]:
            yield f"{tag} cells are {notebook.tagged(tag)}, exercise cells {exercises}; {tag} stands {offset} after"
            return
    for i in exercises:
        prompt, stub, check, solution = notebook.cells[i - 1 : i + 3]
        if prompt.cell_type != "markdown" or not re.search(r"\d", prompt.source):
            yield f"cell {i - 1} should be the prompt of the exercise, in words, with a numeric target"
        if not re.search(r"NotImplementedError|=\s*\.\.\.", stub.source):
            yield f"cell {i} should leave the work open: raise NotImplementedError, or answer = ..."
        checks = [call for call in calls_of(check.source) if is_check(call)]
        if not checks or any(word.arg == "required" for call in checks for word in call.keywords):
            yield f"cell {i + 1} should call vk.check, without required"
        required = [w for c in calls_of(solution.source) if is_check(c) for w in c.keywords if w.arg == "required"]
        if not required:
            yield f"cell {i + 2} should end with vk.check(..., required=True)"
        if not solution.metadata.get("jupyter", {}).get("source_hidden"):
            yield f"cell {i + 2} should be folded (metadata jupyter.source_hidden)"
        if not re.match(r"#|class |def (?!.*return)", solution.source.partition("\n")[0]):
            yield f"cell {i + 2} begins with its answer, which JupyterLab shows of a folded cell; begin with a comment"
        if reused := names_bound(stub.source) & names_bound(solution.source):
            yield f"cell {i + 2} reuses the stub's names {sorted(reused)}, and would overwrite the learner's work"


def names_bound(source: str) -> set[str]:
    """Functions, classes and variables that the cell's top level binds."""
    bound = set()
    for node in tree_of(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Assign):
            bound |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return bound


def has_enough_exercises(notebook: Notebook) -> Iterator[str]:
    """Reading is not doing."""
    fewest = FEWEST_EXERCISES.get(notebook.path.name[:2], FEWEST_EXERCISES_ELSEWHERE)
    if (count := len(notebook.tagged("exercise"))) < fewest:
        yield f"{count} exercises, under {fewest}"


def proves_something(notebook: Notebook) -> Iterator[str]:
    """At least one assertion outside the exercises."""
    apart = {i for tag in ("exercise", "check", "solution") for i in notebook.tagged(tag)}
    if not any(has_assert(cell.source) for i, cell in notebook.code() if i not in apart):
        yield "no cell asserts anything"


def has_assert(source: str) -> bool:
    asserting = any(isinstance(node, ast.Assert) for node in ast.walk(tree_of(source)))
    return asserting or any(re.search(r"assert_(close|allclose|equal)", ast.unparse(c.func)) for c in calls_of(source))


def opens_as_a_lesson(notebook: Notebook) -> Iterator[str]:
    """Title, goals, minutes, hardware, and the way to the neighbours."""
    first = notebook.cells[0]
    text = first.source
    if first.cell_type != "markdown" or not text.startswith("# "):
        yield "the first cell should open with a title (# …)"
    if "After this you can" not in text:
        yield "the first cell should say what the reader can do afterwards (After this you can …)"
    goals = len(re.findall(r"^\s*(?:[-*]|\d+\.) ", text, re.M))
    if not 3 <= goals <= 5:
        yield f"the first cell lists {goals} goals; three to five"
    if not re.search(r"\b\d+ min", text):
        yield "the first cell should say how many minutes it takes"
    if not re.search(r"\bCPU\b.*\branks?\b", text, re.S):
        yield "the first cell should say the hardware (CPU, 4 ranks …)"
    names = sorted(path.name for path in notebook.path.parent.glob("[0-9][0-9]_*.ipynb"))
    here = names.index(notebook.path.name)
    neighbours = {"previous": names[max(here - 1, 0)], "next": names[min(here + 1, len(names) - 1)]}
    for what, name in neighbours.items():
        if name != notebook.path.name and f"]({name})" not in text:
            yield f"the first cell should link the {what} notebook, {name}"


def links_what_exists(notebook: Notebook) -> Iterator[str]:
    """A relative link leads somewhere."""
    for i, cell in notebook.markdown():
        for target in re.findall(r"\]\(([^)\s#]+)", cell.source):
            if (
                "://" not in target
                and not target.startswith("mailto:")
                and not (notebook.path.parent / target).exists()
            ):
                yield f"cell {i} links {target!r}, which does not exist"


def imports_in_one_place(notebook: Notebook) -> Iterator[str]:
    """The second cell holds every import."""
    imports = [
        i
        for i, cell in notebook.code()
        if any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.walk(tree_of(cell.source)))
    ]
    if not imports or imports[0] != 1:
        yield "the second cell should hold the imports"
    for i in imports:
        if i > 1:
            yield f"cell {i} imports; move that to the second cell"


def backs_what_it_ignores(notebook: Notebook) -> Iterator[str]:
    """A cell whose text is not compared asserts its claim; a figure makes its claim elsewhere."""
    for i, cell in notebook.code():
        shows_only_figures = bool(cell.outputs) and all(FIGURE_MIMES & set(o.get("data", {})) for o in cell.outputs)
        if is_ignored(cell) and not has_assert(cell.source) and not shows_only_figures:
            yield f"cell {i} ignores its output and asserts nothing, so it could say anything"


def fetches_nothing(notebook: Notebook) -> Iterator[str]:
    """No output and no picture comes from the network."""
    for i, _, output in notebook.outputs():
        if re.search(r"(src|href)\s*=\s*\\?[\"']?\s*(https?:)?//", json.dumps(output).replace('\\"', '"')):
            yield f"an output of cell {i} loads something from the network"
    for i, cell in notebook.markdown():
        if re.search(r"!\[[^\]]*\]\((https?:)?//|<(img|script|iframe)[^>]+src\s*=\s*[\"']?(https?:)?//", cell.source):
            yield f"cell {i} shows something from the network"


def speaks_the_fields_words(notebook: Notebook) -> Iterator[str]:
    """One word for one thing."""
    for i, cell in notebook.markdown():
        prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|\$[^$]*\$", " ", cell.source, flags=re.S)
        for pattern, word in SYNONYMS.items():
            if found := re.search(rf"(?<![\w-]){pattern}(?![\w-])", prose, re.I):
                yield f"cell {i} says {found.group()!r}; the word is {word!r}"


def sums_up(notebook: Notebook) -> Iterator[str]:
    """A section that shows something ends with a takeaway; one that only sets exercises need not."""
    sections: list[list[NotebookNode]] = []
    for cell in notebook.cells[2:]:
        if cell.cell_type == "markdown" and re.match(r"## ", cell.source):
            sections.append([])
        if sections:
            sections[-1].append(cell)
    for section in sections:
        title = section[0].source.splitlines()[0]
        has_exercise = any("exercise" in tags_of(cell) for cell in section)
        shows = any(cell.cell_type == "code" for cell in section)
        if shows and not has_exercise and not any("**Takeaway" in c.source for c in section):
            yield f"the section {title!r} ends without a **Takeaway**"


RULES: tuple[Rule, ...] = (
    was_run_top_to_bottom,
    stores_no_error,
    stores_no_stderr,
    has_plain_metadata,
    names_no_place_or_time,
    is_small,
    uses_known_tags,
    lays_out_exercises,
    has_enough_exercises,
    proves_something,
    opens_as_a_lesson,
    links_what_exists,
    imports_in_one_place,
    backs_what_it_ignores,
    fetches_nothing,
    speaks_the_fields_words,
    sums_up,
)
