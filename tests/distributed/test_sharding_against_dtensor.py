"""Pieces and redistribution as `vizkit.sharding` states them are those of DTensor, on real ranks."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

import vizkit as vk
from vizkit.sharding import Placement, pieces, redistribution

Case = tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]
ELEMENT_BYTES = {torch.float32: 4, torch.float64: 8}


def mesh_of(sizes: dict[str, int]):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def torch_placements(texts: tuple[str, ...]) -> list:
    from torch.distributed.tensor import Partial, Replicate, Shard

    parsed = map(Placement.parse, texts)
    return [{"S": lambda p: Shard(p.dim), "R": lambda p: Replicate(), "P": lambda p: Partial(p.reduce_op)}[p.kind](p)
            for p in parsed]  # fmt: skip


def shard_all(sizes: dict[str, int], cases: list[tuple[tuple[int, ...], tuple[str, ...]]]) -> list[np.ndarray]:
    """What this rank holds of a tensor that counts 0, 1, 2, …, for each case."""
    from torch.distributed.tensor import distribute_tensor

    mesh = mesh_of(sizes)
    held = []
    for shape, placements in cases:
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        held.append(distribute_tensor(whole, mesh, torch_placements(placements)).to_local().numpy())
    return held


def redistribute_all(sizes: dict[str, int], cases: list[Case], dtype: torch.dtype) -> list[tuple[float, float]]:
    """Redistribute a tensor for each case, each in a span of its own; the values that come out, and what they must be.

    What goes in is this rank's piece of a tensor that counts, or its share of the sum where the placement is partial.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    mesh, outcome = mesh_of(sizes), []
    rank = torch.distributed.get_rank()
    for shape, before, after in cases:
        whole = torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)
        summands = np.prod([size for size, text in zip(sizes.values(), before, strict=True) if text.startswith("P")])
        local = whole[pieces(vk.Mesh(**sizes), shape, before).slices(rank)] / summands
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        specs = [DTensorSpec(mesh, tuple(torch_placements(side)), meta) for side in (before, after)]
        result = redistribute_local_tensor(
            DTensor(local.contiguous(), specs[0], requires_grad=False).to_local(), *specs
        )
        remaining = np.prod([size for size, text in zip(sizes.values(), after, strict=True) if text.startswith("P")])
        expected = whole[pieces(vk.Mesh(**sizes), shape, after).slices(rank)] / remaining
        outcome.append((tuple(result.shape) == tuple(expected.shape), bool(torch.allclose(result, expected))))
        torch.distributed.barrier()  # separates the cases in the record
    return outcome


SHAPES = [(8,), (5,), (1,), (7, 3), (2, 9), (6, 4, 5)]


def placements_for(shape: tuple[int, ...], num_axes: int) -> list[tuple[str, ...]]:
    each = ["R", *(f"S({dim})" for dim in range(len(shape)))]
    return list(itertools.product(each, repeat=num_axes))


@pytest.mark.parametrize(
    "sizes", [{"tp": 1}, {"tp": 2}, {"tp": 3}, {"tp": 4}, {"tp": 6}, {"dp": 2, "tp": 2}, {"dp": 3, "tp": 2},
              {"dp": 2, "cp": 1, "tp": 2}], ids=str,
)  # fmt: skip
def test_each_rank_holds_what_dtensor_gives_it(sizes: dict[str, int]):
    """Element for element, for every placement of every shape: uneven, fewer elements than ranks, one dim cut twice."""
    cases = [(shape, placed) for shape in SHAPES for placed in placements_for(shape, len(sizes))]
    mesh = vk.Mesh(**sizes)
    run = vk.launch(shard_all, sizes, cases, world_size=mesh.world_size, device="cpu", timeout_s=120)
    for number, (shape, placed) in enumerate(cases):
        whole = np.arange(np.prod(shape)).reshape(shape)
        stated = pieces(mesh, shape, placed)
        for rank in range(mesh.world_size):
            np.testing.assert_array_equal(
                run.results[rank][number], whole[stated.slices(rank)], err_msg=f"{shape} {placed} rank {rank}"
            )


