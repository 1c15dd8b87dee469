"""Which rank holds which piece of a tensor, and what a change of placements moves: `DTensor`'s rules, as data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from vizkit.collectives.backends import algorithm_for
from vizkit.collectives.cost import critical_path
from vizkit.errors import InvalidInputError
from vizkit.mesh import Mesh
from vizkit.sizes import is_whole, whole_number
from vizkit.trace import SpanKind


class PlacementKind(StrEnum):
    """What the ranks along one axis of a mesh hold of a tensor: pieces of it, all of it, or summands of it."""

    SHARD = "S"
    REPLICATE = "R"
    PARTIAL = "P"


@dataclass(frozen=True)
class Placement:
    """One axis's placement; `dim` is the tensor's that a shard cuts, `reduce_op` what makes a partial value whole.

    >>> [str(Placement.parse(text)) for text in ("S(1)", "Replicate()", "P")]
    ['S(1)', 'R', 'P(sum)']
    """

    kind: PlacementKind
    dim: int = -1
    reduce_op: str = ""

    @classmethod
    def parse(cls, placement: Placement | str | object) -> Placement:
        """From "S(0)", "R", "P" or "P(max)", or from torch's Shard(0), Replicate() or Partial(), known by their names.

        Raises `InvalidInputError` for anything else.
        """
        if isinstance(placement, cls):
            return placement
        if isinstance(placement, str) or type(placement).__name__ in ("Shard", "Replicate", "Partial"):
            for kind, form in _FORMS.items():
                if found := form.fullmatch(str(placement).replace(" ", "")):
                    dim = int(found[1]) if kind is PlacementKind.SHARD else -1
                    reduce_op = (found[1] or "sum") if kind is PlacementKind.PARTIAL else ""
                    return cls(kind, dim, reduce_op)
        raise InvalidInputError.because(
            "placement",
            placement,
            "is not one that a tensor's axis can have",
            'use "S(0)" for a shard of dim 0, "R" for a replica or "P" for a partial sum',
        )

    def __str__(self) -> str:
        return self.kind.value + {"S": f"({self.dim})", "P": f"({self.reduce_op})"}.get(self.kind, "")


_FORMS = {
    PlacementKind.SHARD: re.compile(r"(?:S|Shard)\((?:dim=)?(-?\d+)\)"),
    PlacementKind.REPLICATE: re.compile(r"(?:R|Replicate(?:\(\))?)"),
    PlacementKind.PARTIAL: re.compile(r"(?:P|Partial)(?:\((\w*)\))?"),
}
MOST_ELEMENTS = 1 << 48
REPLICATED = Placement(PlacementKind.REPLICATE)
Placements = Sequence[Placement | str | object] | Placement | str


@dataclass(frozen=True, eq=False)
class Pieces:
    """The piece that each rank holds: `start` and `stop` have a row for each rank and a column for each tensor dim.

    `is_partial` says by rank whether its values still have to be summed with other ranks'.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    start: np.ndarray
    stop: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Shape of each rank's piece, one row a rank."""
        return self.stop - self.start

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes of more than one rank along which the values are summands, not sums."""
        placed = zip(self.mesh.names, self.mesh.sizes, self.placements, strict=True)
        return tuple(name for name, size, placement in placed if _is_partial(placement) and size > 1)

    @property
    def numbers(self) -> np.ndarray:
        """Which piece each rank holds: the same number for the same piece, counted in the tensor's order."""
        _, numbers = np.unique(np.concatenate([self.start, self.stop], axis=1), axis=0, return_inverse=True)
        return numbers.reshape(-1)

    def slices(self, rank: int) -> tuple[slice, ...]:
        """What a rank holds, to index the whole tensor with."""
        return tuple(map(slice, self.start[rank].tolist(), self.stop[rank].tolist()))

    def text(self, rank: int) -> str:
        """The slices as they are written; a dim that is whole is ":", and no element at all is "empty".

        >>> pieces(Mesh(tp=4), (5, 8), ["S(0)"]).text(1), pieces(Mesh(tp=4), (5, 8), ["S(0)"]).text(3)
        ('[2:4, :]', 'empty')
        """
        return slices_text(self.start[rank].tolist(), self.stop[rank].tolist(), self.shape)


