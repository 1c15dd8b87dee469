"""A picture, as data and layout in plain dicts, in Plotly's widget: made once, then changed in place."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import plotly.graph_objects as go

from vizkit.figures.interactive import as_widget


def widget_of(picture: dict[str, Any]) -> go.FigureWidget:
    """A widget that shows this picture."""
    return as_widget(go.Figure(picture))


def json_of(picture: dict[str, Any]) -> dict[str, Any]:
    """The picture as Plotly's renderers take it."""
    content: dict[str, Any] = json.loads(go.Figure(picture).to_json())
    return content


def redraw(widget: go.FigureWidget, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Make `widget`, which shows `before`, show `after`, and send no more than what differs."""
    if [_place(trace) for trace in before["data"]] == [_place(trace) for trace in after["data"]]:
        for changes in _alike(zip(widget.data, before["data"], after["data"], strict=True)):
            with widget.batch_update():
                for shown, new, names in changes:
                    _assign(shown, new, names)
        with widget.batch_update():
            _assign(widget.layout, after["layout"], _changed(before["layout"], after["layout"]))
        return
    widget.data = []
    with widget.batch_update():
        _assign(widget.layout, after["layout"], _changed(before["layout"], after["layout"]))
    widget.add_traces(after["data"])


Change = tuple[Any, dict[str, Any], frozenset[str]]
"""A trace as the widget has it, as it should be, and the properties that differ."""


def _alike(traces: Iterable[tuple[Any, dict[str, Any], dict[str, Any]]]) -> Iterable[list[Change]]:
    """Changes by kind of trace and properties: in one message to the page, a property that only some of its traces
    change is lost in the others."""
    groups: dict[tuple[str, frozenset[str]], list[Change]] = {}
    for shown, old, new in traces:
        if names := _changed(old, new):
            groups.setdefault((str(new.get("type")), names), []).append((shown, new, names))
    return groups.values()


def _place(trace: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(trace.get(key) for key in ("type", "name", "xaxis", "yaxis"))


def _changed(old: dict[str, Any], new: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for name in old.keys() | new.keys() if not _same(old.get(name), new.get(name)))


def _assign(target: Any, new: dict[str, Any], names: Iterable[str]) -> None:
    for name in sorted(names):
        target[name] = new.get(name)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    return bool(a == b)
