"""What a planner asks a hundred thousand times: memory and bytes of a layout, against asking real modules and ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

import vizkit as vk
from tests.benchmarks.conftest import Compare, Row
from vizkit.runtime.gpt import GPT

TINY = vk.Transformer(num_layers=4, hidden=64, heads=8, vocab=96, seq=32, tied_embeddings=False, final_norm=True)
LARGE = vk.Transformer(num_layers=96, hidden=12288, heads=96, vocab=51200, seq=2048)
SIZES = {"dp": 8, "tp": 8, "pp": 8, "num_microbatches": 64, "zero_stage": 1, "schedule": "Interleaved1F1B",
         "stages_per_rank": 3, "sequence_parallel": True, "recompute": "selective"}  # fmt: skip


def microseconds(ask: Callable[[], object], times: int = 200, repeats: int = 15) -> float:
    """The quickest of several, in CPU time: whatever else the machine does only adds."""
    ask()
    quickest = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        for _ in range(times):
            ask()
        quickest = min(quickest, time.process_time() - started)
    return quickest / times * 1e6


def bytes_of_modules(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_memory_and_volume_of_a_layout(compare: Compare) -> None:
    """A model of 175 billion parameters on 512 ranks takes no longer than adding up the parameters of a tiny module."""
    with torch.device("meta"):
        modules = GPT(TINY)
    assert bytes_of_modules(modules) == vk.memory.per_rank(TINY, vk.Layout(precision="fp32_adam")).parameters_bytes
    peer, layout = microseconds(lambda: bytes_of_modules(modules)), vk.Layout(**SIZES)
    for what, ask, limit in (
        ("layout, checked", lambda: vk.Layout(**SIZES), 0.2),
        ("memory of a rank", lambda: vk.memory.per_rank(LARGE, layout), 0.35),
        ("bytes that a step moves", lambda: vk.volume.movements(LARGE, layout), 0.8),
    ):
        compare(Row(what, microseconds(ask), peer, "summing a tiny module's parameters", "us", limit))


def test_more_ranks_take_no_longer(compare: Compare) -> None:
    """512 pipeline ranks against 2: only the ends and the fullest in between are looked at."""
    deep = vk.Transformer(num_layers=512, hidden=12288, heads=96, vocab=51200, seq=2048)
    few, many = (vk.Layout(dp=8, tp=8, pp=pp, num_microbatches=512) for pp in (2, 512))
    for what, ask in (("memory", vk.memory.per_rank), ("bytes", vk.volume.movements)):
        ours, peer = (microseconds(lambda at=at, ask=ask: ask(deep, at)) for at in (many, few))
        compare(Row(f"{what}, 32,768 ranks", ours, peer, "128 ranks", "us", 2.0))
