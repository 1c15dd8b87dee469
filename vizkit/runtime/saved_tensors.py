"""Bytes that autograd keeps for backwards: each distinct storage once, from when it is saved until it is let go."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch

from vizkit.runtime.storages import key_of, storages_of


class SavedTensor:
    """What autograd holds in place of a tensor; `keys` are the storages that it counts for."""

    __slots__ = ("_keys", "_owner", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, keys: tuple[int, ...], owner: SavedTensors) -> None:
        # a saved output must not hold its own node: autograd would never let either go
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version
        self._keys = keys
        self._owner = owner

    @property
    def is_counted(self) -> bool:
        return bool(self._keys)

    def unpack(self) -> torch.Tensor:
        """The tensor; raises torch's own `RuntimeError` where it was changed in place, which hooks hide from torch."""
        tensor = self._tensor
        if tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
                f"{self._version} instead. Hint: work on a clone, or change it only after the backward."
            )
        return tensor

    def __del__(self) -> None:
        self._owner.let_go(self._keys)


class SavedTensors:
    """Counts storages by how many saved tensors lie in them; `on_change` is called after each change of `num_bytes`."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.num_bytes = 0
        self._on_change = on_change
        self._uses: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._until_freed: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def save(self, tensor: torch.Tensor, is_activation: bool) -> SavedTensor:
        """What to hand to autograd; counted where it is an activation."""
        keys = tuple(self._hold(storage) for storage in storages_of(tensor)) if is_activation else ()
        saved = SavedTensor(tensor, keys, self)
        if keys:
            self._on_change()
        return saved

    def count_until_freed(self, tensor: torch.Tensor) -> None:
        """Counts a tensor that somebody else keeps for a backward, for as long as its memory lives."""
        for storage in storages_of(tensor):
            key = key_of(storage)
            if key not in self._until_freed:
                self._hold(storage)
                self._until_freed[key] = weakref.ref(storage, functools.partial(self._freed, key))
                self._on_change()

    def let_go(self, keys: tuple[int, ...]) -> None:
        """These storages have one saved tensor less."""
        before = self.num_bytes
        for key in keys:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self.num_bytes -= self._bytes.pop(key)
        if self.num_bytes != before:
            self._on_change()

    def _hold(self, storage: torch.UntypedStorage) -> int:
        key = key_of(storage)
        if key not in self._uses:
            self._uses[key] = 0
            self._bytes[key] = storage.nbytes()
            self.num_bytes += self._bytes[key]
        self._uses[key] += 1
        return key

    def _freed(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        del self._until_freed[key]
        self.let_go((key,))
