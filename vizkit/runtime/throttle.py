"""Makes a rank slow on purpose: by a CPU quota that needs no permission, or by more work."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from vizkit.errors import InvalidInputError
from vizkit.sizes import is_number, whole_number


@contextmanager
def throttled(share: float, slice_s: float = 0.005) -> Iterator[None]:
    """Inside it, this process uses at most `share` of one core's time: from 0 (not included) to 1, no throttling.

    After each `slice_s` seconds of CPU time, of all its threads, the process sleeps until its CPU time is that share
    of the time passed, as the kernel does for a container with a quota. So time on the wall clock grows to 1 / share of
    the CPU time or more, and the CPU time, which the virtual clock reads, stays about as it is. One long operation is
    not interrupted; the sleep that it has earned comes after it. Works in the main thread only, by `SIGPROF`.

    Raises `InvalidInputError` for another share, for a slice that is not positive, and outside the main thread.

    >>> with throttled(0.25):
    ...     start_s, cpu_start_s = time.monotonic(), time.process_time()
    ...     while time.process_time() < cpu_start_s + 0.02:
    ...         pass
    >>> time.monotonic() - start_s > 0.04
    True
    """
    if not (is_number(share) and 0 < share <= 1):
        raise InvalidInputError.because("share", share, "must be over 0 and at most 1", "use 0.25 for a quarter")
    if not (is_number(slice_s) and 0 < slice_s < float("inf")):
        raise InvalidInputError.because("slice_s", slice_s, "must be positive and finite", "use 0.005 for 5 ms")
    if threading.current_thread() is not threading.main_thread():
        raise InvalidInputError.because(
            "thread", threading.current_thread().name, "only the main thread gets signals", "throttle the main thread"
        )
    used_s = time.process_time()

    def sleep_off(*_: object) -> None:
        nonlocal used_s
        now_s = time.process_time()
        owed_s, used_s = (now_s - used_s) * (1 / share - 1), now_s
        time.sleep(owed_s)

    before = signal.signal(signal.SIGPROF, sleep_off)
    signal.setitimer(signal.ITIMER_PROF, slice_s, slice_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def repeated(module: nn.Module, times: int) -> nn.Module:
    """`module` itself, made slow: each call computes its output `times` times and gives the mean of these equal values.

    So output and gradients stay what they are, up to rounding, and forward, backward and the memory between them take
    `times` as much. Unlike a quota, this shows in CPU time. The output has to be one tensor, the same each time (no
    dropout). Raises `InvalidInputError` for times that are not a whole number of at least 1.

    >>> import torch
    >>> layer, x = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    >>> repeated(layer, 3)(x).backward()
    >>> layer.weight.grad.round(decimals=5)
    tensor([[1., 1.]])
    """
    times = whole_number("times", times)
    once = module.forward
    module.forward = lambda *args: sum(once(*args) for _ in range(times)) / times
    return module
