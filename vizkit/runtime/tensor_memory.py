"""Notes what a rank's tensors hold over time: parameters, gradients, optimizer state, activations.

Torch's own `MemTracker` sees more (temporaries), but as a dispatch mode it enters every operator from Python; hooks of
autograd and a look at the modules cost a fraction of that, work with every wrapper, and are public.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns, thread_time_ns
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from vizkit.memory_samples import MemorySamples, rows_to_keep
from vizkit.runtime.model_states import ModelStates, Watched
from vizkit.runtime.recorder import Recorder, current_recorder
from vizkit.runtime.saved_tensors import SavedTensor, SavedTensors

MAX_SAMPLES = 600
"""Of one rank in a record; of more, those that hold the peaks stay."""
MAX_RAW_SAMPLES = 30 * MAX_SAMPLES


class track_memory:  # noqa: N801 - reads as a statement: with vk.track_memory(...)
    """Notes inside it, over time, the bytes that this rank's tensors hold; outside a rank it does nothing.

    `model` is a module, a `vk.Pipeline`, or a list or dict of modules (or of tensors that serve as parameters);
    `optimizer` an optimizer, a list of them, or dicts and lists of tensors that hold state by hand, or None. The run's
    traces then have counters "parameters", "gradients", "optimizer" and "activations" in bytes, on both clocks:
    distinct storages, each whole, of what lies on this rank. Gathered parameters count while they live. Activations are
    the tensors that autograd keeps for backwards, those that recomputation makes again included; parameters,
    gradients and buffers are none. Not counted: a count of steps (one number a parameter), and whatever else the
    program holds, such as DDP's buckets and temporaries. Uses may nest and follow one another.
    Raises `InvalidInputError` for something else than modules and optimizers.

    >>> import torch, vizkit as vk
    >>> def train():
    ...     model = torch.nn.Linear(8, 4)
    ...     optimizer = torch.optim.Adam(model.parameters())
    ...     with vk.track_memory(model, optimizer):
    ...         model(torch.ones(2, 8)).pow(2).sum().backward()
    ...         optimizer.step()
    >>> print(vk.metrics.peak_memory(vk.launch(train, world_size=1).trace))
    peak memory of tensors by rank, ...
    rank  parameters  gradients  optimizer  activations    sum
       0       144 B      144 B      288 B          0 B  576 B
    """

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self._watched = Watched(model, optimizer)
        self._trackers: list[TensorTracker | None] = []

    def __enter__(self) -> track_memory:
        recorder = current_recorder()
        tracker = None if recorder is None else TensorTracker.of(recorder)
        self._trackers.append(tracker)
        if tracker is not None:
            tracker.begin(self._watched)
        return self

    def __exit__(self, *exception: object) -> None:
        if (tracker := self._trackers.pop()) is not None:
            tracker.end(self._watched)


def _off_the_clock(method: Callable[..., Any]) -> Callable[..., Any]:
    """The CPU time of the outermost such method is vizkit's own, not the program's."""

    @functools.wraps(method)
    def timed(self: TensorTracker, *args: Any) -> Any:
        if self._is_timing or get_ident() != self._recorder.thread:
            return method(self, *args)
        began = thread_time_ns()
        self._is_timing = True
        try:
            return method(self, *args)
        finally:
            self._is_timing = False
            self._recorder.clock.leave_out(thread_time_ns() - began)

    return timed


class TensorTracker:
    """Tracks one rank for all `track_memory` that are open; the recorder calls `look` at its events."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_timing = self._is_looking = False
        self._watched: list[Watched] = []
        self._undo: list[list[Callable[[], None]]] = []
        self._states = ModelStates(self._meet)
        self._saved = SavedTensors(self._sample)
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._rows: list[tuple[int, ...]] = []

    @classmethod
    def of(cls, recorder: Recorder) -> TensorTracker:
        """The tracker of this recorder, from its first use on."""
        if recorder.tensors is None:
            recorder.tensors = cls(recorder)
            recorder.leave_out_own_time()
        return recorder.tensors

    @_off_the_clock
    def begin(self, watched: Watched) -> None:
        if not self._watched:
            self._take_over_hooks()
        self._watched.append(watched)
        self._undo.append([])
        for module in watched.modules:
            self._hook(module)
        self._look(True)

    @_off_the_clock
    def end(self, watched: Watched) -> None:
        self._look(True)
        position = len(self._watched) - 1 - self._watched[::-1].index(watched)
        del self._watched[position]
        for undo in self._undo.pop(position):
            undo()
        if not self._watched:
            self._give_back_hooks()

    @_off_the_clock
    def look(self, with_optimizers: bool = False) -> None:
        """Reads what the modules hold by now, and notes it."""
        self._look(with_optimizers)

    def samples(self, since_wall_ns: int, until_wall_ns: int) -> MemorySamples:
        """What was noted in this stretch of time, at most `MAX_SAMPLES` rows."""
        rows = np.array([row for row in self._rows if since_wall_ns <= row[0] <= until_wall_ns], np.int64)
        rows = rows.reshape(-1, 5)
        rows = rows[rows_to_keep(rows[:, 1:], MAX_SAMPLES)]
        return MemorySamples(rows[:, 0], rows[:, 1:])

    def _look(self, with_optimizers: bool) -> None:
        if self._watched and not self._is_looking:
            self._is_looking = True
            try:
                self._states.look(self._watched, with_optimizers)
            finally:
                self._is_looking = False
            self._sample()

    def _sample(self) -> None:
        row = (monotonic_ns(), *self._states.num_bytes, self._saved.num_bytes)
        if self._rows and self._rows[-1][1:] == row[1:]:
            return
        self._rows.append(row)
        if len(self._rows) > MAX_RAW_SAMPLES:
            kept = rows_to_keep(np.array(self._rows, np.int64)[:, 1:], MAX_RAW_SAMPLES // 4)
            self._rows[:] = [self._rows[i] for i in kept.tolist()]

    def _hook(self, module: nn.Module) -> None:
        """Looks where memory may have come or gone since the last event: after other hooks, which gather and free."""
        undo = self._undo[-1]
        if module._forward_hooks:
            undo.append(module.register_forward_hook(lambda *_: self.look()).remove)
        if module._parameters:
            undo.append(module.register_forward_pre_hook(lambda module, _: self._check(module)).remove)

    @_off_the_clock
    def _check(self, module: nn.Module) -> None:
        if not all(self._states.is_current(p) for p in module._parameters.values() if p is not None):
            self._look(False)

    def _meet(self, parameter: torch.Tensor) -> None:
        if parameter.is_leaf and parameter.requires_grad and self._undo:
            self._undo[-1].append(parameter.register_post_accumulate_grad_hook(self._gradient_came).remove)

    @_off_the_clock
    def _gradient_came(self, parameter: torch.Tensor) -> None:
        self._states.add_gradient(parameter)
        self._sample()

    # Autograd's hooks.

    @_off_the_clock
    def _pack(self, tensor: torch.Tensor) -> SavedTensor:
        return self._saved.save(tensor, self._is_activation(tensor))

    @_off_the_clock
    def _unpack(self, saved: SavedTensor) -> torch.Tensor:
        tensor = saved.unpack()
        if not saved.is_counted and not self._states.knows(tensor):  # a parameter, gathered anew for the backward
            self._look(False)
        return tensor

    def _is_activation(self, tensor: torch.Tensor) -> bool:
        if self._states.holds(tensor):
            if self._states.knows(tensor):
                return False
            self._look(False)  # a gradient may have gone meanwhile, and its memory be used again
            return not self._states.holds(tensor)
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter):  # gathered since the last look, or of a module that nobody watches
            self._look(False)
            return False
        return True

    def _take_over_hooks(self) -> None:
        self._hooks.__enter__()
        self._enter = saved_tensors_hooks.__enter__
        enter = self._enter

        def entering(hooks: saved_tensors_hooks) -> None:
            if self._recorder.is_in_backward:  # a block computed again keeps its tensors by hooks of its own
                hooks.pack_hook = self._counting(hooks.pack_hook)
            enter(hooks)

        saved_tensors_hooks.__enter__ = entering  # type: ignore[method-assign]

    def _give_back_hooks(self) -> None:
        saved_tensors_hooks.__enter__ = self._enter  # type: ignore[method-assign]
        self._hooks.__exit__()

    def _counting(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        @functools.wraps(pack)
        def counting(tensor: torch.Tensor) -> Any:
            self._count_again(tensor)
            return pack(tensor)

        return counting

    @_off_the_clock
    def _count_again(self, tensor: torch.Tensor) -> None:
        if self._is_activation(tensor):
            self._saved.count_until_freed(tensor)
