"""Placements, pieces and redistributions as data: torch.chunk's cuts, the collectives' bytes, refusals."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vizkit as vk
from vizkit.collectives import algorithm_for, wire_bytes
from vizkit.errors import InvalidInputError
from vizkit.sharding import Placement, pieces, redistribution

MESHES = st.sampled_from(
    [vk.Mesh(tp=1), vk.Mesh(tp=3), vk.Mesh(dp=2, tp=2), vk.Mesh(dp=3, cp=1, tp=2), vk.Mesh(pp=2, dp=2, cp=2, tp=2)]
)
VIA_R = 'use "R" first, and then a partial value'
SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


def placements(mesh: vk.Mesh, shape: tuple[int, ...], *others: str) -> st.SearchStrategy[tuple[str, ...]]:
    each = st.sampled_from([*(f"S({dim})" for dim in range(len(shape))), "R", *others])
    return st.tuples(*[each] * len(mesh.names))


class TestPlacement:
    @pytest.mark.parametrize(
        ("text", "parsed"),
        [
            ("S(0)", "S(0)"), ("Shard(1)", "S(1)"), ("Shard(dim=2)", "S(2)"), ("S(-1)", "S(-1)"), (" S( 0 ) ", "S(0)"),
            ("R", "R"), ("Replicate()", "R"), ("P", "P(sum)"), ("P(max)", "P(max)"), ("Partial()", "P(sum)"),
            ("Partial(avg)", "P(avg)"),
        ],
    )  # fmt: skip
    def test_is_read_from_text(self, text: str, parsed: str):
        """Short, as torch prints it, and as it is written in code; what is written can be read again."""
        assert str(Placement.parse(text)) == parsed
        assert Placement.parse(parsed) == Placement.parse(text)

    @pytest.mark.parametrize("nonsense", ["S", "Q", "S(x)", "", "S(0), R", 0, None, "_S(0, 2)"])
    def test_refuses_what_is_none(self, nonsense: object):
        with pytest.raises(InvalidInputError) as caught:
            Placement.parse(nonsense)
        assert str(caught.value) == (
            f"placement={nonsense!r}: is not one that a tensor's axis can have; "
            'use "S(0)" for a shard of dim 0, "R" for a replica or "P" for a partial sum'
        )

    def test_needs_no_torch(self):
        """Torch's placements are known by their names: nothing here imports torch."""
        code = "import sys, vizkit.sharding; assert 'torch' not in sys.modules"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestPieces:
    @pytest.mark.parametrize(
        ("size", "num_ranks", "lengths"),
        [(8, 4, [2, 2, 2, 2]), (5, 4, [2, 2, 1, 0]), (2, 4, [1, 1, 0, 0]), (7, 3, [3, 3, 1]), (6, 1, [6])],
    )
    def test_are_cut_as_torch_chunk_cuts(self, size: int, num_ranks: int, lengths: list[int]):
        """⌈size / ranks⌉ each; the last ranks have less, or nothing."""
        assert pieces(vk.Mesh(tp=num_ranks), (size,), "S(0)").lengths.ravel().tolist() == lengths

    def test_the_inner_axis_cuts_the_outers_piece(self):
        """5 on 2 × 2: 3 and 2, then 2 and 1, 1 and 1; four ranks in a row would have 2, 2, 1 and 0."""
        assert pieces(vk.Mesh(dp=2, tp=2), (5,), ["S(0)", "S(0)"]).lengths.ravel().tolist() == [2, 1, 1, 1]

    def test_ranks_with_the_same_piece_have_its_number(self):
        found = pieces(vk.Mesh(dp=2, tp=2), (4, 4), ["R", "S(1)"])
        assert found.numbers.tolist() == [0, 1, 0, 1]
        assert [found.text(rank) for rank in range(2)] == ["[:, 0:2]", "[:, 2:4]"]

    def test_dims_count_from_the_end_too(self):
        assert pieces(vk.Mesh(tp=2), (4, 6), "S(-1)").text(1) == "[:, 3:6]"

    @given(st.data())
    def test_cover_the_tensor_once_for_each_copy(self, data: st.DataObject):
        """Every element is held by as many ranks as the replicated axes have, and by no other."""
        mesh, shape = data.draw(MESHES), data.draw(SHAPES)
        placed = data.draw(placements(mesh, shape))
        held = np.zeros(shape, int)
        found = pieces(mesh, shape, placed)
        for rank in range(mesh.world_size):
            held[found.slices(rank)] += 1
        copies = np.prod([size for size, text in zip(mesh.sizes, placed, strict=True) if text == "R"])
        assert (held == copies).all()

    @pytest.mark.parametrize(
        ("mesh", "shape", "placed", "message"),
        [
            (vk.Mesh(dp=2, tp=2), (4,), ["R"],
             "placements='R': has 1, and Mesh(dp=2, tp=2) has 2 to place: dp, tp; use ['R', 'R']"),
            (vk.Mesh(tp=2), (4,), ["S(0)", "R"],
             "placements='S(0), R': has 2, and Mesh(tp=2) has 1 to place: tp; use ['S(0)']"),
            (vk.Mesh(tp=2), (4, 4), "S(2)", "placements='S(2)': the tensor has dims 0 to 1; use S(1)"),
            (vk.Mesh(tp=2), (4, 4), "S(-3)", "placements='S(-3)': the tensor has dims 0 to 1; use S(1)"),
            (vk.Mesh(tp=2), (), "R", "shape=(): a tensor to shard has at least one dim; use shape=(8, 8)"),
            (vk.Mesh(tp=2), 4.0, "R", "shape=4.0: is no shape of a tensor; use shape=(8, 8)"),
            (vk.Mesh(tp=2), None, "R", "shape=None: is no shape of a tensor; use shape=(8, 8)"),
            (vk.Mesh(tp=2), "44", "R", "shape='44': is no shape of a tensor; use shape=(8, 8)"),
            (vk.Mesh(tp=2), (2**40, 2**40), "R",
             "shape=(1099511627776, 1099511627776): has more elements than any tensor; use shape=(8, 8)"),
            (vk.Mesh(tp=2), (4, 0), "R", "shape[1]=0: must be a whole number, at least 1; use shape[1]=1"),
            (vk.Mesh(dp=2, tp=2), (4,), ["P", "P(max)"],
             "placements='P(sum), P(max)': one tensor waits for one reduction, not for max and sum; "
             "use one of them for all axes"),
        ],
    )  # fmt: skip
    def test_refuses_what_does_not_fit(self, mesh: vk.Mesh, shape: tuple, placed: object, message: str):
        with pytest.raises(InvalidInputError) as caught:
            pieces(mesh, shape, placed)
        assert str(caught.value) == message


