"""A function goes from a cell to a module: what it uses goes with it, what cannot go is named."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import linecache
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import vizkit as vk
from vizkit.exporting import export, module_text

NUMBER = itertools.count()


class Notebook:
    """A module without a file, whose cells Python knows as it knows those of Jupyter."""

    def __init__(self) -> None:
        self.name = f"notebook_{next(NUMBER)}"
        self.module = ModuleType(self.name)
        sys.modules[self.name] = self.module
        self.cells: list[str] = []

    def run(self, cell: str) -> None:
        text = textwrap.dedent(cell).lstrip("\n")
        name = f"<{self.name} cell {len(self.cells)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        self.cells.append(name)
        exec(compile(text, name, "exec", dont_inherit=True), vars(self.module))

    def __getitem__(self, name: str) -> Any:
        return getattr(self.module, name)


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    made = Notebook()
    yield made
    del sys.modules[made.name]
    for cell in made.cells:
        del linecache.cache[cell]


def imported(path: Path) -> ModuleType:
    """The module in a file, from a fresh start."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return module


def exported(notebook: Notebook, name: str, folder: Path) -> ModuleType:
    return imported(export(notebook[name], folder / "exported_cell.py"))


def test_all_that_a_function_uses_goes_with_it(notebook: Notebook, tmp_path: Path):
    """Helpers of helpers, classes with bases, decorators, constants, defaults; imports as the notebook wrote them."""
    notebook.run("""
        import functools
        import os.path
        from collections import Counter as Bag
        from dataclasses import dataclass, field

        import numpy as np
    """)
    notebook.run("""
        WIDTH = 4
        SIZES = {"small": [1, 2], "large": (8, float("inf"))}

        def doubling(function):
            @functools.wraps(function)
            def doubled(*args):
                return FACTOR * function(*args)
            return doubled

        FACTOR = 2
    """)
    notebook.run("""
        class Base:
            def scale(self):
                return WIDTH  # a comment stays

        @dataclass
        class Config(Base):
            rate: float = 0.5
            names: list = field(default_factory=list)

        CONFIG = Config(rate=0.25)

        @doubling
        def helper(x, width=WIDTH):
            return x * width

        alias = helper

        def train(config=CONFIG, *, seed: int = 3) -> float:
            bag = Bag("aab")
            return alias(config.rate) + config.scale() + np.sum(SIZES["small"]) + bag["a"] + seed + len(os.path.sep)
    """)
    module = exported(notebook, "train", tmp_path)
    assert module.train() == notebook["train"]() == 2 * 0.25 * 4 + 4 + 3 + 2 + 3 + 1
    text = (tmp_path / "exported_cell.py").read_text()
    assert "return WIDTH  # a comment stays" in text
    statements = [ast.unparse(node) for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert statements == [
        "import functools",
        "import numpy as np",
        "import os.path",
        "from collections import Counter as Bag",
        "from dataclasses import dataclass",
        "from dataclasses import field",
    ]
    assert "__main__" not in text


def test_functions_that_call_each_other_go_together(notebook: Notebook, tmp_path: Path):
    """Recursion in a circle needs no order."""
    notebook.run("""
        def is_even(n):
            return n == 0 or is_odd(n - 1)

        def is_odd(n):
            return n != 0 and is_even(n - 1)
    """)
    assert exported(notebook, "is_even", tmp_path).is_even(10) is True


@pytest.mark.parametrize(
    "value",
    [
        "True",
        "None",
        "-3",
        "1e-3",
        "float('-inf')",
        "1 + 2j",
        "'say \"hi\"\\n'",
        "b'bytes'",
        "(1,)",
        "()",
        "set()",
        "{3, 1, 2}",
        "frozenset({1})",
        "{'a': [1, {'b': (2,)}]}",
        "range(2, 9, 3)",
        "pathlib.Path('data/digits')",
        "torch.bfloat16",
        "torch.device('cpu')",
        "np.float64(0.25)",
        "functools.partial(max, 3, key=abs)",
        "vk.Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9)",
        "vk.SpanKind.FORWARD",
        "torch.nn.Linear",
        "math.tau",
    ],
)
def test_constants_come_back_equal(value: str, notebook: Notebook, tmp_path: Path):
    """What an expression can say."""
    notebook.run(f"""
        import functools, math, pathlib
        import numpy as np
        import torch
        import vizkit as vk

        VALUE = {value}

        def get():
            return VALUE
    """)
    there, here = exported(notebook, "get", tmp_path).get(), notebook["VALUE"]
    assert type(there) is type(here)
    if hasattr(here, "func"):
        there, here = (there.func, there.args, there.keywords), (here.func, here.args, here.keywords)
    assert there == here


def test_what_an_enclosing_function_held_becomes_a_constant(notebook: Notebook, tmp_path: Path):
    """A closure over plain data can go: the variable becomes the module's."""
    notebook.run("""
        def make(rate):
            def step(x):
                return x * rate
            return step

        step = make(0.5)
    """)
    assert exported(notebook, "step", tmp_path).step(4) == 2.0


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            "import torch\nweights = torch.ones(3)\ndef f(): return weights",
            "weights='tensor([1., 1., 1.])': is data, which a script does not hold, and f uses it; make or load it "
            "inside the function, or pass its size or its file's name as an argument",
        ),
        (
            "import torch\nmodel = torch.nn.Linear(2, 1)\ndef f(): return model",
            "is a model with weights of its own, and f uses it; build it inside the function",
        ),
        (
            "log = open('/dev/null')\ndef f(): log.write('x')",
            "is an open file, and f uses it; open it inside the function",
        ),
        (
            "double = lambda x: 2 * x\ndef f(): return double(1)",
            "is a lambda, which has no name to write it under, and f uses it; write it with def",
        ),
        (
            "import threading\nlock = threading.Lock()\ndef f(): return lock",
            "is a live _thread.lock, and f uses it; make it inside the function, or pass plain data as an argument",
        ),
        ("def f(): return missing", "fn='f': uses missing, which is not defined; run the cell that defines it first"),
        (
            "def f(): get_ipython()",
            "fn='f': uses get_ipython, which only a notebook has; print, or return what the notebook is to show",
        ),
        (
            "def make():\n    n = 0\n    def f():\n        nonlocal n\n        n += 1\n    return f\nf = make()",
            "n='f': is changed through nonlocal, and a module has no enclosing function; return the new value",
        ),
        (
            "def make(n):\n    def g(): return n\n    return g\na, b = make(1), make(2)\ndef f(): return a() + b()",
            "g=<function",
        ),
        (
            "import functools\ndef g(): return 1\ng = functools.wraps(g)(lambda: 2)\ndef f(): return g()",
            "is wrapped outside of its definition, and f uses it; write the wrapper as a decorator above the function",
        ),
        (
            "N = 3\ndef f(n=N): return n\nN = 5",
            "n=3: is the default since the cell of f ran, but N is 5 by now; run that cell again",
        ),
        ("f = lambda: 1", "fn='<lambda>': has no name to write it under; write it with def"),
        ("f = 3", "fn=3: is no function; give the function itself: vk.export(train, path)"),
        ("from math import sqrt as f", "fn='sqrt': is in a module already (math); run it from there: math:sqrt"),
        (
            "exec('def f(): return 1')",
            "its source is not to be found; define it in a cell or in a file, and f uses it",
        ),
    ],
)
def test_what_cannot_go_is_named(cell: str, message: str, notebook: Notebook):
    """Name, rule and remedy; nothing is written."""
    notebook.run(cell)
    with pytest.raises(vk.InvalidInputError) as refused:
        module_text(notebook["f"], "exported_cell")
    assert message in str(refused.value)


