"""Makes a rank slow on purpose: by a CPU quota that needs no permission, or by more work."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from vizkit.errors import InvalidInputError
from vizkit.sizes import is_number, whole_number

SMALLEST_SHARE = 1e-6
"""A slice of 5 ms is then slept off in an hour and a half; the system's clock cannot count the sleep of far less."""
LONGEST_SLICE_S = 60.0


class _SleepsOff:
    """Handler of `SIGPROF`: sleeps as long as the CPU time used since the last time has earned."""

    def __init__(self, share: float) -> None:
        self.share, self.used_s = share, time.process_time()

    def __call__(self, *_: object) -> None:
        now_s = time.process_time()
        owed_s, self.used_s = (now_s - self.used_s) * (1 / self.share - 1), now_s
        time.sleep(owed_s)


@contextmanager
def throttled(share: float, slice_s: float = 0.005) -> Iterator[None]:
    """Inside it, this process uses at most `share` of one core's time: from 0 (not included) to 1, no throttling.

    After each `slice_s` seconds of CPU time, of all its threads, the process sleeps until its CPU time is that share
    of the time passed, as the kernel does for a container with a quota. So time on the wall clock grows to 1 / share of
    the CPU time or more, and the CPU time, which the virtual clock reads, stays about as it is. One long operation is
    not interrupted; the sleep that it has earned comes after it. Works in the main thread only, by `SIGPROF`; a timer
    for that signal that runs already goes on afterwards. Of two, one inside the other, the smaller share counts.

    Raises `InvalidInputError` for another share or one below 1e-6, for a slice that is not positive or over a minute,
    and outside the main thread.

    >>> with throttled(0.25):
    ...     start_s, cpu_start_s = time.monotonic(), time.process_time()
    ...     while time.process_time() < cpu_start_s + 0.02:
    ...         pass
    >>> time.monotonic() - start_s > 0.04
    True
    """
    if not (is_number(share) and 0 < share <= 1):
        raise InvalidInputError.because("share", share, "must be over 0 and at most 1", "use 0.25 for a quarter")
    if share < SMALLEST_SHARE:
        raise InvalidInputError.because("share", share, "is so small that nothing would get done", "use 0.001 or more")
    if not (is_number(slice_s) and 0 < slice_s < float("inf")):
        raise InvalidInputError.because("slice_s", slice_s, "must be positive and finite", "use 0.005 for 5 ms")
    if slice_s > LONGEST_SLICE_S:
        raise InvalidInputError.because("slice_s", slice_s, "must be at most a minute", "use 0.005 for 5 ms")
    if threading.current_thread() is not threading.main_thread():
        raise InvalidInputError.because(
            "thread", threading.current_thread().name, "only the main thread gets signals", "throttle the main thread"
        )
    before = signal.getsignal(signal.SIGPROF)
    if isinstance(before, _SleepsOff):
        share = min(share, before.share)
    signal.signal(signal.SIGPROF, _SleepsOff(share))
    left_s, interval_s = signal.setitimer(signal.ITIMER_PROF, slice_s, slice_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        if isinstance(before, _SleepsOff):
            before.used_s = time.process_time()  # what was used inside has been slept off
        signal.signal(signal.SIGPROF, before)
        signal.setitimer(signal.ITIMER_PROF, left_s, interval_s)


def repeated(module: nn.Module, times: int) -> nn.Module:
    """`module` itself, made slow: each call computes its output `times` times and gives the mean of these equal values.

    So output and gradients stay what they are, up to rounding, and forward, backward and the memory between them take
    `times` as much. Unlike a quota, this shows in CPU time. The output has to be one tensor, the same each time (no
    dropout). A deep copy of it is as slow, and computes with its own parameters.

    Raises `InvalidInputError` for times that are not a whole number of at least 1 and, when called, for an output that
    is no floating-point tensor.

    >>> import torch
    >>> layer, x = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    >>> repeated(layer, 3)(x).backward()
    >>> layer.weight.grad.round(decimals=5)
    tensor([[1., 1.]])
    """
    times = whole_number("times", times)
    once = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = MethodType(once.__func__, self) if isinstance(once, MethodType) else once
        outputs = [_mean_able(call(*args, **kwargs)) for _ in range(times)]
        return sum(outputs[1:], outputs[0]) / times

    module.forward = MethodType(forward, module)  # a method, so that a deep copy's is bound to the copy
    return module


def _mean_able(output: object) -> torch.Tensor:
    if not (isinstance(output, torch.Tensor) and output.is_floating_point()):
        kind = str(output.dtype) if isinstance(output, torch.Tensor) else type(output).__name__
        raise InvalidInputError.because(
            "output", kind, "must be one floating-point tensor to be repeated", "repeat a module inside this one"
        )
    return output
