"""`python -m vizkit.handouts`: what `make handouts` calls."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vizkit.errors import InvalidInputError


def main(words: Sequence[str] | None = None) -> int:
    """Writes the pages; exit status 2 with value, rule and remedy where that cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m vizkit.handouts",
        description="Turns notebooks, as they were saved, into pages that play with no kernel and no network.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("notebooks", type=Path, nargs="?", default=Path("notebooks"), help="folder with notebooks")
    parser.add_argument("out", type=Path, nargs="?", default=Path("handouts"), help="folder to write to")
    parser.add_argument("--without-solutions", action="store_true", help="leave out the folded solutions")
    arguments = parser.parse_args(words)
    try:
        from vizkit.handouts.folder import write_handouts
    except ModuleNotFoundError as error:
        print(f"vizkit: {error.name} is missing; install it with: pip install 'vizkit[handouts]'", file=sys.stderr)
        return 2
    try:
        pages = write_handouts(arguments.notebooks, arguments.out, with_solutions=not arguments.without_solutions)
    except InvalidInputError as error:
        print(f"vizkit: {error}", file=sys.stderr)
        return 2
    print(f"{len(pages)} pages; begin with {pages[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
