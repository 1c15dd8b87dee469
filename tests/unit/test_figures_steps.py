"""A collective step by step: cells, messages and captions against what `vizkit.collectives` says."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pytest

import vizkit as vk
from vizkit import collectives
from vizkit.collectives import algorithms_for
from vizkit.errors import InvalidInputError
from vizkit.trace import COLLECTIVE_KINDS

EVERY = [(kind, algorithm) for kind in COLLECTIVE_KINDS for algorithm in algorithms_for(kind)]


def labels(fig: go.Figure) -> list[str]:
    return [step.label for step in fig.layout.sliders[0].steps]


def captions(fig: go.Figure) -> list[str]:
    return [frame.layout.annotations[0].text for frame in fig.frames]


@pytest.mark.parametrize("kind, algorithm", EVERY, ids=lambda value: value.value)
@pytest.mark.parametrize("world_size", [3, 4])
def test_last_picture_keeps_the_promise(kind, algorithm, world_size: int):
    """In the end every cell that the collective promises is complete, and names exactly the ranks that gave to it."""
    fig = vk.collective_steps(kind, algorithm, world_size)
    cells = fig.frames[-1].data[0]
    wanted = collectives.promise(kind, world_size) > 0
    for rank, chunk in np.argwhere(wanted.any(-1)).tolist():
        givers = np.flatnonzero(wanted[rank, chunk]).tolist()
        assert cells.z[rank][chunk] == 1
        assert cells.text[rank][chunk] == ("+".join(map(str, givers)) if len(givers) <= 4 else f"{len(givers)} ranks")


@pytest.mark.parametrize("kind, algorithm", EVERY, ids=lambda value: value.value)
def test_messages_are_those_of_the_algorithm(kind, algorithm):
    """Each step draws one way for each chunk that travels, from its sender's row to its receiver's."""
    fig = vk.collective_steps(kind, algorithm, 4)
    steps = collectives.steps(kind, algorithm, 4)
    for number, step in enumerate(steps, 1):
        frame = fig.frames[labels(fig).index(f"step {number} of {len(steps)}")]
        ways = np.array([y for y in frame.data[1].y if y is not None]).reshape(-1, 2)
        assert sorted(map(tuple, ways.tolist())) == sorted((t.src, t.dst) for t in step for _ in t.chunks)


def test_markers_travel_from_sender_to_receiver():
    """Within a step the message moves on from frame to frame and never back."""
    fig = vk.collective_steps("broadcast", "tree", 2)
    assert labels(fig) == ["step 1 of 1"] * 4 + ["done after 1 step"]
    assert [frame.data[2].y[0] for frame in fig.frames[:4]] == [0.0, 0.25, 0.5, 0.75]


def test_partial_sums_are_told_and_shaded():
    """Ring all-reduce, 4 ranks: after the first step rank 1 holds its own and rank 0's part of chunk 3, half of it."""
    fig = vk.collective_steps("all_reduce", "ring", 4)
    cells = fig.frames[labels(fig).index("step 2 of 6")].data[0]
    assert (cells.text[1][3], cells.z[1][3]) == ("0+1", 0.5)


def test_caption_says_who_sends_what_and_how_much():
    fig = vk.collective_steps("all_reduce", "ring", 4, payload_bytes=4_000_000)
    texts = captions(fig)
    assert texts[0] == (
        "<b>Step 1 of 6</b>: 4 messages of 1/4 of the payload (1 MB); the receiver adds what comes<br>"
        "0→1: chunk 3;  1→2: chunk 0;  2→3: chunk 1;  3→0: chunk 2<br>"
        "On the wire before this step: no payload"
    )
    assert "keeps what comes" in texts[labels(fig).index("step 4 of 6")]
    assert texts[-1] == "<b>Done after 6 steps.</b><br>On the wire in all: 6 × the payload (24 MB)"


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("kind, algorithm", [("all_reduce", "ring"), ("all_gather", "ring"), ("broadcast", "tree")])
def test_bytes_in_the_summary_are_the_wire_bytes(kind: str, algorithm: str, world_size: int):
    payload = world_size * 1_000
    total = int(collectives.wire_bytes(kind, algorithm, world_size, payload).sum())
    fig = vk.collective_steps(kind, algorithm, world_size, payload_bytes=payload)
    assert vk.describe(fig).endswith(f"({total // 1_000} kB).")


def test_default_algorithm_is_the_textbooks():
    assert vk.collective_steps("all_to_all").layout.title.text == "all-to-all by direct, 4 ranks"


def test_one_rank_has_nothing_to_send():
    fig = vk.collective_steps("all_reduce", "ring", 1)
    assert fig.layout.annotations[0].text == "One rank has nothing to send."
    assert (fig.frames, fig.layout.sliders) == ((), ())


def test_root_is_where_it_starts():
    cells = vk.collective_steps("broadcast", "tree", 4, root=2).frames[0].data[0]
    assert [row[0] for row in cells.text] == ["", "", "2", ""]


def test_refuses_what_has_no_room():
    with pytest.raises(InvalidInputError) as caught:
        vk.collective_steps("all_reduce", "ring", 25)
    assert str(caught.value) == (
        "world_size=25: 625 cells are more than the 600 that a picture has room for; "
        "use fewer ranks; vizkit.collectives.steps has no limit"
    )


def test_refuses_an_algorithm_that_the_collective_lacks():
    with pytest.raises(InvalidInputError, match=r"^algorithm='ring': is not one that all_to_all has; use one of"):
        vk.collective_steps("all_to_all", "ring")
