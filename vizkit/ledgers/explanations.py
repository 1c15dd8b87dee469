"""Why a rank's calls and a formula's differ: causes that can be computed from the bytes of the calls, to the byte."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from vizkit.errors import InvalidInputError
from vizkit.sizes import whole_number
from vizkit.trace import SpanKind
from vizkit.volume import Movement

Calls = Counter[int]
"""How many calls of each payload, in bytes."""

ELEMENT_BYTES = (1, 2, 4, 8)
MOST_TRIES = 200_000
"""A search among sums of calls gives up after so many, a tenth of a second; the difference then stays unexplained."""
MOST_SIZES_LISTED = 3
NOISE_BYTES = 1e-6
"""By how much a formula in floating point may miss a whole number of bytes."""


class Cause(enum.Enum):
    """Why bytes differ; `value` says it in words, `accounts` whether that is a reason or only a finding."""

    BUCKETS = "buckets"
    """The formula's calls came in other portions, of the same bytes together."""
    PADDING = "padding"
    """Shards were filled up to one size."""
    OWN_PART = "own part"
    """The formula counts what arrives from others; a payload holds the rank's own part too. Not named between two
    ranks, where elements of twice the size would look the same."""
    ROUNDING = "rounding"
    """The formula gives parts of a byte; less than a byte a call."""
    ONE_RANK = "one rank"
    """A group of one rank: nothing leaves it."""
    PART_OF_THE_FULLEST = "part of the fullest"
    """Messages of a rank that sends only some of what the fullest rank sends, such as a pipeline's first and last."""
    NOT_IN_THE_FORMULA = "not in the formula"
    """Calls beyond those that the formula knows of."""
    NEVER_CAME = "never came"
    """Calls of the formula that no rank made."""
    UNEXPLAINED = "unexplained"
    """Nothing above adds up to the difference."""
    GLOO_REDUCE_SCATTER = "gloo's reduce-scatter"
    """Gloo runs it as an all-reduce of the full input: twice the bytes of the ring on the wire, payload the same."""
    OTHER_ALGORITHM = "other algorithm"
    """This backend does not use the textbook's algorithm."""

    @property
    def accounts(self) -> bool:
        return self not in (Cause.NEVER_CAME, Cause.UNEXPLAINED)

    @property
    def keeps_the_formula(self) -> bool:
        """Whether the formula's calls, and no others, were made."""
        return self.accounts and self is not Cause.NOT_IN_THE_FORMULA


@dataclass(frozen=True)
class Explanation:
    """A part of a difference: `difference_bytes` is by how much one rank's bytes exceed the formula's because of it.

    `calls` counts the calls concerned; `ranks` are those to which it applies, () for all of the row.
    """

    cause: Cause
    difference_bytes: float
    text: str
    calls: int = 0
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f"rank{'s' * (len(self.ranks) > 1)} {ranks_text(self.ranks)}: " if self.ranks else ""
        return where + self.text


