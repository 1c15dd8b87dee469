"""Where a live view is shown: in a notebook that a person runs, in a terminal, or only as a summary at the end."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.runtime.live_state import LiveState, LiveSummary, LiveView
from vizkit.runtime.progress import Place, as_text, this_place
from vizkit.units import bytes_text, seconds_text

PANEL = "vizkit.widgets.live_panel:LivePanel"
"""The view in a notebook: a layer above this one, so it is named and not imported, and looked up when it is needed."""


class SummaryOnly:
    """Shows nothing while the ranks run, and leaves the summary: for what nobody watches."""

    stop_wanted = False

    def show(self, state: LiveState) -> None:
        pass

    def close(self, summary: LiveSummary) -> None:
        print(summary)


class TerminalView:
    """Rewrites the last line of a terminal; Ctrl-C stops the run there."""

    stop_wanted = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._length = 0

    def show(self, state: LiveState) -> None:
        text = line_of(state)
        self._stream.write("\r" + text.ljust(self._length))
        self._stream.flush()
        self._length = len(text)

    def close(self, summary: LiveSummary) -> None:
        self._stream.write("\r" + " " * self._length + "\r")
        self._stream.flush()
        print(summary)


def line_of(state: LiveState) -> str:
    """All that fits in one line.

    >>> line_of(LiveState(1.5, 3, 10, "step", (), (), 2e6, ()))
    'step [#########.....................] 3/10  2 MB/s posted'
    """
    parts = [as_text((state.done, state.total, state.label or "step"))]
    times = [rank.step_s for rank in state.ranks if rank.step_s is not None]
    parts += [f"{seconds_text(max(times))} a step"] if times else []
    parts += [f"{curve.name} {curve.points[-1].value:.4g}" for curve in state.curves if curve.points]
    parts.append(f"{bytes_text(state.bytes_per_s)}/s posted")
    parts += [f"slow: rank {slow.rank} ({slow.ratio:.1f}×)" for slow in state.slow]
    waits = [f"rank {rank.rank} {rank.wait}" for rank in state.ranks if rank.wait and rank.wait.since_s > 1]
    return "  ".join(parts + waits[:1])


def view_for(live: Any) -> LiveView | None:
    """The view that `live` of `launch` means: none, the one for this place, or a view of the caller's own."""
    if isinstance(live, (bool, np.bool_)):
        return _VIEWS[this_place()]() if live else None
    if isinstance(live, type) or not all(hasattr(live, name) for name in ("show", "close", "stop_wanted")):
        raise InvalidInputError.because("live", live, "must be True or False, or a view of your own", "use live=True")
    return live


def _panel() -> LiveView:
    try:
        return pkgutil.resolve_name(PANEL)()
    except ImportError:  # without ipywidgets a notebook has the summary
        return SummaryOnly()


_VIEWS: dict[Place, Callable[[], LiveView]] = {
    Place.WATCHED_NOTEBOOK: _panel,
    Place.NOTEBOOK: SummaryOnly,
    Place.TERMINAL: lambda: TerminalView(sys.stderr),
    Place.FILE: SummaryOnly,
}
