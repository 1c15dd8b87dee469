"""`python -m vizkit`: see `vizkit.cli`."""

from __future__ import annotations

import sys

from vizkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
