"""A rank with a CPU quota: slow on the wall clock, the same on the virtual one."""

from __future__ import annotations

import copy
import signal
import threading
import time

import pytest
import torch
from torch import distributed as dist
from torch import nn

import vizkit as vk
from vizkit.runtime.throttle import repeated, throttled

SHARE = 0.2


def burn(seconds: float) -> float:
    """Uses so much CPU time, and says how much time passed."""
    start_s, until_s = time.monotonic(), time.process_time() + seconds
    while time.process_time() < until_s:
        pass
    return time.monotonic() - start_s


def test_a_throttled_process_gets_no_more_than_its_share() -> None:
    """Whatever else runs on the machine: 0.1 s of CPU time at a fifth of a core take nearly 0.5 s, or more."""
    with throttled(SHARE):
        assert burn(0.1) > 0.1 / SHARE * 0.8


def test_afterwards_the_process_is_as_before() -> None:
    before = signal.getsignal(signal.SIGPROF)
    with pytest.raises(ZeroDivisionError), throttled(SHARE):
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_inside_another_the_smaller_share_counts_and_the_outer_one_goes_on() -> None:
    with throttled(SHARE):
        with throttled(0.9):
            assert burn(0.05) > 0.05 / SHARE * 0.8
        assert burn(0.05) > 0.05 / SHARE * 0.8


def test_a_timer_that_runs_already_goes_on() -> None:
    """As a profiler's, with its handler."""
    ticks: list[int] = []
    before = signal.signal(signal.SIGPROF, lambda signum, _: ticks.append(signum))
    try:
        signal.setitimer(signal.ITIMER_PROF, 0.01, 0.01)
        with throttled(SHARE):
            pass
        burn(0.1)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert ticks


def throttled_rank() -> tuple[float, float]:
    """Rank 1 has the quota; both end with one all-reduce of what they computed."""
    total = torch.ones(1000) * dist.get_rank()
    if dist.get_rank() == 0:
        with vk.span("work", kind="F"):
            passed_s = burn(0.1)
    else:
        with throttled(SHARE), vk.span("work", kind="F"):
            passed_s = burn(0.1)
    dist.all_reduce(total)
    return passed_s, total.sum().item()


def test_a_throttled_rank_is_slow_on_the_wall_clock_only() -> None:
    """Its collectives still work, its F takes nearly 0.5 s of wall time, and 0.1 s of CPU time, which replay reads."""
    run = vk.launch(throttled_rank, world_size=2, device="cpu")
    passed_s, sums = zip(*run.results, strict=True)
    assert sums == (1000.0, 1000.0)
    assert passed_s[1] > 0.1 / SHARE * 0.8
    wall, virtual = (t.filter(kind="F", rank=1) for t in (run.trace, run.replay()))
    assert wall.duration_ns / 1e9 > 0.1 / SHARE * 0.8
    assert virtual.duration_ns / 1e9 < 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "share=0: must be over 0 and at most 1; use 0.25 for a quarter"),
        ((1.5,), "share=1.5: must be over 0 and at most 1; use 0.25 for a quarter"),
        ((float("nan"),), "share=nan: must be over 0 and at most 1; use 0.25 for a quarter"),
        (("half",), "share='half': must be over 0 and at most 1; use 0.25 for a quarter"),
        ((1e-320,), "share=1e-320: is so small that nothing would get done; use 0.001 or more"),
        ((0.5, 0), "slice_s=0: must be positive and finite; use 0.005 for 5 ms"),
        ((0.5, 1e30), "slice_s=1e+30: must be at most a minute; use 0.005 for 5 ms"),
    ],
)
def test_another_share_is_refused(arguments, message: str) -> None:
    with pytest.raises(vk.InvalidInputError) as caught, throttled(*arguments):
        pass
    assert str(caught.value) == message


def test_only_the_main_thread_can_be_throttled() -> None:
    found: list[str] = []

    def enter() -> None:
        try:
            with throttled(SHARE):
                pass
        except vk.InvalidInputError as error:
            found.append(str(error))

    thread = threading.Thread(target=enter, name="side")
    thread.start()
    thread.join()
    assert found == ["thread='side': only the main thread gets signals; throttle the main thread"]


@pytest.mark.parametrize("times", [1, 2, 5])
def test_repeated_work_gives_the_same_output_and_gradients(times: int) -> None:
    """It is called and differentiated so many times, and changes nothing but rounding."""
    calls: list[str] = []
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.ones(3, 4, requires_grad=True)
    parameters = [x, *model.parameters()]
    expected = model(x).sum()
    gradients = torch.autograd.grad(expected, parameters)
    model[1].register_forward_hook(lambda *_: calls.append("F"))
    model[1].register_full_backward_hook(lambda *_: calls.append("B"))
    repeated(model, times)
    found = model(x).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, parameters), gradients)
    assert calls == ["F"] * times + ["B"] * times


def test_work_is_repeated_a_whole_number_of_times() -> None:
    with pytest.raises(vk.InvalidInputError) as caught:
        repeated(nn.Identity(), 0)
    assert str(caught.value) == "times=0: must be a whole number, at least 1; use times=1"


class Scaled(nn.Module):
    """Gives two outputs where asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, *, pair: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return (x, x) if pair else x * self.weight


def test_a_deep_copy_of_repeated_work_has_its_own_parameters() -> None:
    """Also where it is repeated twice over."""
    module = repeated(repeated(Scaled(), 2), 3)
    other = copy.deepcopy(module)
    nn.init.constant_(other.weight, 5.0)
    assert (module(torch.ones(1)).item(), other(torch.ones(1)).item()) == (1, 5)


def test_only_one_tensor_is_repeated() -> None:
    """Arguments by name reach the module."""
    with pytest.raises(vk.InvalidInputError) as caught:
        repeated(Scaled(), 2)(torch.ones(1), pair=True)
    rule = "must be one floating-point tensor to be repeated; repeat a module inside this one"
    assert str(caught.value) == f"output='tuple': {rule}"
