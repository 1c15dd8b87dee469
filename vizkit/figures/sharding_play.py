"""The moments of a redistribution: what each rank holds, what travels, and the words for both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vizkit.collectives.backends import algorithm_for
from vizkit.figures.describe import MAX_RANKS_LISTED, counted
from vizkit.figures.mesh_grid import MeshGrid
from vizkit.figures.sharding_panels import Boxes, Panels, drawn_dims
from vizkit.mesh import Mesh
from vizkit.sharding import Move, Pieces, PlacementKind, RedistributionStep
from vizkit.units import bytes_text

MAX_LETTERED_RANKS = 64
MAX_MOVES = 260
MAX_ROUNDS = 7
MAX_CLOSE_ROUNDS = 3
WIDEST = 8.0


@dataclass(frozen=True)
class Moment:
    """`done` steps are over, and so are `rounds` of the next one's messages; the round after them is on its way.

    `progress` is how far, from 0 to 1.
    """

    done: int
    rounds: int = 0
    progress: float = 0.0


@dataclass(frozen=True, eq=False)
class Play:
    """`states` before, between and after `steps`; `rounds` has, for each step, the messages that travel together."""

    states: Sequence[Pieces]
    steps: Sequence[RedistributionStep]
    panels: Panels
    element_bytes: int
    backend: str
    rounds: Sequence[Sequence[Sequence[Move]]] = field(repr=False)

    @classmethod
    def of(cls, held: Pieces, steps: Sequence[RedistributionStep], element_bytes: int, backend: str) -> Play:
        states = [held, *(step.after for step in steps)]
        sharded = [p.dim for s in (states[0], states[-1]) for p in s.placements if p.kind is PlacementKind.SHARD]
        rows, columns = drawn_dims(held.shape, sharded)
        panels = Panels(MeshGrid.of(held.mesh, WIDEST), held.shape, rows, columns, *_colored(states))
        is_lettered = held.mesh.world_size <= MAX_LETTERED_RANKS
        return cls(states, steps, panels, element_bytes, backend, [_rounds(s) if is_lettered else [] for s in steps])

    @property
    def mesh(self) -> Mesh:
        return self.states[0].mesh

    @property
    def is_lettered(self) -> bool:
        """Whether there is room for a panel and words for each rank."""
        return self.mesh.world_size <= MAX_LETTERED_RANKS

    def moments(self) -> Iterator[Moment]:
        yield Moment(0)
        for number, rounds in enumerate(self.rounds):
            stops = (0.25, 0.5, 0.75) if len(rounds) <= MAX_CLOSE_ROUNDS else (0.33, 0.67)
            yield from (Moment(number, done, stop) for done in range(len(rounds)) for stop in stops)
            yield Moment(number + 1)

    def held(self, moment: Moment) -> Boxes:
        """What each rank has by then, with what has come in."""
        is_kept = moment.progress and not self.states[moment.done].partial_axes  # summands have their place already
        arrived = self.rounds[moment.done][: moment.rounds] if is_kept else []
        parts = [self.panels.travelled(moves, 1.0) for moves in arrived]
        return Boxes.joined([self.panels.held(self.states[moment.done]), *parts])

    def under_way(self, moment: Moment) -> Boxes:
        moves = self.rounds[moment.done][moment.rounds] if moment.progress else []
        return self.panels.travelled(moves, moment.progress)

    def label(self, moment: Moment) -> str:
        names = ", ".join(map(str, self.states[moment.done].placements))
        if moment.progress:
            step = self.steps[moment.done]
            return f"{step.action} along {step.axis}, round {moment.rounds + 1} of {len(self.rounds[moment.done])}"
        if moment.done == len(self.steps):
            return f"after: {names}"
        return f"before: {names}" if not moment.done else f"between: {names}"

    def caption(self, moment: Moment) -> str:
        state = self.states[moment.done]
        lines = [self._held_text(state)]
        if moment.done < len(self.steps):
            step = self.steps[moment.done]
            head = "Now" if moment.progress else "Next"
            place = f", step {moment.done + 1} of {len(self.steps)}" if len(self.steps) > 1 else ""
            lines.append(f"<b>{head}{place}: {step.action} along {step.axis}</b>, {step.change}")
            lines.append(self._bytes_text(step))
        elif self.steps:
            sent = np.sum([step.wire_bytes for step in self.steps], axis=0)
            lines.append(f"<b>Done.</b> On the wire in all: {range_text(sent)} from each rank")
        return "<br>".join(lines)

    def _held_text(self, state: Pieces) -> str:
        copies = len({*state.numbers[state.lengths.all(axis=1)].tolist()})
        names = ", ".join(
            f"{axis} {placement}" for axis, placement in zip(self.mesh.names, state.placements, strict=True)
        )
        held = range_text(state.lengths.prod(axis=1) * self.element_bytes)
        partial = f"; hatched: summands, partial along {' and '.join(state.partial_axes)}" * bool(state.partial_axes)
        return f"{names}: {counted(copies, 'distinct piece')}, {held} a rank{partial}"

    def _bytes_text(self, step: RedistributionStep) -> str:
        if step.kind is None:
            return "No communication"
        algorithm = algorithm_for(step.kind, self.backend).value.replace("_", "-")
        wire = f"on the wire {range_text(step.wire_bytes)} from each rank ({algorithm})"
        return f"Payload {range_text(step.payload_bytes)}; {wire}"

    def in_words(self) -> str:
        shape = " × ".join(map(str, self.states[0].shape))
        lines = [f"A tensor of {shape}, {self.element_bytes} B an element, on {self.mesh}."]
        lines += [self._held_text(self.states[0]).replace("hatched: ", "") + "."]
        lines += self._ranks_text(self.states[0])
        for number, step in enumerate(self.steps, 1):
            lines.append(f"Step {number}: {step.action} along {step.axis}, {step.change}. {self._bytes_text(step)}.")
        if self.steps:
            lines += [self._held_text(self.states[-1]).replace("hatched: ", "") + "."]
            lines += self._ranks_text(self.states[-1])
        return "\n".join(lines)

    def _ranks_text(self, state: Pieces) -> list[str]:
        listed = range(min(self.mesh.world_size, MAX_RANKS_LISTED))
        rest = self.mesh.world_size - len(listed)
        return [
            *(f"  rank {rank}: {state.text(rank)}" for rank in listed),
            *([f"  and {rest:,} more ranks"] * (rest > 0)),
        ]


def _colored(states: Sequence[Pieces]) -> tuple[np.ndarray, np.ndarray]:
    """The pieces that have colours: those of the first state that has several, so that a colour stays with its data."""
    for state in states:
        boxes = np.unique(np.concatenate([state.start, state.stop], axis=1), axis=0)
        start, stop = np.split(boxes, 2, axis=1)
        full = (start < stop).all(axis=1)
        if full.sum() > 1 or state is states[-1]:
            return start[full], stop[full]
    raise AssertionError("there is a last state")


def _rounds(step: RedistributionStep) -> list[list[Move]]:
    """Its messages by how far along the axis they go, as many rounds as there is time for; none where they are many."""
    moves = list(step.moves())
    if not moves or len(moves) > MAX_MOVES:
        return []
    num_ranks = step.before.mesh.size(step.axis)
    num_rounds = min(num_ranks - 1, MAX_ROUNDS)
    place = np.indices(step.before.mesh.sizes)[step.before.mesh.names.index(step.axis)].ravel()
    rounds: list[list[Move]] = [[] for _ in range(num_rounds)]
    for move in moves:
        distance = (place[move.dst] - place[move.src]) % num_ranks
        rounds[(distance - 1) * num_rounds // (num_ranks - 1)].append(move)
    return [moves for moves in rounds if moves]


def range_text(values: Sequence[float] | np.ndarray) -> str:
    """Bytes that are the same for all, or from the least to the most.

    >>> range_text([2_000, 2_000]), range_text([500, 2_000])
    ('2 kB', '500 B to 2 kB')
    """
    least, most = (bytes_text(float(value)) for value in (min(values), max(values)))
    return most if least == most else f"{least} to {most}"