@dataclass(frozen=True)
class ShardedMovement(Movement):
    """A `Movement` of whole tensors that are cut along dimension 0 into one shard for each rank of the axis.

    `payload_bytes` is that of the tensors without padding. Where dimension 0 does not divide, implementations fill all
    shards up to the largest (FSDP2: `torch.distributed.fsdp.fully_shard`), which `shapes` lets a ledger compute. Raises
    `InvalidInputError` for sizes below 1.

    >>> ShardedMovement("dp", SpanKind.ALL_GATHER, 60, shapes=((5, 3),)).padded_bytes(2)
    72
    """

    shapes: tuple[tuple[int, ...], ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        try:
            sizes = tuple(tuple(whole_number("shapes", size) for size in shape) for shape in self.shapes)
        except TypeError:
            raise InvalidInputError.because(
                "shapes", self.shapes, "must be a shape for each tensor", "use shapes=((5, 3), (8,))"
            ) from None
        object.__setattr__(self, "shapes", sizes)

    def padded_bytes(self, num_ranks: int) -> float:
        """Payload of one call where dimension 0 of each shape is filled up to a multiple of `num_ranks`.

        Raises `InvalidInputError` where the payload is no whole number of bytes an element of the shapes.
        """
        whole = sum(math.prod(shape) for shape in self.shapes)
        if not whole or self.payload_bytes % whole:
            raise InvalidInputError.because(
                "payload_bytes",
                self.payload_bytes,
                f"must be bytes an element times the {whole:,} elements of shapes",
                f"use payload_bytes={whole * 4} for float32",
            )
        rows = sum(_up_to(shape[0], num_ranks) * math.prod(shape[1:]) for shape in self.shapes if shape)
        scalars = num_ranks * sum(not shape for shape in self.shapes)
        return (rows + scalars) * (self.payload_bytes // whole)


def explain(
    calls: Calls, movements: Sequence[Movement], kind: SpanKind, num_ranks: int, steps: int = 1
) -> tuple[Explanation, ...]:
    """Why one rank's calls differ from the formula's; the parts add up to the difference in bytes exactly.

    Nothing is guessed: a cause is named where the bytes that it would make are the bytes that are there; where several
    ways lead there, the one with fewest causes. Calls that never came are named only where nothing else adds up.
    """
    formula = tuple(_formula(movements, steps))
    difference = bytes_of(calls) - formula_bytes(movements, steps)
    if num_ranks == 1:
        if not calls and not difference:
            return ()
        return (Explanation(Cause.ONE_RANK, difference, "a group of one rank: nothing leaves it", calls.total()),)
    if not movements:
        return (_on_top(calls),) if calls else ()
    ways: list[tuple[Explanation, ...]] = []
    for cause, text, adjusted in _adjustments(movements, kind, num_ranks, steps):
        found = _matched(calls, adjusted)
        if found is not None:
            added = bytes_of(adjusted) - formula_bytes(movements, steps)
            first = (Explanation(cause, added, text, adjusted.total()),) if cause else ()
            ways.append((*first, *found))
    if ways:
        return min(ways, key=_strain)
    missing = _missing(calls, formula, difference)
    if missing is not None:
        return missing
    return (Explanation(Cause.UNEXPLAINED, difference, f"{difference:+,.10g} B that nothing accounts for"),)


def bytes_of(calls: Calls) -> int:
    """Payload of all calls together."""
    return sum(size * count for size, count in calls.items())


def formula_bytes(movements: Sequence[Movement], steps: int = 1) -> float:
    """Payload of all calls that the movements foresee."""
    return sum(payload * times for payload, times in _formula(movements, steps))


def formula_calls(movements: Sequence[Movement], steps: int = 1) -> float:
    return sum(movement.times for movement in movements) * steps


def _formula(
    movements: Sequence[Movement], steps: int, size: Callable[[Movement], float] = lambda m: m.payload_bytes
) -> Iterator[tuple[float, int]]:
    """Payload and number of calls; calls that are not whole in number count as one of all their bytes."""
    for movement in movements:
        times, payload = movement.times * steps, size(movement)
        whole_times = times == int(times)
        payload = payload if whole_times else payload * times
        nearest = round(payload)
        yield nearest if abs(payload - nearest) < NOISE_BYTES else payload, int(times) if whole_times else 1


def _adjustments(
    movements: Sequence[Movement], kind: SpanKind, num_ranks: int, steps: int
) -> Iterator[tuple[Cause | None, str, Calls]]:
    """The formula's calls as they may look in a run, each with the cause that makes them look so."""
    formula = tuple(_formula(movements, steps))
    whole = _counted(formula)
    if any(payload != round(payload) for payload, _ in formula):
        yield Cause.ROUNDING, "the formula gives parts of a byte", whole
        return
    yield None, "", whole
    padding = f"all {num_ranks} shards filled up to one size"
    if any(isinstance(movement, ShardedMovement) for movement in movements):
        padded = _counted(_formula(movements, steps, lambda m: _padded_bytes(m, num_ranks)))
        if padded != whole:
            yield Cause.PADDING, padding, padded
    if kind in _IN_SHARDS:
        for element_bytes in ELEMENT_BYTES:
            padded = _counted((_up_to(size, element_bytes * num_ranks), times) for size, times in whole.items())
            if padded != whole and all(size % element_bytes == 0 for size in whole):
                yield Cause.PADDING, padding, padded
        if num_ranks > 2 and all(size % (num_ranks - 1) == 0 for size in whole):
            parts = _counted((size // (num_ranks - 1) * num_ranks, times) for size, times in whole.items())
            yield Cause.OWN_PART, f"the formula leaves out the rank's own part, 1/{num_ranks} of a payload", parts


def _padded_bytes(movement: Movement, num_ranks: int) -> float:
    return movement.padded_bytes(num_ranks) if isinstance(movement, ShardedMovement) else movement.payload_bytes


_IN_SHARDS = (SpanKind.ALL_GATHER, SpanKind.REDUCE_SCATTER, SpanKind.ALL_TO_ALL)
"""Collectives whose payload is one shard for each rank."""


def _strain(way: Sequence[Explanation]) -> int:
    """How much a way of explaining asks one to believe: its causes, and once more for portions with calls on top."""
    causes = {explanation.cause for explanation in way}
    return len(causes) + (causes >= {Cause.BUCKETS, Cause.NOT_IN_THE_FORMULA})


def _matched(calls: Calls, expected: Calls) -> tuple[Explanation, ...] | None:
    """What makes the calls out of the formula's: other portions of the same bytes, calls on top, both or neither."""
    left, open_calls = calls - expected, expected - calls
    on_top: Calls | None = left
    if open_calls:  # all calls of a size are on top or none are: otherwise almost any bytes could be made to fit
        on_top = _part_of_sum(left, bytes_of(left) - bytes_of(open_calls), whole_sizes=True)
    if on_top is None or (open_calls and left == on_top):
        return None
    return (*_buckets(open_calls, left - on_top), *([_on_top(on_top)] if on_top else []))


def _missing(calls: Calls, formula: Sequence[tuple[float, int]], difference: float) -> tuple[Explanation, ...] | None:
    """Where all that came belongs to the formula: what of it did not come."""
    expected = _counted(formula)
    left, open_calls = calls - expected, expected - calls
    absent = _part_of_sum(open_calls, bytes_of(open_calls) - bytes_of(left)) if left else open_calls
    if not absent or (calls and -difference != bytes_of(absent)):
        return None
    never = Explanation(Cause.NEVER_CAME, difference, f"never came: {_calls_text(absent)}", absent.total())
    return (*_buckets(open_calls - absent, left), never)


def _buckets(formula: Calls, came: Calls) -> tuple[Explanation, ...]:
    if not formula and not came:
        return ()
    return (Explanation(Cause.BUCKETS, 0, f"{_calls_text(formula)} came as {_calls_text(came)}", came.total()),)


def _on_top(calls: Calls) -> Explanation:
    text = f"not in the formula: {_calls_text(calls)}"
    return Explanation(Cause.NOT_IN_THE_FORMULA, bytes_of(calls), text, calls.total())


def _part_of_sum(calls: Calls, total: int, whole_sizes: bool = False) -> Calls | None:
    """Some of the calls whose bytes add up to `total`, or None: of one size if that can be, else the large ones first.

    With `whole_sizes` all calls of a size are among them or none.
    """
    if total <= 0:
        return Counter() if total == 0 else None
    choices = {size: [count] if whole_sizes else range(1, count + 1) for size, count in calls.items() if size}
    of_one_size = [size for size, times in choices.items() if total % size == 0 and total // size in times]
    if of_one_size:
        return Counter({max(of_one_size): total // max(of_one_size)})
    reached: dict[int, tuple[tuple[int, int], ...]] = {0: ()}
    tries = 0
    for size, choice in sorted(choices.items(), reverse=True):
        for so_far, chosen in list(reached.items()):
            tries += len(choice)
            if tries > MOST_TRIES:
                return None
            for times in choice:
                if so_far + size * times <= total:
                    reached.setdefault(so_far + size * times, (*chosen, (size, times)))
    return Counter(dict(reached[total])) if total in reached else None


def _counted(pairs: Iterable[tuple[float, int]]) -> Calls:
    """The calls, each of a whole number of bytes."""
    counts: Calls = Counter()
    for size, times in pairs:
        counts[round(size)] += times
    return +counts


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _calls_text(calls: Calls) -> str:
    """
    >>> _calls_text(Counter({1024: 2})), _calls_text(Counter({4: 1, 8: 2})), _calls_text(Counter())
    ('2 calls of 1,024 B', '1 call of 4 B, 2 calls of 8 B', 'no call')
    """
    if not calls:
        return "no call"
    if len(calls) > MOST_SIZES_LISTED:
        return f"{calls.total():,} calls of {bytes_of(calls):,} B together"
    return ", ".join(f"{count:,} call{'s' * (count != 1)} of {size:,} B" for size, count in sorted(calls.items()))


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks with runs drawn together.

    >>> ranks_text((0, 1, 2, 5)), ranks_text((3,))
    ('0-2, 5', '3')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = (str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ', '}{run[-1]}" for run in runs)
    return ", ".join(parts)
