"""Runs notebooks from top to bottom and saves them so that two runs differ only where the outputs do.

python -m tests.notebooks.execute notebooks/00_start_here.ipynb ...
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

CELL_TIMEOUT_S = 120


def execute(path: Path) -> NotebookNode:
    """The notebook with fresh outputs, run in its own folder; raises `CellExecutionError` where a cell does."""
    node = nbformat.read(path, as_version=4)
    client = NotebookClient(
        node,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
        store_widget_state=True,  # `clean` drops it; without it nbclient cannot serve an Output widget
    )
    client.execute()
    return clean(node)


def clean(node: NotebookNode) -> NotebookNode:
    """Without what differs between machines and runs; cells are named after what they say."""
    node.nbformat_minor = max(5, node.nbformat_minor)
    node.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    seen: set[str] = set()
    for cell in node.cells:
        kept = {key: cell.metadata[key] for key in ("tags", "jupyter") if cell.metadata.get(key)}
        hidden = {"source_hidden": True} if kept.get("jupyter", {}).get("source_hidden") else {}
        kept.pop("jupyter", None)
        cell.metadata = nbformat.from_dict(kept | ({"jupyter": hidden} if hidden else {}))
        cell.id = name_of(cell, seen)
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
    return node


def name_of(cell: NotebookNode, seen: set[str]) -> str:
    digest = hashlib.sha256(f"{cell.cell_type}\0{cell.source}".encode()).hexdigest()[:8]
    copies = sum(name.startswith(digest) for name in seen)
    name = f"{digest}-{copies}" if copies else digest
    seen.add(name)
    return name


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.notebooks.execute", description=__doc__)
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK")
    failed = 0
    for path in parser.parse_args().notebooks:
        start = time.monotonic()
        try:
            node = execute(path)
        except CellExecutionError as error:
            print(f"{path}: stopped, not saved\n{error}", file=sys.stderr)
            failed += 1
            continue
        nbformat.write(node, path)
        print(f"{path}: saved after {time.monotonic() - start:.0f} s, {path.stat().st_size:,} bytes")
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