def test_a_file_of_ones_own_is_not_overwritten(notebook: Notebook, tmp_path: Path):
    """What `export` wrote is replaced, anything else only on demand."""
    notebook.run("def f(): return 1")
    path = tmp_path / "exported_cell.py"
    export(notebook["f"], path)
    export(notebook["f"], path)
    path.write_text("mine = 1\n")
    with pytest.raises(vk.InvalidInputError, match="exists and was not written by vk"):
        export(notebook["f"], path)
    assert export(notebook["f"], path, overwrite=True) == path
    assert imported(path).f() == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train.txt", "is to be a module that can be imported; name it for instance train_digits.py"),
        ("my-train.py", "is to be a module that can be imported"),
        ("class.py", "is to be a module that can be imported"),
        ("json.py", "a module json exists"),
        ("nowhere/train_here.py", "its folder does not exist; make"),
    ],
)
def test_the_module_can_be_imported(name: str, message: str, notebook: Notebook, tmp_path: Path):
    """A name that Python cannot import, or that would hide a module, is refused."""
    notebook.run("def f(): return 1")
    with pytest.raises(vk.InvalidInputError) as refused:
        export(notebook["f"], tmp_path / name)
    assert message in str(refused.value)


def test_cells_of_ipython_go_too(tmp_path: Path, repository: Path):
    """In the shell that notebooks run, with a class that has no method, a magic above it, and a cell run twice."""
    script = textwrap.dedent("""
        import pathlib, sys
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        cells = [
            "from __future__ import annotations\\nimport math\\nfrom dataclasses import dataclass",
            "%time x = 1",
            "@dataclass\\nclass Point:\\n    x: int = 1\\n    y: Later = 2",
            "@dataclass\\nclass Point:\\n    x: int = 3\\n    y: int = 4",
            "def norm(p: Point = None):\\n    p = p or Point()\\n    return math.hypot(p.x, p.y)",
            "import vizkit as vk\\npath = vk.exporting.export(norm, FOLDER + '/exported_norm.py')"
            if hasattr(__import__("vizkit"), "exporting") else
            "from vizkit.exporting import export\\npath = export(norm, FOLDER + '/exported_norm.py')",
        ]
        shell.user_ns["FOLDER"] = sys.argv[1]
        for cell in cells:
            result = shell.run_cell(cell, store_history=True)
            assert result.success, cell
        sys.path.insert(0, sys.argv[1])
        import exported_norm
        print("norm", exported_norm.norm())
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=repository, capture_output=True, text=True, timeout=120
    )
    assert "norm 5.0" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "exported_norm.py").read_text().count("class Point") == 1


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["N = 3\ndef f(n=N * 2): return n", "N = 5"], "n=6: is the default since the cell of f ran, but N * 2 is 10"),
        (["N = 3\ndef f(*, n=(N,)): return n", "N = 5"], "n=(3,): is the default since the cell of f ran"),
        (
            ["class A:\n    n = 1\n    def m(self): return 1", "A.n = 7", "def f(): return A.n"],
            "A.n=7: is 1 in",
        ),
        (["def g(): return g.k", "g.k = 5", "def f(): return g()"], "g.k=5: is no part of the definition"),
        (
            [
                "import functools",
                "@functools.singledispatch\ndef g(x): return 'any'",
                "@g.register\ndef _(x: int): return 'int'",
                "def f(): return g(3)",
            ],
            "has implementations registered outside of it; choose by isinstance inside of it",
        ),
        (["L = [1]", "L.append(L)", "def f(): return len(L)"], "holds itself, or is nested too deeply"),
        (["def g(): return B is A", "A = [g]\nB = A", "def f(): return A"], "is what A is, and A needs it first"),
    ],
    ids=["default", "keyword default", "class attribute", "function attribute", "single dispatch", "cycle", "alias"],
)
def test_what_changed_since_its_cell_ran_is_refused(notebook: Notebook, tmp_path: Path, cells: list[str], message: str):
    """The text of the cell would bring the old state back, unnoticed."""
    for cell in cells:
        notebook.run(cell)
    with pytest.raises(vk.InvalidInputError) as refused:
        export(notebook["f"], tmp_path / "exported_cell.py")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["import enum\nclass E(enum.Enum):\n    A = 1", "X = E.A", "def f(): return X.value"], 1),
        (["import enum\nclass E(enum.Flag):\n    A = 1\n    B = 2", "X = E.A | E.B", "def f(): return X.value"], 3),
        (["def g(): return 3", "T = {'all': (g, g)}", "def f(): return T['all'][1]()"], 3),
        (["A = [1]\nB = A", "def f():\n    A.append(2)\n    return B"], [1, 2]),
        (["A = [float('inf')]\nB = A", "def f(): return A is B"], True),
        (["Z = complex(-0.0, float('inf'))", "def f(): return str(Z)"], "(-0+infj)"),
        (["__version__ = '1'", "def f(): return __version__"], "1"),
        (["class A:\n    n = 0\n    def __init__(self): A.n += 1", "A()", "def f():\n    A()\n    return A.n"], 1),
    ],
    ids=["enum", "flag", "functions in a dict", "two names", "two names later", "complex", "dunder", "counts itself"],
)
def test_constants_stand_after_what_they_need(notebook: Notebook, tmp_path: Path, cells: list[str], expected: Any):
    """Members of the notebook's own enums and tuples of its functions, and what two names share."""
    for cell in cells:
        notebook.run(cell)
    assert exported(notebook, "f", tmp_path).f() == expected


@pytest.mark.parametrize("path", [None, 1, b"x.py"])
def test_a_path_that_names_no_file(path: Any):
    """Said as an argument's fault."""
    with pytest.raises(vk.InvalidInputError, match=r"names no file; name it for instance train_digits\.py"):
        export(exported, path)
