"""Ranks all layouts of a model on a cluster by how long a step takes, and drops those that do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.hardware.cluster import Cluster
from vizkit.memory.states import Precision
from vizkit.planner.choices import Found, Plan
from vizkit.planner.program import Program
from vizkit.planner.remedies import nearest_miss, nothing_divides, remedies
from vizkit.planner.space import MESH, Space
from vizkit.planner.stages import check_finite, check_precision, check_sizes
from vizkit.planner.steps import steps
from vizkit.sizes import whole_number
from vizkit.transformer import Recompute, Transformer, check_model

MOST_POINTS = 2000
"""Of a plan's sample, of which each chunk of layouts gives a part."""
_POINTS_A_CHUNK = 400


def plan(
    model: Transformer,
    cluster: Cluster,
    global_batch: int,
    *,
    seq: int | None = None,
    schedules: Sequence[str] = ("1F1B", "Interleaved1F1B", "ZB-H1"),
    zero_stages: Sequence[int] = (0, 1, 2, 3),
    recompute: Sequence[str | Recompute] = ("none", "selective", "full"),
    sequence_parallel: Sequence[bool] = (False, True),
    tp: Sequence[int] | None = None,
    pp: Sequence[int] | None = None,
    cp: Sequence[int] | None = None,
    ep: Sequence[int] | None = None,
    microbatches: Sequence[int] | None = None,
    stages_per_rank: Sequence[int] | None = None,
    context_by: str = "ring",
    precision: str | Precision = "mixed_adam",
    program: Program | None = None,
) -> Plan:
    """Which layouts of all the cluster's devices train this model fastest: a `Plan`, ranked, with reasons.

    Each dp × tp × pp × cp × ep is tried with each ZeRO stage, schedule, number of stages a rank, microbatch (to 32) and
    way to recompute, by `predict`'s formulas; a plan has one choice for each dp × tp × pp × cp × ep, its fastest that
    fits. Sequences restrict what is tried; None stands for all that divide, of cp those that leave 4,096 tokens a rank.
    `global_batch` are sequences a step, `seq` their tokens (None: the model's). Raises `InvalidInputError` for values
    that cannot be, and where no layout uses all devices. Where none fits the plan is empty, and says what would fit.

    >>> from vizkit.hardware import dgx_a100
    >>> gpt = Transformer(num_layers=36, hidden=4096, heads=32, vocab=51200, seq=2048)
    >>> found = plan(gpt, dgx_a100(num_nodes=1), global_batch=64, zero_stages=[1], recompute=["selective"])
    >>> found.best.layout.world_size, found.best.prediction.fits
    (8, True)
    """
    check_model(model)
    if not isinstance(cluster, Cluster):
        raise InvalidInputError.because("cluster", cluster, "must be a Cluster", "use vk.hardware.dgx_a100()")
    program = Program() if program is None else program
    if not isinstance(program, Program):
        raise InvalidInputError.because("program", program, "must be a Program", "use Program()")
    batch = whole_number("global_batch", global_batch)
    if seq is not None:
        model = dataclasses.replace(model, seq=whole_number("seq", seq))
    check_sizes(model, batch)
    check_precision(precision)
    space = Space(
        schedules=schedules,
        zero_stages=zero_stages,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        context_by=context_by,
        precision=precision,
    )
    if model.experts is None and space.ep is not None and 1 not in space.ep:
        raise InvalidInputError.because("ep", list(space.ep), "the model has no experts", "use ep=[1], or leave it out")
    limit = cluster.device.memory_bytes * (1 - program.reserved_share)
    considered = fitting = 0
    missed: list[Found] = []
    best: list[Found] = []
    fronts: list[Found] = []
    samples: list[Found] = []
    for rows in space.chunks(model, cluster.num_devices, batch):
        found = Found(rows, steps(model, rows, cluster, program))
        check_finite(found.steps.step_s, cluster)
        considered += len(found)
        fits = found.steps.memory_bytes <= limit
        missed += [fastest_first(found.where(~fits)).where(np.arange(1))] if not fits.all() else []
        found = found.where(fits)
        fitting += len(found)
        if len(found):
            found = fastest_first(found)
            best.append(found.where(np.sort(np.unique(found.rows.table[:, :MESH], axis=0, return_index=True)[1])))
            fronts.append(pareto_front(found))
            samples.append(found.where(_spread(len(found), _POINTS_A_CHUNK)))
    if not considered:
        raise nothing_divides(model, cluster, batch, space)
    ranked = fastest_first(Found.join(best)) if best else None
    if ranked is None:
        advice = remedies(model, cluster, batch, space, program, limit)
    else:
        advice = nearest_miss(fastest_first(Found.join(missed)), ranked, limit) if missed else ()
    front = pareto_front(Found.join(fronts)) if fronts else None
    sample = Found.join(samples) if samples else None
    if sample is not None:
        sample = sample.where(_spread(len(sample), MOST_POINTS))
    return Plan(model, cluster, batch, program, considered, fitting, advice, ranked, front, sample)


def fastest_first(found: Found) -> Found:
    """In order of time; of layouts that are equally fast, the one in less memory first, then the lower ZeRO stage."""
    taken = found.steps
    return found.where(np.lexsort((found.rows.zero_stage, taken.memory_bytes, taken.step_s)))


def pareto_front(found: Found) -> Found:
    """Layouts than which none takes less memory and as little time, in order of memory."""
    taken = found.steps
    order = np.lexsort((taken.step_s, taken.memory_bytes))
    step_s = taken.step_s[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(step_s)[:-1]])
    return found.where(order[step_s < before])


def _spread(length: int, most: int) -> np.ndarray:
    """Positions, evenly spread."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).astype(int))
