"""Why one layout is faster than another: in words, from the seconds that each part of a step takes."""

from __future__ import annotations

from collections.abc import Callable

from vizkit.hardware.cluster import Cluster
from vizkit.layout import Layout
from vizkit.planner.prediction import AXES, Prediction
from vizkit.planner.traffic import group_of
from vizkit.transformer import Recompute
from vizkit.units import seconds_text

WORTH_SAYING = 0.15
"""Parts that differ by less than this share of the largest difference are left out."""
SAME = 0.0005
"""Steps that differ by less than this share are equally long."""
_MOST_PARTS = 3
_WHOLE = {"pp": "pipeline messages", "tp": "tensor-parallel communication", "cp": "keys and values on their way",
          "ep": "tokens on their way to experts", "dp": "gradients and parameters of replicas"}  # fmt: skip


def reason(first: Prediction, second: Prediction | None, cluster: Cluster) -> str:
    """Why `first` takes less time than `second`, the next best; with None, what it spends most on."""
    if second is None:
        return f"nothing else fits; {_spends(first)}"
    saved = {part: theirs - _parts(first)[part] for part, theirs in _parts(second).items()}
    largest = max(map(abs, saved.values()), default=0.0)
    if second.step_s <= first.step_s * (1 + SAME):
        return f"as fast as the next ({short(second.layout, first.layout)}), with {_memory(first, second)}"
    worth = sorted(
        (part for part in saved if abs(saved[part]) >= WORTH_SAYING * largest), key=lambda part: -abs(saved[part])
    )
    gains = [_because(part, saved[part], first, second, cluster) for part in worth if saved[part] > 0][:_MOST_PARTS]
    losses = [f"{seconds_text(-saved[part])} more of {_name(part)}" for part in worth if saved[part] < 0][:_MOST_PARTS]
    share = second.step_s / first.step_s - 1
    text = f"{share:.1%} faster than the next ({short(second.layout, first.layout)}): " + "; ".join(gains)
    return text + (f"; it pays {' and '.join(losses)}" if losses else "")


def short(layout: Layout, beside: Layout) -> str:
    """What distinguishes a layout from another one: "tp=4, pp=2"."""
    names = (
        "dp",
        "tp",
        "pp",
        "cp",
        "ep",
        "zero_stage",
        "sequence_parallel",
        "schedule",
        "local_stages",
        "microbatch",
        "recompute",
    )
    said = {"local_stages": "stages_per_rank"}
    differs = [name for name in names if getattr(layout, name) != getattr(beside, name)]
    return ", ".join(f"{said.get(name, name)}={getattr(layout, name)}" for name in differs) or "the same"


def _parts(prediction: Prediction) -> dict[str, float]:
    return {
        "matrix": prediction.matrix_s,
        "elementwise": prediction.elementwise_s,
        **prediction.exposed_s,
        "bubble": prediction.bubble_s,
        "optimizer": prediction.optimizer_s,
    }


def _name(part: str) -> str:
    names = {
        "matrix": "matrix products",
        "elementwise": "element by element work",
        "bubble": "bubble",
        "optimizer": "optimizer",
    }
    return names.get(part) or f"exposed {_WHOLE[part]}"


def _because(part: str, saved: float, first: Prediction, second: Prediction, cluster: Cluster) -> str:
    """What is saved, with the sizes that it follows from."""
    amount = f"{seconds_text(saved)} less of {_name(part)}"
    if part not in _SIZES:
        return amount
    mine, theirs = (_SIZES[part](prediction, cluster) for prediction in (first, second))
    ways = [Recompute.parse(found.layout.recompute).value for found in (first, second)]
    if part in ("matrix", "elementwise") and ways[0] != ways[1]:
        mine, theirs = f"{mine}, recompute={ways[0]},", f"{theirs}, recompute={ways[1]}"
    if mine == theirs:
        mine, theirs = _shares(first.layout), _shares(second.layout)
    return f"{amount} ({mine} against {theirs})" if mine != theirs else amount


def _shares(layout: Layout) -> str:
    """What else decides how much work the slowest rank has."""
    ends = f"pp={layout.pp}, whose last rank has the logits too" if layout.pp > 1 else "pp=1"
    return ends + "".join(f", {axis}={getattr(layout, axis)}" for axis in ("cp", "ep") if getattr(layout, axis) > 1)


def _shapes(prediction: Prediction, cluster: Cluster) -> str:
    """Sizes that decide how well matrix products run: rows, and the width that a rank has of a layer."""
    layout = prediction.layout
    rows = layout.microbatch * prediction.model.seq // layout.cp
    width = "all" if layout.tp == 1 else f"1/{layout.tp}"
    return f"{rows:,} rows by {width} of a layer's width"


def _norms(prediction: Prediction, cluster: Cluster) -> str:
    layout = prediction.layout
    if layout.tp == 1:
        return "tp=1"
    return f"norms {'split among' if layout.sequence_parallel else 'repeated on'} {layout.tp} ranks"


def _pipeline(prediction: Prediction, cluster: Cluster) -> str:
    layout = prediction.layout
    if layout.pp == 1:
        return "no pipeline"
    stages = f", {layout.local_stages} stages a rank" if layout.local_stages > 1 else ""
    return f"pp={layout.pp}, {layout.schedule}, {layout.num_microbatches} microbatches{stages}"


def _replicas(prediction: Prediction, cluster: Cluster) -> str:
    layout = prediction.layout
    return f"{layout.replicas:,} replica{'s' * (layout.replicas > 1)}, ZeRO-{layout.zero_stage}"


def _axis(axis: str) -> Callable[[Prediction, Cluster], str]:
    def said(prediction: Prediction, cluster: Cluster) -> str:
        stride, size = group_of(axis, prediction.layout)
        if size == 1 or cluster.num_nodes == 1:
            return f"{axis}={size}"
        inside = int(cluster.members_in_node(stride, size)) >= size
        return f"{axis}={size} {'inside a node' if inside else 'between nodes'}"

    return said


_SIZES: dict[str, Callable[[Prediction, Cluster], str]] = {
    "matrix": _shapes,
    "elementwise": _norms,
    "bubble": _pipeline,
    "pp": _pipeline,
    "dp": _replicas,
    **{axis: _axis(axis) for axis in ("tp", "cp", "ep")},
}
"""What decides each part."""


def _memory(first: Prediction, second: Prediction) -> str:
    return f"{first.memory_bytes / 1e9:.1f} GB a device against {second.memory_bytes / 1e9:.1f}"


def _spends(prediction: Prediction) -> str:
    parts = _parts(prediction)
    most = max(parts, key=lambda part: parts[part])
    return f"{parts[most] / prediction.step_s:.0%} of its step are {_name(most)}"


assert set(_WHOLE) == set(AXES)
