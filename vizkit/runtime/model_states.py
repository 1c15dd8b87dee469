"""Bytes of parameters, gradients and optimizer state on this rank, read off modules and optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vizkit.errors import InvalidInputError
from vizkit.runtime.storages import bytes_by_storage, key_of, storages_of, tensors_in


class Watched:
    """Modules, or tensors that serve as parameters, and the optimizers, or tensors, that hold their state.

    Parameters are read anew each time, because sharding swaps them: those seen before count as long as they live.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        roots, self._tensors = _modules_and_tensors(model)
        self.modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        self._optimizers, self._state = _optimizers_and_tensors(optimizer)
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def parameters(self, on_first_sight: Callable[[torch.Tensor], None]) -> list[torch.Tensor]:
        """All parameters that live, sharded and gathered ones."""
        held = [p for module in self.modules for p in module._parameters.values() if p is not None]
        for tensor in (*held, *tensors_in(self._tensors)):
            known = self._seen.get(id(tensor))
            if known is None or known() is not tensor:
                self._seen[id(tensor)] = weakref.ref(tensor)
                on_first_sight(tensor)
        alive = [(number, seen()) for number, seen in self._seen.items()]
        for number, parameter in alive:
            if parameter is None:
                del self._seen[number]
        return [parameter for _, parameter in alive if parameter is not None]

    def buffers(self) -> Iterator[torch.Tensor]:
        return (b for module in self.modules for b in module._buffers.values() if b is not None)

    def optimizer_state(self) -> Iterator[torch.Tensor]:
        """Tensors of the optimizers' state and of the optimizers that they wrap; a count of steps is no tensor here."""
        for optimizer in self._optimizers:
            inner = (value for value in vars(optimizer).values() if isinstance(value, Optimizer))
            for holder in (optimizer, *inner):
                for state in holder.state.values():
                    yield from (tensor for tensor in tensors_in(state) if tensor.dim())
        yield from tensors_in(self._state)


class ModelStates:
    """Distinct storages of parameters, gradients, buffers and optimizer state, as of the last look."""

    def __init__(self, on_parameter: Callable[[torch.Tensor], None]) -> None:
        self._on_parameter = on_parameter
        self.parameters: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.buffers: dict[int, int] = {}
        self.optimizer: dict[int, int] = {}
        self._with_gradient: set[int] = set()
        self.num_bytes = [0, 0, 0]
        """Of parameters, gradients, optimizer state."""

    def look(self, watched: Iterable[Watched], with_optimizers: bool) -> None:
        """Reads everything again; what an optimizer holds changes only in its step."""
        sources = list(watched)
        parameters = [p for source in sources for p in source.parameters(self._on_parameter)]
        gradients = {id(p): p.grad for p in parameters if p.is_leaf and p.grad is not None}
        self._with_gradient = set(gradients)
        self.parameters = bytes_by_storage(parameters)
        self.gradients = bytes_by_storage(gradients.values())
        self.buffers = bytes_by_storage(b for source in sources for b in source.buffers())
        if with_optimizers:
            self.optimizer = bytes_by_storage(t for source in sources for t in source.optimizer_state())
        self.num_bytes = [sum(part.values()) for part in (self.parameters, self.gradients, self.optimizer)]

    def add_gradient(self, parameter: torch.Tensor) -> None:
        """A backward has added to the gradient of this parameter."""
        if parameter.grad is None:
            return
        self._with_gradient.add(id(parameter))
        for storage in storages_of(parameter.grad):
            key, num_bytes = key_of(storage), storage.nbytes()
            self.num_bytes[1] += num_bytes - self.gradients.get(key, 0)
            self.gradients[key] = num_bytes

    def is_current(self, parameter: torch.Tensor) -> bool:
        """Whether the last look saw this parameter, and its gradient, where they are now."""
        has_gradient = parameter.is_leaf and parameter.grad is not None
        return has_gradient == (id(parameter) in self._with_gradient) and self.knows(parameter)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in parameters as the last look saw them."""
        return all(self.parameters.get(key_of(storage)) == storage.nbytes() for storage in storages_of(tensor))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in parameters, gradients or buffers."""
        tables = (self.parameters, self.gradients, self.buffers)
        return any(key_of(storage) in table for storage in storages_of(tensor) for table in tables)


def _modules_and_tensors(model: Any) -> tuple[list[nn.Module], Any]:
    if isinstance(model, nn.Module):
        return [model], []
    if isinstance(model, Mapping):
        return _modules_and_tensors(list(model.values()))
    if isinstance(getattr(model, "modules", None), Mapping):  # a vizkit.Pipeline
        return _modules_and_tensors(model.modules)
    if isinstance(model, (list, tuple)):
        parts = [_modules_and_tensors(part) for part in model]
        return [m for modules, _ in parts for m in modules], [tensors for _, tensors in parts if len(tensors)]
    if isinstance(model, torch.Tensor):
        return [], [model]
    raise InvalidInputError.because(
        "model",
        type(model).__name__,
        "is neither a module, nor a pipeline, nor a list of modules",
        "give the nn.Module that trains",
    )


def _optimizers_and_tensors(optimizer: Any) -> tuple[list[Optimizer], Any]:
    if optimizer is None:
        return [], []
    if isinstance(optimizer, Optimizer):
        return [optimizer], []
    if isinstance(optimizer, (Mapping, list, tuple)):
        values = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
        found = [value for value in values if isinstance(value, Optimizer)]
        return found, optimizer if len(found) < len(optimizer) or not found else []
    raise InvalidInputError.because(
        "optimizer",
        type(optimizer).__name__,
        "is neither an optimizer nor a list of them",
        "give the torch.optim.Optimizer that steps, or None",
    )
