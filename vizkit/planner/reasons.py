"""Why one layout is faster than another: in words, from the seconds that each part of a step takes."""

from __future__ import annotations

from vizkit.hardware.cluster import Cluster
from vizkit.layout import Layout
from vizkit.planner.prediction import AXES, Prediction
from vizkit.transformer import Recompute
from vizkit.units import seconds_text

WORTH_SAYING = 0.15
"""Parts that differ by less than this share of the largest difference are left out."""
_MOST_PARTS = 3
_WHOLE = {"pp": "pipeline messages", "tp": "tensor-parallel communication", "cp": "keys and values on their way",
          "ep": "tokens on their way to experts", "dp": "gradients and parameters of replicas"}  # fmt: skip


def reason(first: Prediction, second: Prediction | None, cluster: Cluster) -> str:
    """Why `first` takes less time than `second`, the next best; with None, what it spends most on."""
    if second is None:
        return f"nothing else fits; {_spends(first)}"
    saved = {part: theirs - _parts(first)[part] for part, theirs in _parts(second).items()}
    largest = max(map(abs, saved.values()), default=0.0)
    if largest <= 1e-6 * first.step_s:
        return f"as fast as the next ({short(second.layout, first.layout)}), with {_memory(first, second)}"
    worth = sorted((part for part in saved if abs(saved[part]) >= WORTH_SAYING * largest), key=lambda part: -abs(saved[part]))
    gains = [_because(part, saved[part], first, second, cluster) for part in worth if saved[part] > 0][:_MOST_PARTS]
    losses = [f"{seconds_text(-saved[part])} more of {_name(part)}" for part in worth if saved[part] < 0][:_MOST_PARTS]
    share = second.step_s / first.step_s - 1
    text = f"{share:.1%} faster than the next ({short(second.layout, first.layout)}): " + "; ".join(gains)
    return text + (f"; it pays {' and '.join(losses)}" if losses else "")


def short(layout: Layout, beside: Layout) -> str:
    """What distinguishes a layout from another one: "tp=4, pp=2"."""
    names = ("dp", "tp", "pp", "cp", "ep", "zero_stage", "sequence_parallel", "schedule", "local_stages", "microbatch", "recompute")
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
    names = {"matrix": "matrix products", "elementwise": "element by element work", "bubble": "bubble", "optimizer": "optimizer"}
    return names.get(part) or f"exposed {_WHOLE[part]}"


def _because(part: str, saved: float, first: Prediction, second: Prediction, cluster: Cluster) -> str:
    """What is saved, with the sizes that it follows from."""
    mine, theirs = first.layout, second.layout
    amount = f"{seconds_text(saved)} less of {_name(part)}"
    if part == "bubble":
        return f"{amount} ({_pipeline(mine)} against {_pipeline(theirs)})"
    if part in ("tp", "cp", "ep"):
        size, other = getattr(mine, part), getattr(theirs, part)
        where = f", {_where(part, mine, cluster)}" if size > 1 else ""
        return f"{amount} ({part}={size} against {other}{where})"
    if part == "dp":
        return f"{amount} ({mine.replicas} replicas, ZeRO-{mine.zero_stage}, against {theirs.replicas}, ZeRO-{theirs.zero_stage})"
    if part == "pp":
        return f"{amount} ({_pipeline(mine)} against {_pipeline(theirs)})"
    if part == "matrix":
        shapes, others = _shapes(first), _shapes(second)
        if shapes == others:
            return f"{amount} (attention in blocks of {first.model.seq // mine.cp:,} tokens against " + (
                f"{second.model.seq // theirs.cp:,})"
            )
        return f"{amount} ({shapes} against {others})"
    if part == "elementwise":
        return f"{amount} ({_elementwise(mine)} against {_elementwise(theirs)})"
    return amount


def _pipeline(layout: Layout) -> str:
    if layout.pp == 1:
        return "no pipeline"
    stages = f", {layout.local_stages} stages a rank" if layout.local_stages > 1 else ""
    return f"pp={layout.pp} with {layout.num_microbatches} microbatches{stages}"


def _shapes(prediction: Prediction) -> str:
    """Sizes that decide how well matrix products run: rows, and the width that a rank has of a layer."""
    layout, model = prediction.layout, prediction.model
    rows = layout.microbatch * model.seq // layout.cp
    width = "a whole layer's" if layout.tp == 1 else f"1/{layout.tp} of a layer's"
    again = "" if layout.recompute is Recompute.NONE else f", recompute={Recompute.parse(layout.recompute).value}"
    return f"products of {rows:,} rows with {width} width{again}"


def _elementwise(layout: Layout) -> str:
    split = "split among" if layout.sequence_parallel else "repeated on each of"
    return f"norms {split} {layout.tp} ranks, recompute={Recompute.parse(layout.recompute).value}" if layout.tp > 1 else (
        f"recompute={Recompute.parse(layout.recompute).value}"
    )


def _where(axis: str, layout: Layout, cluster: Cluster) -> str:
    stride, size = {"tp": (1, layout.tp), "cp": (layout.tp, layout.cp), "ep": (layout.tp, layout.ep)}[axis]
    inside = int(cluster.members_in_node(stride, size)) >= size
    return "inside a node" if inside else "between nodes"


def _memory(first: Prediction, second: Prediction) -> str:
    return f"{first.memory_bytes / 1e9:.1f} GB a device against {second.memory_bytes / 1e9:.1f}"


def _spends(prediction: Prediction) -> str:
    parts = _parts(prediction)
    most = max(parts, key=lambda part: parts[part])
    return f"{parts[most] / prediction.step_s:.0%} of its step are {_name(most)}"


assert set(_WHOLE) == set(AXES)