ONE_AXIS = [("S(0)", "R"), ("S(1)", "R"), ("P", "R"), ("P", "S(0)"), ("P", "S(1)"), ("S(0)", "S(1)"), ("S(1)", "S(0)"),
            ("R", "S(0)"), ("R", "S(1)"), ("R", "P"), ("R", "R"), ("S(0)", "S(0)"), ("P(sum)", "P")]  # fmt: skip
TWO_AXES = [
    (before, after)
    for before in itertools.product(["R", "S(0)", "S(1)", "P"], repeat=2)
    for after in itertools.product(["R", "S(0)", "S(1)"], repeat=2)
]


def stated_collectives(mesh: vk.Mesh, case: Case, element_bytes: int) -> Counter:
    """(kind, group, payload) of each collective, one for each group of the axis."""
    shape, before, after = case
    found: Counter = Counter()
    for step in redistribution(mesh, shape, before, after, element_bytes=element_bytes, backend="gloo"):
        if step.kind is not None:
            found.update((step.kind.value, group, step.payload_bytes[group[0]]) for group in mesh.groups(step.axis))
    return found


def recorded_collectives(run: vk.Run) -> list[Counter]:
    """The same from the record, one for each stretch between two barriers of all ranks."""
    cases: list[dict] = []
    for rank in run.record.ranks:
        number, order = 0, Counter()
        for call in rank.calls:
            if call.kind is vk.SpanKind.BARRIER:
                number += 1
                continue
            while len(cases) <= number:
                cases.append({})
            key = (number, call.members, call.kind.value)
            order[key] += 1
            cases[number][(call.kind.value, call.members, order[key])] = call.payload_bytes
    return [Counter((kind, members, payload) for (kind, members, _), payload in case.items()) for case in cases]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("sizes", "shapes", "table"),
    [
        ({"tp": 1}, [(4, 6)], [((a,), (b,)) for a, b in ONE_AXIS]),
        ({"tp": 2}, [(4, 6), (5, 3), (1, 1)], [((a,), (b,)) for a, b in ONE_AXIS]),
        ({"tp": 3}, [(6, 9), (7, 4), (2, 5)], [((a,), (b,)) for a, b in ONE_AXIS]),
        ({"tp": 4}, [(8, 4), (9, 6), (3, 2)], [((a,), (b,)) for a, b in ONE_AXIS]),
        ({"dp": 2, "tp": 2}, [(8, 4), (5, 7), (3, 1)], TWO_AXES),
    ],
    ids=["1", "2", "3", "4", "2x2"],
)
def test_collectives_are_those_that_dtensor_runs(sizes: dict[str, int], shapes: list, table: list, dtype: torch.dtype):
    """For every pair of placements: kind, group and bytes of each collective in the record, padding included."""
    mesh = vk.Mesh(**sizes)
    cases = [(shape, before, after) for shape in shapes for before, after in table]
    run = vk.launch(redistribute_all, sizes, cases, dtype, world_size=mesh.world_size, device="cpu", timeout_s=120)
    recorded = recorded_collectives(run)
    recorded += [Counter()] * (len(cases) - len(recorded))
    for number, case in enumerate(cases):
        assert recorded[number] == stated_collectives(mesh, case, ELEMENT_BYTES[dtype]), case
        assert all(rank[number] == (True, True) for rank in run.results), case


def test_torch_placements_are_understood():
    """Torch's own objects are known by their names, without importing torch."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    parsed = [Placement.parse(placed) for placed in (Shard(1), Shard(-1), Replicate(), Partial(), Partial("max"))]
    assert list(map(str, parsed)) == ["S(1)", "S(-1)", "R", "P(sum)", "P(max)"]