def slices_text(start: Sequence[int], stop: Sequence[int], shape: Sequence[int]) -> str:
    """Part of a tensor as Python writes it.

    >>> slices_text((0, 2), (3, 4), (3, 8))
    '[:, 2:4]'
    """
    if any(low >= high for low, high in zip(start, stop, strict=True)):
        return "empty"
    whole = zip(start, stop, shape, strict=True)
    return f"[{', '.join(':' if high - low == size else f'{low}:{high}' for low, high, size in whole)}]"


def pieces(mesh: Mesh | object, shape: Sequence[int], placements: Placements) -> Pieces:
    """Which piece of a tensor of this shape each rank of the mesh holds, one placement for each axis of the mesh.

    A shard is cut as `torch.chunk` cuts: ⌈size / ranks⌉ for each rank, the last ones less or nothing; where two axes
    cut one dim, the inner axis cuts the outer's piece. Raises `InvalidInputError` for an empty shape, for placements
    that are not as many as the axes, and for a dim that the tensor does not have.

    >>> [pieces(Mesh(dp=2, tp=2), (5,), ["S(0)", "S(0)"]).slices(rank)[0] for rank in range(4)]
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    mesh = Mesh.of(mesh)
    return _cut(mesh, check_shape(shape), check_placements(mesh, shape, placements))


def check_shape(shape: Sequence[int] | int) -> tuple[int, ...]:
    """The shape as a tuple; raises `InvalidInputError` where it is none, without dims, or has one that cannot be."""
    if is_whole(shape):
        sizes: tuple[int, ...] = (shape,)
    elif isinstance(shape, Sequence) and not isinstance(shape, (str, bytes)):
        sizes = tuple(shape)
    else:
        raise InvalidInputError.because("shape", shape, "is no shape of a tensor", "use shape=(8, 8)")
    if not sizes:
        raise InvalidInputError.because("shape", sizes, "a tensor to shard has at least one dim", "use shape=(8, 8)")
    whole = tuple(whole_number(f"shape[{dim}]", size) for dim, size in enumerate(sizes))
    if math.prod(whole) > MOST_ELEMENTS:
        raise InvalidInputError.because("shape", whole, "has more elements than any tensor", "use shape=(8, 8)")
    return whole


def check_placements(
    mesh: Mesh, shape: Sequence[int], placements: Placements, name: str = "placements"
) -> tuple[Placement, ...]:
    """One placement for each axis, dims counted from 0; raises `InvalidInputError` where one does not fit."""
    given = [placements] if isinstance(placements, str) or not isinstance(placements, Sequence) else list(placements)
    if len(given) != len(mesh.names):
        raise InvalidInputError.because(
            name,
            ", ".join(map(str, given)),
            f"has {len(given)}, and {mesh} has {len(mesh.names)} to place: {', '.join(mesh.names)}",
            f"use {[*map(str, given), *['R'] * len(mesh.names)][: len(mesh.names)]}",
        )
    parsed = [Placement.parse(placement) for placement in given]
    if len(kinds := {placement.reduce_op for placement in parsed if _is_partial(placement)}) > 1:
        raise InvalidInputError.because(
            name,
            ", ".join(map(str, parsed)),
            f"one tensor waits for one reduction, not for {' and '.join(sorted(kinds))}",
            "use one of them for all axes",
        )
    return tuple(_counted_from_zero(placement, len(check_shape(shape)), name) for placement in parsed)


def _counted_from_zero(placement: Placement, num_dims: int, name: str) -> Placement:
    if not _is_shard(placement):
        return placement
    if not -num_dims <= placement.dim < num_dims:
        raise InvalidInputError.because(
            name, str(placement), f"the tensor has dims 0 to {num_dims - 1}", f"use S({num_dims - 1})"
        )
    return Placement(placement.kind, placement.dim % num_dims)


def _cut(mesh: Mesh, shape: tuple[int, ...], placements: Sequence[Placement]) -> Pieces:
    start = np.zeros((mesh.world_size, len(shape)), np.int64)
    stop = np.tile(np.array(shape, np.int64), (mesh.world_size, 1))
    coordinates = np.indices(mesh.sizes).reshape(len(mesh.sizes), -1)
    for place, num_ranks, placement in zip(coordinates, mesh.sizes, placements, strict=True):
        if _is_shard(placement):
            low, length = start[:, placement.dim].copy(), (stop - start)[:, placement.dim]
            chunk = -(-length // num_ranks)
            start[:, placement.dim] = low + np.minimum(length, chunk * place)
            stop[:, placement.dim] = low + np.minimum(length, chunk * (place + 1))
    return Pieces(mesh, shape, tuple(placements), start, stop)


@dataclass(frozen=True)
class Move:
    """The part of the tensor from `start` to `stop` that rank `src` has and rank `dst` comes to need."""

    src: int
    dst: int
    start: tuple[int, ...]
    stop: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RedistributionStep:
    """One change of placement along one axis: `kind` is the collective that does it, None where each rank does alone.

    `payload_bytes`, by rank, is that of one call as `vizkit.Span` defines it, padding included; groups of one axis
    differ where shards do. `wire_bytes`, by rank, is what the backend's algorithm sends.
    """

    axis: str
    kind: SpanKind | None
    before: Pieces
    after: Pieces
    payload_bytes: tuple[int, ...]
    wire_bytes: tuple[float, ...]

    @property
    def action(self) -> str:
        """The collective's name, or what each rank does alone."""
        if self.kind is not None:
            return self.kind.value.replace("_", "-")
        old, new = (pieces.placements[self._position] for pieces in (self.before, self.after))
        if self.before.mesh.size(self.axis) == 1:
            return "nothing to do"
        if _is_shard(new):
            return "local slice"
        return f"division by {self.before.mesh.size(self.axis)}" if new.reduce_op == "sum" else f"{old} kept as {new}"

    @property
    def change(self) -> str:
        """The placements along this axis, as in "S(0) → R"."""
        return f"{self.before.placements[self._position]} → {self.after.placements[self._position]}"

    def moves(self) -> Iterator[Move]:
        """What each rank's new piece takes from each other rank of its group; nothing where no collective runs."""
        groups = self.before.mesh.groups(self.axis) if self.kind is not None else []
        for group in groups:
            for src in group:
                low = np.maximum(self.before.start[src], self.after.start[list(group)])
                high = np.minimum(self.before.stop[src], self.after.stop[list(group)])
                for place in np.flatnonzero((low < high).all(axis=1)).tolist():
                    if group[place] != src:
                        yield Move(src, group[place], tuple(low[place].tolist()), tuple(high[place].tolist()))

    @property
    def _position(self) -> int:
        return self.before.mesh.names.index(self.axis)


