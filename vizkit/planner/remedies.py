"""What would make a model fit, where nothing does: tried out, not guessed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.hardware.cluster import Cluster
from vizkit.planner.choices import Found
from vizkit.planner.places import memory_bytes
from vizkit.planner.program import Program
from vizkit.planner.reasons import short
from vizkit.planner.space import MESH, Space
from vizkit.schedules.recipe import MOST_PASSES
from vizkit.transformer import Transformer
from vizkit.units import bytes_text, seconds_text

MOST_DOUBLINGS = 20
"""Of the number of devices, to look for one that suffices: up to a million times as many."""
_MOST_LAYOUTS = 200_000
"""Looked at for each remedy."""


def smallest_bytes(model: Transformer, space: Space, num_devices: int, global_batch: int, program: Program) -> float:
    """Bytes a device of the layout that needs least; infinite where there is none."""
    least, seen = np.inf, 0
    for rows in space.chunks(model, num_devices, global_batch):
        least = min(least, float(memory_bytes(model, rows, program.fused_attention).min()))
        seen += len(rows)
        if seen > _MOST_LAYOUTS:
            break
    return least


def remedies(
    model: Transformer, cluster: Cluster, global_batch: int, space: Space, program: Program, limit_bytes: float
) -> tuple[str, ...]:
    """What would make the model fit into `limit_bytes` a device, and what it needs as it is."""
    least = smallest_bytes(model, space, cluster.num_devices, global_batch, program)
    said = [
        f"the layout that needs least takes {bytes_text(least)} a device, and {bytes_text(limit_bytes)} of "
        f"{bytes_text(cluster.device.memory_bytes)} may be used"
    ]
    for what, wider in _wider(space):
        found = smallest_bytes(model, wider, cluster.num_devices, global_batch, program)
        if found <= limit_bytes:
            said.append(f"it fits with {what}: {bytes_text(found)} a device")
    said += _more_devices(model, cluster, global_batch, space, program, limit_bytes)
    reserved = 1 - program.reserved_share
    said.append(f"it fits on the same number of devices where each has {bytes_text(least / reserved)}")
    return tuple(said)


def nearest_miss(missed: Found, ranked: Found, limit_bytes: float) -> tuple[str, ...]:
    """What the first of `missed` lacks, if it is faster than all that fit, and which layout of its mesh does fit."""
    rows, lacking = missed.rows, float(missed.steps.memory_bytes[0]) - limit_bytes
    seconds, best_s = float(missed.steps.step_s[0]), float(ranked.steps.step_s[0])
    if seconds >= best_s:
        return ()
    layout = rows.layout(0)
    said = (
        f"the fastest that does not fit ({short(layout, ranked.rows.layout(0))}) would take {seconds_text(seconds)} a "
        f"step, {1 - seconds / best_s:.1%} less than the first, and lacks {bytes_text(lacking)} a device"
    )
    same = np.flatnonzero((ranked.rows.table[:, :MESH] == rows.table[0, :MESH]).all(axis=1))
    if len(same):
        other = ranked.rows.layout(int(same[0]))
        said += (
            f"; of its dp × tp × pp × cp × ep the fastest that fits ({short(other, layout)}) takes "
            f"{seconds_text(float(ranked.steps.step_s[same[0]]))}"
        )
    return (said,)


def _wider(space: Space) -> Iterator[tuple[str, Space]]:
    """The same space with one restriction less."""
    replace = dataclasses.replace
    wider = {
        "ZeRO-3": replace(space, zero_stages=(0, 1, 2, 3)),
        "recompute=full": replace(space, recompute=("none", "selective", "full")),
        "sequence parallelism": replace(space, sequence_parallel=(False, True)),
        "other sizes of tp": replace(space, tp=None),
        "other sizes of pp": replace(space, pp=None),
        "other sizes of cp": replace(space, cp=None),
        "other sizes of ep": replace(space, ep=None),
        "other microbatches": replace(space, microbatches=None),
    }
    return ((what, other) for what, other in wider.items() if other != space)


def _more_devices(
    model: Transformer, cluster: Cluster, global_batch: int, space: Space, program: Program, limit_bytes: float
) -> Iterator[str]:
    """The fewest devices, doubled and doubled again, on which it fits."""
    for doubling in range(1, MOST_DOUBLINGS + 1):
        number = cluster.num_devices * 2**doubling
        needs = smallest_bytes(model, space, number, global_batch, program)
        if needs <= limit_bytes:
            yield f"it fits on {number:,} devices: {bytes_text(needs)} a device"
            return
        if np.isinf(needs):
            break
    yield f"no doubling of the {cluster.num_devices:,} devices that this model and batch can be divided among suffices"


def nothing_divides(model: Transformer, cluster: Cluster, global_batch: int, space: Space) -> InvalidInputError:
    """For a number of devices that no layout uses whole: the nearest numbers that one does, and the batches."""
    number = cluster.num_devices

    def works(devices: int, batch: int) -> bool:
        return not space.is_empty(model, devices, batch)

    near = _nearest(number, lambda devices: works(devices, global_batch))
    batches = _nearest(global_batch, lambda batch: works(number, batch), scale=number)
    remedy = [f"{' or '.join(map(str, near))} devices"] if near else []
    remedy += [f"a global_batch of {' or '.join(map(str, batches))}"] if batches else []
    use = f"use {', or '.join(remedy)}" if remedy else "allow more sizes, or change the batch"
    if next(space.meshes(model, number, global_batch), None) is not None:
        return InvalidInputError.because(
            "global_batch",
            global_batch,
            f"what a replica gets of it has to be whole microbatches of a size that is allowed, at most "
            f"{MOST_PASSES:,} a step with those of other stages",
            use,
        )
    return InvalidInputError.because(
        "cluster",
        number,
        f"devices cannot be shared out: dp has to divide global_batch={global_batch}, tp the heads, pp the "
        f"{model.num_layers} layers, cp the sequence, within what is allowed",
        use,
    )


def _nearest(value: int, works: Callable[[int], bool], scale: int = 1) -> list[int]:
    """The nearest below and above that work, within a few hundred, or a few multiples of the scale."""
    reach = 256
    multiple = value - value % scale
    below = [*range(value - 1, max(value - reach, 0), -1)] if scale == 1 else [multiple, multiple - scale]
    above = [*range(value + 1, value + reach)] if scale == 1 else [multiple + scale, multiple + 2 * scale]
    found = (next((n for n in numbers if n > 0 and n != value and works(n)), None) for numbers in (below, above))
    return [number for number in found if number]
