"""Whether ranks computed what one process computes: loss, gradients and parameters, name by name."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch

from vizkit.errors import InvalidInputError
from vizkit.runtime.run import Run

RELATIVE = {torch.float64: 1e-7, torch.float32: 1.3e-6, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
ABSOLUTE = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""Tolerances by dtype, those of `torch.testing.assert_close`; whole numbers have to be equal."""

Values = Mapping[str, Any] | Sequence[Any] | torch.Tensor | Number | None


@dataclass(frozen=True)
class Difference:
    """One value of one rank beside the reference's: the largest absolute difference and what its dtype allows there.

    `allowed` is absolute + relative × |reference| at the element that exceeds it most, or comes nearest to that.
    """

    name: str
    rank: int
    dtype: str
    largest: float
    allowed: float
    holds: bool

    def __str__(self) -> str:
        relation = "within" if self.holds else "over"
        return f"{self.name} on rank {self.rank}: {self.largest:.2g}, {relation} {self.allowed:.2g} ({self.dtype})"


@dataclass(frozen=True, repr=False)
class Parity:
    """What `parity` found: a `Difference` for each value that a rank holds, and the names that none holds.

    True where everything is equal within tolerance; says the largest difference by name either way.
    """

    differences: tuple[Difference, ...]
    missing: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return not self.missing and all(difference.holds for difference in self.differences)

    def __bool__(self) -> bool:
        return self.holds

    @property
    def worst(self) -> Difference | None:
        """The value that exceeds its tolerance most, or comes nearest to it; None where nothing was compared."""
        return max(self.differences, key=_severity, default=None)

    def __str__(self) -> str:
        names = len({difference.name for difference in self.differences})
        ranks = len({difference.rank for difference in self.differences})
        counted = f"{names} value{'s' * (names != 1)} on {ranks} rank{'s' * (ranks != 1)}"
        wrong = [difference for difference in self.differences if not difference.holds]
        lines = [f"equal to one process: {counted}" if self.holds else f"not equal to one process: {counted} compared"]
        if self.missing:
            lines.append(f"no rank holds {', '.join(self.missing)}")
        if wrong:
            lines += [str(difference) for difference in sorted(wrong, key=_severity, reverse=True)[:MOST_LISTED]]
            lines += [f"and {len(wrong) - MOST_LISTED} more"] if len(wrong) > MOST_LISTED else []
        elif self.worst:
            lines.append(f"largest difference: {self.worst}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        mark, colour = ("✓", "#009E73") if self.holds else ("✗", "#D55E00")
        first, *rest = map(html.escape, str(self).split("\n"))
        return f'<div><b style="color:{colour}">{mark} {first}</b>{"".join(f"<br>{line}" for line in rest)}</div>'


MOST_LISTED = 5


def parity(
    run: Run | Sequence[Values], reference: Run | Values, *, rtol: float | None = None, atol: float | None = None
) -> Parity:
    """Compares what each rank returned with what one process returned, value by value.

    A rank returns tensors and numbers in dicts, lists and tuples, in any depth; a value's name is its path, such as
    "gradients.layer.weight". A rank may hold some names only (a stage, a shard's owner); None is a value that lies
    elsewhere; what is not a number (NaN) equals nothing. `reference` is a run of one rank, or what it returned. `rtol`
    and `atol` replace the tolerances of the dtypes. Raises `InvalidInputError` where a rank holds a name that the
    reference lacks, or another shape.

    >>> whole = {"loss": 2.5, "gradients": {"w": torch.ones(2)}}
    >>> print(parity([{"gradients": {"w": torch.ones(2)}}, {"loss": 2.5}], whole))
    equal to one process: 2 values on 2 ranks
    largest difference: gradients.w on rank 0: 0, within 1.1e-05 (float32)
    """
    ranks = run.results if isinstance(run, Run) else list(run)
    expected = dict(_named(reference.results[0] if isinstance(reference, Run) else reference))
    differences = []
    for rank, held in enumerate(ranks):
        for name, value in _named(held):
            if name not in expected:
                raise InvalidInputError.because(
                    "run", name, f"rank {rank} holds it, the reference has {', '.join(expected)}", "use the same names"
                )
            differences.append(_difference(name, rank, value, expected[name], rtol, atol))
    found = {difference.name for difference in differences}
    return Parity(tuple(differences), tuple(name for name in expected if name not in found))


def _named(values: Values, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if values is None:
        return
    if isinstance(values, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(values.items())
    elif isinstance(values, Sequence) and not isinstance(values, str):
        items = enumerate(values)
    elif isinstance(values, (torch.Tensor, Number)) or hasattr(values, "__array__"):
        yield path or "result", _as_tensor(values)
        return
    else:
        raise InvalidInputError.because(
            path or "result", values, "is neither tensor nor number", "return tensors and numbers in dicts or lists"
        )
    for key, value in items:
        yield from _named(value, f"{path}.{key}" if path else str(key))


def _as_tensor(value: Any) -> torch.Tensor:
    """A float of Python or numpy counts as float32: what it was computed in is forgotten, float64 asks too much."""
    tensor = torch.tensor(float(value)) if isinstance(value, float) else torch.as_tensor(value).detach().cpu()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _difference(
    name: str, rank: int, value: torch.Tensor, expected: torch.Tensor, rtol: float | None, atol: float | None
) -> Difference:
    if value.shape != expected.shape:
        raise InvalidInputError.because(
            name, tuple(value.shape), f"on rank {rank}, and {tuple(expected.shape)} in the reference", "gather it first"
        )
    dtype = value.dtype
    relative = RELATIVE.get(dtype, 0.0) if rtol is None else rtol
    absolute = ABSOLUTE.get(dtype, 0.0) if atol is None else atol
    a, b = value.double().flatten(), expected.double().flatten()
    gap = torch.where(a == b, 0.0, (a - b).abs())
    allowed = absolute + relative * b.abs()
    if not len(gap):
        return Difference(name, rank, str(dtype).removeprefix("torch."), 0.0, absolute, True)
    excess = torch.where(gap == 0, 0.0, gap / allowed).nan_to_num(nan=torch.inf, posinf=torch.inf)
    at = int(excess.argmax())
    return Difference(
        name, rank, str(dtype).removeprefix("torch."), float(gap[at]), float(allowed[at]), bool(excess[at] <= 1)
    )


def _severity(difference: Difference) -> float:
    if difference.largest == 0:
        return 0.0
    severity = difference.largest / difference.allowed if difference.allowed else math.inf
    return math.inf if math.isnan(severity) else severity
