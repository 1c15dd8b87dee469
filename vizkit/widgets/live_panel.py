"""The live view in a notebook: a panel that changes while the cell runs, with a button that stops the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets
from IPython.display import display

from vizkit.runtime.live_state import LiveState, LiveSummary
from vizkit.widgets import live_html


class StopButton(anywidget.AnyWidget):
    """A button whose press is noticed while the cell runs: see `heard_while_a_cell_runs`."""

    _esm = Path(__file__).with_name("live_stop.js")
    pressed = traitlets.Bool(False).tag(sync=True)


class LivePanel:
    """Shows a run while it goes on; `stop_wanted` once Stop was pressed. In the end only the summary is left.

    A refresh sends what has changed, a few kB, so that a slow link keeps up.
    """

    def __init__(self) -> None:
        self.stop_wanted = False
        self._handle: Any = None

    def _open(self) -> None:
        """Only once there is something to show: a run that does not begin leaves no panel."""
        self.stop = StopButton()
        self.stop.observe(self._pressed, "pressed")
        self.alert, self.body = ipywidgets.HTML(), ipywidgets.HTML()
        style = ipywidgets.HTML(live_html.STYLE)
        self.panel = ipywidgets.VBox([style, self.stop, self.alert, self.body])
        self._handle = display(self.panel, display_id=True)
        heard_while_a_cell_runs(self.stop)

    def _pressed(self, change: dict[str, Any]) -> None:
        """Comes on another thread than the launch."""
        self.stop_wanted = bool(change["new"])
        self.stop.send("heard")

    def show(self, state: LiveState) -> None:
        if self._handle is None:
            self._open()
        self.alert.value = live_html.alert(state)  # a value that is the same is not sent
        self.body.value = live_html.body(state)

    def close(self, summary: LiveSummary) -> None:
        words = {"text/plain": str(summary)}
        if self._handle is None:
            display(words, raw=True)
            return
        self._handle.update(words, raw=True)
        for widget in (*self.panel.children, self.panel):
            for part in (getattr(widget, "style", None), widget.layout, widget):  # each is a model of its own
                if part is not None:
                    part.close()


def heard_while_a_cell_runs(widget: ipywidgets.DOMWidget) -> None:
    """Let what the page tells `widget` be handled at once.

    JupyterLab sends it to a subshell, a thread of the kernel beside the one that runs the cell. But ipykernel 7.4 sends
    it on to the thread that spoke to the page last, which is the one that is busy; forgotten, the subshell has it.
    Other kernels have no such note, and `live_stop.js` interrupts the kernel where nobody answers a press.
    """
    vars(widget.comm).pop("_reply_subshell_id", None)