def redistribution(
    mesh: Mesh | object,
    shape: Sequence[int],
    before: Placements,
    after: Placements,
    *,
    element_bytes: int = 4,
    backend: str = "",
) -> tuple[RedistributionStep, ...]:
    """The steps of `DTensor.redistribute` from one set of placements to another, axis by axis, with their bytes.

    S → R gathers, P → R all-reduces, P → S reduce-scatters, S(i) → S(j) is an all-to-all; R → S slices and R → P
    divides, without communication. Where the inner axis cuts what the outer cut, it becomes whole first. Pieces are
    padded to the largest, as DTensor pads them (`torch/distributed/tensor/_redistribute.py`, 2.13). With
    `backend="gloo"` an all-to-all is an all-gather, which is what DTensor runs on CPU. Raises `InvalidInputError` as
    `pieces` does, and for S → P and between reductions, which DTensor does not have.

    >>> step, = redistribution(Mesh(tp=4), (1000, 8), ["S(0)"], ["R"])
    >>> step.action, step.axis, step.payload_bytes[0], step.wire_bytes[0]
    ('all-gather', 'tp', 32000, 24000.0)
    """
    mesh, sizes = Mesh.of(mesh), check_shape(shape)
    old, new = (check_placements(mesh, sizes, given, name) for given, name in ((before, "before"), (after, "after")))
    whole_number("element_bytes", element_bytes)
    steps = []
    held = _cut(mesh, sizes, old)
    for position, target in _plan(mesh, old, new):
        _check_change(held.placements[position], target)
        placements = [*held.placements[:position], target, *held.placements[position + 1 :]]
        changed = _cut(mesh, sizes, placements)
        # what this axis cuts: the tensor after the axes outside it, of which none has changed before a collective
        uncut = _cut(mesh, sizes, [*old[:position], *[REPLICATED] * (len(old) - position)]).lengths
        steps.append(_step(held, changed, position, uncut, element_bytes, backend))
        held = changed
    return tuple(steps)


