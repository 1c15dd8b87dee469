"""Every way to generate that notebook 11 shows gives the tokens of one process, at other sizes than the notebook's too.

The functions under test are the notebook's own: its imports and definitions, without what it runs.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import nbformat
import pytest
import torch

import vizkit as vk
from vizkit.runtime.gpt import GPT, TINY, generate

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "11_inference.ipynb"
USED = {
    *("cache_of", "trained", "phase", "likeliest", "generate", "answer"),
    *("replicas", "Stage", "in_rounds", "received", "staged"),
    *("keep", "split_by_heads", "by_heads", "PLAN", "with_plan"),
    *("drawn", "with_own_seed", "from_rank_0"),
}
WHOLE = TINY
UNEVEN = vk.Transformer(num_layers=4, hidden=48, heads=6, vocab=64, seq=24, tied_embeddings=False, final_norm=True)
GROUPED = vk.Transformer(num_layers=4, hidden=32, heads=8, kv_heads=2, vocab=64, seq=24, tied_embeddings=False)
PROMPT, NEW, REQUESTS = 7, 5, 6


@functools.cache
def lesson(sizes: vk.Transformer) -> types.SimpleNamespace:
    """The notebook's functions, for an untrained model of these sizes and prompts of random tokens."""
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    names: dict[str, object] = {"__name__": "__main__"}  # so that the functions travel by value, as from a cell
    for node in (node for source in cells for node in ast.parse(source).body):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or _defined(node) in USED:
            exec(compile(ast.Module([node], []), NOTEBOOK.name, "exec"), names)
    prompts = torch.randint(sizes.vocab, (REQUESTS, PROMPT), generator=torch.Generator().manual_seed(3))
    names |= {
        "SIZES": sizes,
        "WEIGHTS": GPT(sizes, seed=5).state_dict(),
        "PROMPTS": prompts,
        "PROMPT": PROMPT,
        "NEW": NEW,
    }
    return types.SimpleNamespace(**names)


def _defined(node: ast.stmt) -> str | None:
    """The name of a function or a class, or the variable that a statement sets or adds to."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else getattr(node, "name", None)


WAYS = {
    "replicas": lambda names: names.replicas,
    "layer-wise": lambda names: partial(names.staged, 1),
    "pipeline of fewer groups than ranks": lambda names: partial(names.staged, 2),
    "pipeline of unequal groups": lambda names: partial(names.staged, 4),
    "pipeline of single requests": lambda names: partial(names.staged, REQUESTS),
    "by heads": lambda names: names.by_heads,
    "with PyTorch": lambda names: names.with_plan,
}
SIZES = {1: WHOLE, 2: GROUPED, 3: UNEVEN, 4: WHOLE}


@functools.cache
def answers(world_size: int) -> tuple[dict, ...]:
    """What each rank returns in each way, one after the other in one launch."""
    names = lesson(SIZES[world_size])
    ways = {name: way(names) for name, way in WAYS.items()}
    return vk.launch(lambda: {name: way() for name, way in ways.items()}, world_size=world_size, device="cpu").results


def tokens_of(results: Iterable[dict]) -> list[dict]:
    return [{"tokens": rank["tokens"]} for rank in results]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", SIZES)
def test_the_tokens_are_those_of_one_process(way: str, world_size: int) -> None:
    """At 1 to 4 ranks: uneven stages and replicas, groups of unequal size, six heads on three, grouped queries."""
    names = lesson(SIZES[world_size])
    truth = generate(GPT(names.SIZES, seed=5).requires_grad_(False), names.PROMPTS, NEW)[:, PROMPT:]
    found = vk.parity(tokens_of(rank[way] for rank in answers(world_size)), {"tokens": dict(enumerate(truth))})
    assert found, str(found)


@pytest.mark.parametrize("world_size", SIZES)
def test_each_rank_keeps_its_heads_of_the_cache(world_size: int) -> None:
    """Bytes of the real cache by the formula; the last token is never fed back."""
    whole = vk.memory.key_value_cache(SIZES[world_size], batch=REQUESTS, tokens=PROMPT + NEW - 1, number_bytes=4)
    for way in ("by heads", "with PyTorch"):
        assert [rank[way]["cache"] for rank in answers(world_size)] == [whole / world_size] * world_size


def test_heads_that_do_not_divide_are_refused() -> None:
    """Two key-value heads do not go round three ranks, and the rank says so before it computes."""
    with pytest.raises(vk.RankFailedError, match=r"tp=3: does not divide key-value heads=2; use tp=2"):
        vk.launch(lesson(GROUPED).by_heads, world_size=3, device="cpu")


def test_the_draw_of_one_rank_is_everybodys() -> None:
    """Ranks with seeds of their own draw different tokens; broadcast, all have those that rank 0 draws alone."""
    names = lesson(UNEVEN)
    choices = {"apart": names.drawn, "together": names.from_rank_0}
    run = vk.launch(
        lambda: {name: names.with_own_seed(choose) for name, choose in choices.items()}, world_size=3, device="cpu"
    )
    apart, together = (tokens_of(rank[name] for rank in run.results) for name in choices)
    assert not vk.parity(apart, apart[0])
    torch.manual_seed(7)
    alone, _ = names.generate(names.trained(), names.PROMPTS, names.drawn)
    assert vk.parity(together, {"tokens": dict(enumerate(alone))})
