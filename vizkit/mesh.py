"""A device mesh as data: ranks in a grid whose axes are named, and the groups that speak along each axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vizkit.errors import InvalidInputError
from vizkit.sizes import is_whole, whole_number

JOIN = "×"
"""Between the names of axes along which a group speaks together."""
MOST_RANKS = 2**24
"""A mesh lists its ranks, in 8 bytes each."""


class Mesh:
    """`Mesh(dp=2, tp=4)`: 8 ranks, the last axis varies fastest, as in `torch.distributed.init_device_mesh`.

    `names` and `sizes` are the axes, outermost first; an axis of size 1 is fine. Raises `InvalidInputError` without an
    axis, for names without a letter, with spaces or with "×", which joins names, for sizes below 1, and for over 16
    million ranks.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> mesh.world_size, mesh.groups("tp"), mesh.coordinates(6)
    (8, [(0, 1, 2, 3), (4, 5, 6, 7)], {'dp': 1, 'tp': 2})
    """

    __slots__ = ("names", "sizes")

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, /, **axes: int) -> None:
        if not axes:
            raise InvalidInputError.because("axes", axes, "a mesh has at least one axis", "use Mesh(dp=4)")
        for name in axes:
            if not any(map(str.isalpha, name)) or JOIN in name or len(name.split()) != 1 or not name.isprintable():
                raise InvalidInputError.because(
                    "axis", name, f"a name has letters, no space and no {JOIN}", "use a name like dp"
                )
        object.__setattr__(self, "names", tuple(axes))
        object.__setattr__(self, "sizes", tuple(whole_number(name, size) for name, size in axes.items()))
        if self.world_size > MOST_RANKS:
            raise InvalidInputError.because(
                "axes", axes, f"make {self.world_size:,} ranks, over {MOST_RANKS:,}", "use smaller axes"
            )

    @classmethod
    def of(cls, mesh: Mesh | object) -> Mesh:
        """The mesh itself, or the axes of a `torch.distributed.DeviceMesh`, which counts ranks row by row.

        Raises `InvalidInputError` for anything else, and for a device mesh without names or with ranks in other order.
        """
        if isinstance(mesh, Mesh):
            return mesh
        ranks, names = getattr(mesh, "mesh", None), getattr(mesh, "mesh_dim_names", None)
        if ranks is None or not names:
            raise InvalidInputError.because(
                "mesh",
                type(mesh).__name__,
                "must be a vk.Mesh or a DeviceMesh with mesh_dim_names",
                "use vk.Mesh(dp=4)",
            )
        found = np.asarray(ranks.tolist())
        if found.ravel().tolist() != list(range(found.size)):
            raise InvalidInputError.because(
                "mesh", found.tolist(), f"must hold ranks 0 to {found.size - 1}, row by row", "use init_device_mesh"
            )
        return cls(**dict(zip(names, found.shape, strict=True)))

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def axes(self) -> dict[str, int]:
        """Size by name, outermost first."""
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def ranks(self) -> np.ndarray:
        """All ranks, in the shape of the mesh."""
        return np.arange(self.world_size).reshape(self.sizes)

    def size(self, axis: str) -> int:
        """Ranks along an axis; raises `InvalidInputError` for an unknown one."""
        return self.sizes[self._position(axis)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis; raises `InvalidInputError` for a rank outside."""
        self._check_rank(rank)
        return dict(zip(self.names, (int(place) for place in np.unravel_index(rank, self.sizes)), strict=True))

    def rank(self, /, **coordinates: int) -> int:
        """The rank at these coordinates; an axis that is not given counts as 0.

        >>> Mesh(dp=2, tp=4).rank(dp=1, tp=2)
        6
        """
        places = [0] * len(self.sizes)
        for axis, place in coordinates.items():
            position = self._position(axis)
            if not is_whole(place) or not 0 <= place < self.sizes[position]:
                raise InvalidInputError.because(
                    axis, place, f"{self} has places 0 to {self.sizes[position] - 1} there", f"use {axis}=0"
                )
            places[position] = place
        return int(np.ravel_multi_index(places, self.sizes))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """The groups of ranks that differ only along these axes, each in the order of ranks; no axis: each alone.

        >>> Mesh(dp=2, tp=2).groups("dp"), Mesh(dp=2, tp=2).groups("dp", "tp")
        ([(0, 2), (1, 3)], [(0, 1, 2, 3)])
        """
        along = sorted({self._position(axis) for axis in axes})
        across = [position for position in range(len(self.sizes)) if position not in along]
        moved = self.ranks.transpose(across + along)
        size = math.prod(self.sizes[position] for position in along)
        return [tuple(row) for row in moved.reshape(-1, size).tolist()]

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` speaks with along an axis, itself among them."""
        places: list[int | slice] = list(self.coordinates(rank).values())
        places[self._position(axis)] = slice(None)
        return tuple(self.ranks[tuple(places)].tolist())

    def axis_of(self, members: Sequence[int]) -> str:
        """Along which axis these ranks speak: its name, several joined by "×", or "" where they follow none.

        Axes of size 1 are left out; one rank alone speaks along none. Raises `InvalidInputError` for a rank outside.

        >>> mesh = Mesh(dp=2, tp=2)
        >>> mesh.axis_of([1, 3]), mesh.axis_of([0, 1, 2, 3]), mesh.axis_of([0, 3])
        ('dp', 'dp×tp', '')
        """
        try:
            members = list(members)
        except TypeError:
            raise InvalidInputError.because("members", members, "must be several ranks", "use [0, 1]") from None
        for rank in members:
            self._check_rank(rank)
        places = np.array(np.unravel_index(np.array(sorted(members), np.int64), self.sizes)).T
        differing = [p for p in range(len(self.sizes)) if len(places) and (places[:, p] != places[0, p]).any()]
        if not differing or len(set(members)) != math.prod(self.sizes[p] for p in differing):
            return ""
        return JOIN.join(self.names[p] for p in differing)

    def check_world_size(self, world_size: int) -> None:
        """Raises `InvalidInputError` where the mesh does not hold exactly these ranks.

        >>> Mesh(dp=3, tp=2).check_world_size(8)
        Traceback (most recent call last):
        vizkit.errors.InvalidInputError: world_size=8: Mesh(dp=3, tp=2) needs 3 × 2 = 6 ranks; use world_size=6, or ...
        """
        if not is_whole(world_size) or world_size < 1:
            raise InvalidInputError.because(
                "world_size", world_size, "must be a whole number, at least 1", f"use world_size={self.world_size}"
            )
        if world_size != self.world_size:
            product = " × ".join(map(str, self.sizes))
            raise InvalidInputError.because(
                "world_size",
                world_size,
                f"{self} needs {product}{f' = {self.world_size}' * (len(self.sizes) > 1)} ranks",
                f"use world_size={self.world_size}, or {self._nearest(world_size)}",
            )

    def _nearest(self, world_size: int) -> Mesh:
        """A mesh of `world_size` ranks: with one axis of another size, else with all ranks on the outermost axis."""
        for position, name in reversed(list(enumerate(self.names))):
            others = self.world_size // self.sizes[position]
            if world_size % others == 0:
                return Mesh(**{**self.axes, name: world_size // others})
        return Mesh(**{name: world_size if name == self.names[0] else 1 for name in self.names})

    def _check_rank(self, rank: object) -> None:
        if not is_whole(rank) or not 0 <= rank < self.world_size:
            last = self.world_size - 1
            raise InvalidInputError.because("rank", rank, f"{self} has ranks 0 to {last}", f"use one from 0 to {last}")

    def _position(self, axis: str) -> int:
        if not isinstance(axis, str) or axis not in self.names:
            raise InvalidInputError.because("axis", axis, f"{self} has no such axis", f"use {' or '.join(self.names)}")
        return self.names.index(axis)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Mesh does not change; make another one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a Mesh does not change; make another one")

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _made, (self.axes,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (self.names, self.sizes) == (other.names, other.sizes)

    def __hash__(self) -> int:
        return hash((self.names, self.sizes))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes.items())})"


def _made(axes: dict[str, int]) -> Mesh:
    return Mesh(**axes)
