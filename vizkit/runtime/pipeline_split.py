"""Where a stage's graph begins and ends, so that each parameter gets its whole gradient from a split backward too.

Torch finds the W of a parameter where its path meets one from the stage's inputs. A parameter whose path meets none (a
frozen stage before, a detached input, a branch of its own) gets no gradient, and one that several others meet at
different places is differentiated twice. Torch 2.13 says nothing of the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()  # no view: torch detaches outputs in place, which a view does not allow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


def make_anchor() -> torch.Tensor:
    """An input that each output of a stage depends on, if all of them are `anchored` to it."""
    return torch.empty(0, requires_grad=True)


def anchored(tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """`tensor` in the same memory, as a result of `anchor` too; itself where it needs no gradient.

    >>> anchored(torch.ones(2, requires_grad=True), make_anchor()).grad_fn.next_functions[0][0].variable.shape
    torch.Size([0])
    """
    return _Alias.apply(anchor, tensor) if tensor.requires_grad else tensor


def changeable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in the same memory as a result: a module may change it in place, which a leaf of autograd refuses.

    >>> (changeable(torch.ones(2, requires_grad=True)).relu_() + 1).requires_grad
    True
    """
    return _Alias.apply(None, tensor) if tensor.requires_grad else tensor


def merged(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Torch's groups of parameters and the nodes where their gradients start, with each parameter in one group only.

    A node that the backward for the inputs did not reach has no gradient to start from, and is left out.

    >>> one, two = ({"params": {p}, "intermediates": [p.upper()], "grads": [g]} for p, g in (("a", 1), ("b", 2)))
    >>> both = {"params": {"a", "b"}, "intermediates": ["A", "B"], "grads": [1, 2]}
    >>> len(merged([one, two])), [group["intermediates"] for group in merged([one, two, both])]
    (2, [['A', 'B']])
    """
    found: list[tuple[set[Any], dict[Any, Any]]] = []
    for group in groups:
        params = set(group["params"])
        starts = dict(zip(group["intermediates"], group.get("grads", ()), strict=False))
        joined = [other for other in found if not params.isdisjoint(other[0])]
        found = [other for other in found if params.isdisjoint(other[0])]
        found.append((params.union(*(p for p, _ in joined)), {k: v for _, s in joined for k, v in s.items()} | starts))
    reached = ((params, {k: v for k, v in starts.items() if v is not None}) for params, starts in found)
    return [
        {"params": params, "intermediates": list(starts), "grads": list(starts.values())} for params, starts in reached
    ]