def _plan(mesh: Mesh, before: Sequence[Placement], after: Sequence[Placement]) -> list[tuple[int, Placement]]:
    """Which axis changes to what, in DTensor's order: from the inside out where shards are there, then back."""
    now, changes = list(before), []

    def change(position: int, target: Placement) -> None:
        if now[position] != target:
            changes.append((position, target))
            now[position] = target

    if any(_is_shard(placement) and size > 1 for placement, size in zip(before, mesh.sizes, strict=True)):
        for position in reversed(range(len(now))):
            target = after[position]
            outside = [[_is_shard(p) and p.dim == target.dim for p in side[:position]] for side in (now, after)]
            change(position, REPLICATED if _is_shard(target) and outside[0] != outside[1] else target)
    for position, target in enumerate(after):
        change(position, target)
    return changes


def _check_change(old: Placement, new: Placement) -> None:
    if _is_partial(new) and old.kind is not PlacementKind.REPLICATE:
        raise InvalidInputError.because(
            "after", str(new), f"no collective makes it of {old}", 'use "R" first, and then a partial value'
        )


def _step(
    held: Pieces, changed: Pieces, position: int, uncut: np.ndarray, element_bytes: int, backend: str
) -> RedistributionStep:
    old, new = held.placements[position], changed.placements[position]
    num_ranks, sent = held.mesh.sizes[position], held.lengths.copy()
    kind = _COLLECTIVES.get((old.kind, new.kind)) if num_ranks > 1 else None
    if kind is SpanKind.ALL_TO_ALL and backend == "gloo":
        kind = SpanKind.ALL_GATHER
    if kind is not None and _is_shard(old):
        sent[:, old.dim] = -(-uncut[:, old.dim] // num_ranks)
    if kind is not None and _is_shard(new):
        sent[:, new.dim] = -(-sent[:, new.dim] // num_ranks) * num_ranks
    elements = sent.prod(axis=1) * (num_ranks if kind is SpanKind.ALL_GATHER else 1)
    payload_bytes = (elements * element_bytes * (kind is not None)).tolist()
    share = critical_path(kind, algorithm_for(kind, backend), num_ranks)[1] if kind is not None else 0.0
    return RedistributionStep(
        held.mesh.names[position], kind, held, changed, tuple(payload_bytes), tuple(share * b for b in payload_bytes)
    )


_COLLECTIVES: dict[tuple[str, str], SpanKind] = {
    ("S", "R"): SpanKind.ALL_GATHER,
    ("P", "R"): SpanKind.ALL_REDUCE,
    ("P", "S"): SpanKind.REDUCE_SCATTER,
    ("S", "S"): SpanKind.ALL_TO_ALL,
}


def _is_shard(placement: Placement) -> bool:
    return placement.kind is PlacementKind.SHARD


def _is_partial(placement: Placement) -> bool:
    return placement.kind is PlacementKind.PARTIAL
