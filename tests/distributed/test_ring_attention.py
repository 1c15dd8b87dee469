"""Ring attention on real ranks is attention in one process: results, gradients, messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import vizkit as vk
from vizkit.runtime.gpt import causal_attention
from vizkit.runtime.ring_attention import Deal, RingAttention

SEQ, WIDTH = 24, 4


def whole(query_heads: int = 4, key_heads: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v and a gradient of the result, for the whole sequence."""
    drawn = torch.Generator().manual_seed(0)
    heads = (query_heads, key_heads, key_heads, query_heads)
    return [torch.randn(2, count, SEQ, WIDTH, generator=drawn, dtype=torch.float32).to(dtype) for count in heads]


def in_one_process(tensors: list[torch.Tensor], causal: bool) -> dict[str, torch.Tensor]:
    q, k, v, grad = (tensor.double() for tensor in tensors)
    q, k, v = (part.requires_grad_() for part in (q, k, v))
    keys, values = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    out = causal_attention(q, keys, values) if causal else torch.softmax(q @ keys.mT * WIDTH**-0.5, -1) @ values
    out.backward(grad)
    return {"out": out, "q": q.grad, "k": k.grad, "v": v.grad}


def on_ring(tensors: list[torch.Tensor], causal: bool, deal: Deal) -> dict[str, torch.Tensor]:
    """This rank's tokens of the result and of the gradients."""
    places = deal.places(SEQ, dist.get_rank(), dist.get_world_size())
    q, k, v, grad = (tensor[:, :, places] for tensor in tensors)
    q, k, v = (part.clone().requires_grad_() for part in (q, k, v))
    out = RingAttention(deal=deal, causal=causal)(q, k, v)
    out.backward(grad)
    return {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}


def at_places(reference: dict[str, torch.Tensor], deal: Deal, rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    places = deal.places(SEQ, rank, num_ranks)
    return {name: value.detach()[:, :, places] for name, value in reference.items()}


def check(num_ranks: int, tensors: list[torch.Tensor], causal: bool, deal: Deal, tolerance: float = 1e-5) -> vk.Run:
    run = vk.launch(on_ring, tensors, causal, deal, world_size=num_ranks, device="cpu")
    reference = in_one_process(tensors, causal)
    for rank, held in enumerate(run.results):
        for name, value in at_places(reference, deal, rank, num_ranks).items():
            torch.testing.assert_close(held[name].double(), value, rtol=tolerance, atol=tolerance)
    return run


class TestParity:
    """Each rank's tokens of the result, and of the gradients of q, k and v, are one process's in float64."""

    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
    @pytest.mark.parametrize("deal", Deal)
    def test_causal(self, num_ranks: int, deal: Deal) -> None:
        check(num_ranks, whole(), True, deal)

    @pytest.mark.parametrize("num_ranks", [1, 3])
    def test_without_a_mask(self, num_ranks: int) -> None:
        check(num_ranks, whole(), False, Deal.CONTIGUOUS)

    @pytest.mark.parametrize("key_heads", [1, 2])
    def test_grouped_queries(self, key_heads: int) -> None:
        """Blocks hold the key heads only: their bytes, not those of repeated heads, go round."""
        run = check(2, whole(key_heads=key_heads), True, Deal.ZIGZAG)
        block = 2 * 2 * key_heads * SEQ // 2 * WIDTH * 4
        assert {span.payload_bytes for span in run.trace.filter(kind="send")} == {block}

    def test_sixteen_bits_add_up_in_thirty_two(self) -> None:
        """Results keep their dtype and are right to its precision."""
        run = check(2, whole(dtype=torch.bfloat16), True, Deal.ZIGZAG, tolerance=3e-2)
        assert {value.dtype for value in run.results[0].values()} == {torch.bfloat16}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_messages(num_ranks: int) -> None:
    """n − 1 blocks forward, n − 1 backward and n gradients of blocks; one rank sends nothing."""
    run = check(num_ranks, whole(), True, Deal.ZIGZAG)
    for rank in range(num_ranks):
        sends = len(run.trace.filter(kind="send", rank=rank))
        assert sends == (0 if num_ranks == 1 else 3 * num_ranks - 2)


@pytest.mark.parametrize("deal, tiles", [(Deal.CONTIGUOUS, [3, 7, 11, 15]), (Deal.ZIGZAG, [9, 9, 9, 9])])
def test_work(deal: Deal, tiles: list[int]) -> None:
    """Zig-zag gives each rank the same number of tiles."""
    run = vk.launch(on_ring, whole(), True, deal, world_size=4, device="cpu")
    trace = run.replay(durations={"F": 1})
    assert [len(trace.filter(kind="F", rank=rank)) for rank in range(4)] == tiles


def in_pairs(tensors: list[torch.Tensor]) -> torch.Tensor:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    places = Deal.ZIGZAG.places(SEQ, mesh.get_local_rank("cp"), 2)
    q, k, v, _ = (tensor[:, :, places] for tensor in tensors)
    return RingAttention(mesh.get_group("cp"))(q, k, v)


def test_a_group_is_a_ring_of_its_own() -> None:
    """On a 2 × 2 mesh each pair along cp has the whole sequence."""
    run = vk.launch(in_pairs, whole(), world_size=4, device="cpu")
    reference = in_one_process(whole(), causal=True)
    for rank, out in enumerate(run.results):
        expected = at_places(reference, Deal.ZIGZAG, rank % 2, 2)["out"].float()
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def shaped(*shapes: tuple[int, ...]) -> Any:
    return lambda: RingAttention()(*map(torch.zeros, shapes))


@pytest.mark.parametrize("call, says", [
    (shaped((1, 4, 6, 2), (1, 3, 6, 2), (1, 3, 6, 2)), "key heads=3: does not divide query heads=4"),
    (shaped((1, 2, 5, 2), (1, 2, 5, 2), (1, 2, 5, 2)), "chunks=2: does not divide tokens of this rank=5"),
    (shaped((1, 2, 6, 2), (1, 2, 4, 2), (1, 2, 4, 2)), "the 6 tokens of q"),
    (lambda: Deal.ZIGZAG.places(30, 0, 4), "2 × num_ranks=8: does not divide seq=30; use 2 × num_ranks=6 or"),
])  # fmt: skip
def test_refused(call: Any, says: str) -> None:
    """What does not divide is refused before anything is sent, with what would."""
    with pytest.raises(vk.InvalidInputError, match=says.replace("(", r"\(")):
        call()