class TestRedistribution:
    @pytest.mark.parametrize(
        ("before", "after", "action", "payload_bytes", "wire_bytes"),
        [
            ("S(0)", "R", "all-gather", 1024, 768), ("P", "R", "all-reduce", 1024, 1536),
            ("P", "S(0)", "reduce-scatter", 1024, 768), ("S(0)", "S(1)", "all-to-all", 256, 192),
            ("R", "S(1)", "local slice", 0, 0), ("R", "P", "division by 4", 0, 0),
            ("R", "P(max)", "R kept as P(max)", 0, 0),
        ],
    )  # fmt: skip
    def test_one_axis(self, before: str, after: str, action: str, payload_bytes: int, wire_bytes: float):
        """16 × 16 float32 on 4 ranks, S = 1,024 B: (n−1)/n S to gather or scatter, 2(n−1)/n S to all-reduce,
        (n−1)/n S/n for an all-to-all of S/n."""
        (step,) = redistribution(vk.Mesh(tp=4), (16, 16), before, after)
        assert (step.action, step.axis) == (action, "tp")
        assert step.payload_bytes == (payload_bytes,) * 4
        assert step.wire_bytes == (wire_bytes,) * 4

    def test_pieces_are_padded_to_the_largest(self):
        """5 rows on 4 ranks: 2 each, so 8 rows travel in place of 5."""
        (step,) = redistribution(vk.Mesh(tp=4), (5, 3), "S(0)", "R", element_bytes=2)
        assert step.payload_bytes[0] == 8 * 3 * 2

    def test_what_the_inner_axis_cuts_becomes_whole_first(self):
        """(S(0), S(0)) → (R, S(0)): the inner axis cannot keep its pieces of pieces."""
        steps = redistribution(vk.Mesh(dp=2, tp=2), (8,), ["S(0)", "S(0)"], ["R", "S(0)"])
        assert [(step.axis, step.change, step.action) for step in steps] == [
            ("tp", "S(0) → R", "all-gather"),
            ("dp", "S(0) → R", "all-gather"),
            ("tp", "R → S(0)", "local slice"),
        ]

    def test_groups_of_one_axis_may_differ(self):
        """5 on dp 2: 3 and 2 rows; along tp the first group gathers 2 · 2 rows, the second 2 · 1."""
        (step, _) = redistribution(vk.Mesh(dp=2, tp=2), (5,), ["S(0)", "S(0)"], ["R", "R"], element_bytes=1)
        assert step.payload_bytes == (4, 4, 2, 2)

    @pytest.mark.parametrize("same", ["S(0)", "R", "P"])
    def test_the_same_placement_needs_no_step(self, same: str):
        assert redistribution(vk.Mesh(tp=4), (8, 8), same, same) == ()

    def test_an_axis_of_one_rank_sends_nothing(self):
        (step,) = redistribution(vk.Mesh(tp=1), (8,), "S(0)", "R")
        assert (step.action, step.kind, step.payload_bytes, list(step.moves())) == ("nothing to do", None, (0,), [])

    def test_on_cpu_an_all_to_all_is_an_all_gather(self):
        """DTensor's fallback for gloo: n times the payload."""
        (step,) = redistribution(vk.Mesh(tp=4), (16, 16), "S(0)", "S(1)", backend="gloo")
        assert (step.action, step.payload_bytes[0], step.wire_bytes[0]) == ("all-gather", 1024, 768)

    @pytest.mark.parametrize("backend", ["", "gloo", "nccl"])
    @pytest.mark.parametrize("pair", [("S(0)", "R"), ("P", "R"), ("P", "S(0)"), ("S(0)", "S(1)")])
    def test_wire_bytes_are_those_of_the_algorithm(self, pair: tuple[str, str], backend: str):
        """`vizkit.collectives.wire_bytes`, where chunks are even."""
        (step,) = redistribution(vk.Mesh(tp=4), (16, 16), *pair, backend=backend)
        matrix = wire_bytes(step.kind, algorithm_for(step.kind, backend), 4, step.payload_bytes[0])
        assert list(step.wire_bytes) == matrix.sum(axis=1).tolist()

    @given(st.data())
    def test_each_rank_comes_to_hold_its_piece(self, data: st.DataObject):
        """Played with real arrays: a rank's own part and the moves make its new piece, in every step of every pair."""
        mesh, shape = data.draw(MESHES), data.draw(SHAPES)
        before, after = data.draw(placements(mesh, shape)), data.draw(placements(mesh, shape))
        whole = np.arange(1, 1 + np.prod(shape)).reshape(shape)
        held = pieces(mesh, shape, before)
        for step in redistribution(mesh, shape, before, after):
            known = [np.zeros(shape, int) for _ in range(mesh.world_size)]
            for rank, copy in enumerate(known):
                copy[held.slices(rank)] = whole[held.slices(rank)]
            for move in step.moves():
                part = tuple(map(slice, move.start, move.stop))
                assert (known[move.src][part] != 0).all()
                known[move.dst][part] = whole[part]
            held = step.after
            for rank, copy in enumerate(known):
                np.testing.assert_array_equal(copy[held.slices(rank)], whole[held.slices(rank)])
        assert (held.start == pieces(mesh, shape, after).start).all()
        assert (held.stop == pieces(mesh, shape, after).stop).all()

    @pytest.mark.parametrize(
        ("before", "after", "message"),
        [
            ("S(0)", "P", f"after='P(sum)': no collective makes it of S(0); {VIA_R}"),
            ("P", "P(max)", f"after='P(max)': no collective makes it of P(sum); {VIA_R}"),
            ("R", ["R", "R"], "after='R, R': has 2, and Mesh(tp=2) has 1 to place: tp; use ['R']"),
            ("S(1)", "R", "before='S(1)': the tensor has dims 0 to 0; use S(0)"),
        ],
    )  # fmt: skip
    def test_refuses_what_dtensor_does_not_have(self, before: object, after: object, message: str):
        with pytest.raises(InvalidInputError) as caught:
            redistribution(vk.Mesh(tp=2), (8,), before, after)
        assert str(caught.value) == message

    def test_refuses_elements_of_no_bytes(self):
        with pytest.raises(InvalidInputError, match=r"^element_bytes=0: must be a whole number, at least 1"):
            redistribution(vk.Mesh(tp=2), (8,), "S(0)", "R", element_bytes=0)
