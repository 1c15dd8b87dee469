"""Meshes: named axes, groups along them, coordinates."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vizkit.errors import InvalidInputError
from vizkit.mesh import Mesh

NAMES = ("pp", "dp", "cp", "tp")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """One to four axes, some of size 1."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, 4))]
    return Mesh(**{name: draw(st.integers(1, 4)) for name in names})


def message(call: object) -> str:
    with pytest.raises(InvalidInputError) as caught:
        call()  # type: ignore[operator]
    return str(caught.value)


@pytest.mark.parametrize(
    ("axes", "along", "groups"),
    [
        ({"dp": 4}, ("dp",), [(0, 1, 2, 3)]),
        ({"dp": 2, "tp": 2}, ("tp",), [(0, 1), (2, 3)]),
        ({"dp": 2, "tp": 2}, ("dp",), [(0, 2), (1, 3)]),
        ({"dp": 2, "tp": 1}, ("tp",), [(0,), (1,)]),
        ({"pp": 2, "dp": 2, "tp": 2}, ("dp",), [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ({"pp": 2, "dp": 2, "tp": 2}, ("tp", "pp"), [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ({"pp": 2, "dp": 2, "tp": 2}, (), [(rank,) for rank in range(8)]),
    ],
)
def test_groups(axes: dict[str, int], along: tuple[str, ...], groups: list[tuple[int, ...]]) -> None:
    """Ranks count row by row: neighbours on the last axis are neighbours in number."""
    assert Mesh(**axes).groups(*along) == groups


@pytest.mark.parametrize(
    ("members", "axis"),
    [
        ((0, 1), "tp"),
        ((2, 0), "dp"),
        ((1, 5), "pp"),
        ((0, 1, 2, 3), "dp×tp"),
        ((0, 2, 4, 6), "pp×dp"),
        (tuple(range(8)), "pp×dp×tp"),
        ((0, 3), ""),
        ((0, 1, 2), ""),
        ((5,), ""),
        ((), ""),
    ],
)
def test_along_which_axis_a_group_speaks(members: tuple[int, ...], axis: str) -> None:
    assert Mesh(pp=2, dp=2, tp=2).axis_of(members) == axis


@given(meshes())
def test_coordinates_and_ranks_are_inverse(mesh: Mesh) -> None:
    """Every rank has coordinates of its own, within the axes."""
    for rank in range(mesh.world_size):
        coordinates = mesh.coordinates(rank)
        assert mesh.rank(**coordinates) == rank
        assert all(0 <= place < mesh.size(axis) for axis, place in coordinates.items())
        assert mesh.ranks[tuple(coordinates.values())] == rank


@given(meshes(), st.data())
def test_groups_are_a_partition_by_the_other_coordinates(mesh: Mesh, data: st.DataObject) -> None:
    """Each rank is in one group; members agree outside the axes; `axis_of` finds the axes again, but for size 1."""
    along = data.draw(st.lists(st.sampled_from(mesh.names), unique=True))
    groups = mesh.groups(*along)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    wide = "×".join(name for name in mesh.names if name in along and mesh.size(name) > 1)
    for group in groups:
        outside = [{a: p for a, p in mesh.coordinates(rank).items() if a not in along} for rank in group]
        assert all(place == outside[0] for place in outside)
        assert len(group) == math.prod(mesh.size(axis) for axis in along)
        assert mesh.axis_of(group) == wide
        for rank in group:
            if len(along) == 1:
                assert mesh.group(along[0], rank) == group


@given(meshes())
def test_a_mesh_survives_copies_and_pickles(mesh: Mesh) -> None:
    assert pickle.loads(pickle.dumps(mesh)) == copy.deepcopy(mesh) == mesh
    assert hash(pickle.loads(pickle.dumps(mesh))) == hash(mesh)
    assert eval(repr(mesh), {"Mesh": Mesh}) == mesh


@given(meshes(), st.integers(1, 64))
def test_the_remedy_for_a_wrong_world_size_is_right(mesh: Mesh, world_size: int) -> None:
    """The mesh that the message suggests has the ranks that there are."""
    if world_size == mesh.world_size:
        mesh.check_world_size(world_size)
        return
    suggested = message(lambda: mesh.check_world_size(world_size)).rpartition(", or ")[2]
    eval(suggested, {"Mesh": Mesh}).check_world_size(world_size)


def test_the_order_of_axes_matters_to_equality() -> None:
    assert Mesh(dp=2, tp=2) != Mesh(tp=2, dp=2)
    assert Mesh(dp=2) != {"dp": 2}


def test_a_device_mesh_becomes_a_mesh() -> None:
    """Anything with the ranks and names that torch's `DeviceMesh` has; a `Mesh` stays itself."""
    device_mesh = SimpleNamespace(mesh=np.arange(6).reshape(2, 3), mesh_dim_names=("dp", "tp"))
    assert Mesh.of(device_mesh) == Mesh(dp=2, tp=3)
    mesh = Mesh(dp=2)
    assert Mesh.of(mesh) is mesh


def test_ranks_may_be_numpys() -> None:
    assert Mesh(dp=np.int64(2), tp=2).coordinates(np.int32(3)) == {"dp": 1, "tp": 1}
    assert Mesh(dp=2, tp=2).rank(dp=np.int64(1)) == 2


@pytest.mark.parametrize("change", [lambda mesh: setattr(mesh, "names", ()), lambda mesh: delattr(mesh, "sizes")])
def test_a_mesh_does_not_change(change: object) -> None:
    with pytest.raises(AttributeError, match="a Mesh does not change; make another one"):
        change(Mesh(dp=2))  # type: ignore[operator]


MESH = Mesh(dp=2, tp=2)
SUBMESH = SimpleNamespace(mesh=np.array([2, 3]), mesh_dim_names=("tp",))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: Mesh(), "axes={}: a mesh has at least one axis; use Mesh(dp=4)"),
        (lambda: Mesh(dp=0), "dp=0: must be a whole number, at least 1; use dp=1"),
        (lambda: Mesh(dp=2.5), "dp=2.5: must be a whole number, at least 1; use dp=2"),
        (lambda: Mesh(**{"dp×tp": 2}), "axis='dp×tp': a name has letters, no space and no ×; use a name like dp"),
        (lambda: Mesh(**{"1": 2}), "axis='1': a name has letters, no space and no ×; use a name like dp"),
        (lambda: Mesh(**{"d p": 2}), "axis='d p': a name has letters, no space and no ×; use a name like dp"),
        (
            lambda: Mesh(dp=2**20, tp=2**5),
            "axes={'dp': 1048576, 'tp': 32}: make 33,554,432 ranks, over 16,777,216; use smaller axes",
        ),
        (lambda: MESH.axis_of(3), "members=3: must be several ranks; use [0, 1]"),
        (lambda: MESH.axis_of([0, [1]]), "rank=[1]: Mesh(dp=2, tp=2) has ranks 0 to 3; use one from 0 to 3"),
        (
            lambda: MESH.groups(np.array(["dp", "tp"])),
            "axis=array(['dp', 'tp'], dtype='<U2'): Mesh(dp=2, tp=2) has no such axis; use dp or tp",
        ),
        (lambda: MESH.size("pp"), "axis='pp': Mesh(dp=2, tp=2) has no such axis; use dp or tp"),
        (lambda: MESH.coordinates(4), "rank=4: Mesh(dp=2, tp=2) has ranks 0 to 3; use one from 0 to 3"),
        (lambda: MESH.coordinates(True), "rank=True: Mesh(dp=2, tp=2) has ranks 0 to 3; use one from 0 to 3"),
        (lambda: MESH.axis_of([0, -1]), "rank=-1: Mesh(dp=2, tp=2) has ranks 0 to 3; use one from 0 to 3"),
        (lambda: MESH.rank(tp=2), "tp=2: Mesh(dp=2, tp=2) has places 0 to 1 there; use tp=0"),
        (lambda: MESH.rank(tp=0.5), "tp=0.5: Mesh(dp=2, tp=2) has places 0 to 1 there; use tp=0"),
        (
            lambda: MESH.check_world_size(6),
            "world_size=6: Mesh(dp=2, tp=2) needs 2 × 2 = 4 ranks; use world_size=4, or Mesh(dp=2, tp=3)",
        ),
        (
            lambda: Mesh(dp=4).check_world_size(3),
            "world_size=3: Mesh(dp=4) needs 4 ranks; use world_size=4, or Mesh(dp=3)",
        ),
        (lambda: MESH.check_world_size(0), "world_size=0: must be a whole number, at least 1; use world_size=4"),
        (lambda: MESH.check_world_size("4"), "world_size='4': must be a whole number, at least 1; use world_size=4"),
        (
            lambda: Mesh.of({"dp": 2}),
            "mesh='dict': must be a vk.Mesh or a DeviceMesh with mesh_dim_names; use vk.Mesh(dp=4)",
        ),
        (lambda: Mesh.of(SUBMESH), "mesh=[2, 3]: must hold ranks 0 to 1, row by row; use init_device_mesh"),
    ],
)
def test_what_is_refused(call: object, expected: str) -> None:
    """Value, rule and remedy."""
    assert message(call) == expected
