"""What ranks print comes in one order, however it arrives."""

from __future__ import annotations

import io
import os

from hypothesis import given
from hypothesis import strategies as st

from vizkit.runtime.output import TaggedStream, Transcript

WORLD_SIZE = 3
PROGRAMS = st.lists(
    st.lists(st.integers(0, 3), max_size=6).map(sorted), min_size=WORLD_SIZE, max_size=WORLD_SIZE
)  # epochs of each rank's lines


def tagged(epoch: int, text: str) -> bytes:
    return b"\x1e%d\x1f%s\n" % (epoch, text.encode())


def shown(program: list[list[int]], choices: list[int]) -> str:
    """What a transcript shows where lines arrive in the order that `choices` makes of the ranks."""
    stream = io.StringIO()
    transcript = Transcript(WORLD_SIZE, [stream, io.StringIO()])
    pending = {rank: [(e, f"{e}.{i}") for i, e in enumerate(lines)] for rank, lines in enumerate(program)}
    for choice in choices:
        rank = choice % WORLD_SIZE
        if pending[rank]:
            epoch, text = pending[rank].pop(0)
            transcript.feed(rank, 0, tagged(epoch, text))
            transcript.advance(rank, epoch)
        transcript.show()
    for rank, rest in pending.items():
        for epoch, text in rest:
            transcript.feed(rank, 0, tagged(epoch, text))
        transcript.end(rank)
    transcript.show()
    return stream.getvalue()


@given(
    program=PROGRAMS, first=st.lists(st.integers(0, 2), max_size=30), second=st.lists(st.integers(0, 2), max_size=30)
)
def test_the_order_does_not_depend_on_arrival(program, first, second) -> None:
    """Two runs of one program show the same text, and it holds every line of every rank in that rank's order."""
    text = shown(program, first)
    assert text == shown(program, second)
    for rank, lines in enumerate(program):
        own = [line for line in text.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert own == [f"[rank {rank}] {epoch}.{i}" for i, epoch in enumerate(lines)]


@given(program=PROGRAMS, choices=st.lists(st.integers(0, 2), max_size=30))
def test_between_two_communications_line_k_comes_before_line_k_plus_1(program, choices) -> None:
    """Lines are sorted by epoch, then by their number in it, then by rank."""
    keys = []
    for line in shown(program, choices).splitlines():
        rank = int(line[6])
        epoch, index = map(int, line[9:].split("."))
        keys.append((epoch, index - program[rank].index(epoch), rank))
    assert keys == sorted(keys)


def test_a_line_shows_as_soon_as_its_place_is_sure() -> None:
    """Rank 0's second line waits until no first line can come before it."""
    stream = io.StringIO()
    transcript = Transcript(2, [stream, io.StringIO()])
    transcript.feed(0, 0, tagged(0, "a") + tagged(0, "b"))
    transcript.show()
    assert stream.getvalue() == "[rank 0] a\n"
    transcript.advance(1, 1)
    transcript.show()
    assert stream.getvalue() == "[rank 0] a\n[rank 0] b\n"


def test_a_stream_sends_whole_lines() -> None:
    """Half lines wait for their end, each line carries its epoch, and what is left is sent at the end."""
    reader, writer = os.pipe()
    epoch = 0
    stream = TaggedStream(writer, lambda: epoch)
    print("half", end="", file=stream)
    epoch = 2
    print(" whole\nnext", end="", file=stream)
    stream.finish()
    os.close(writer)
    assert os.read(reader, 1000) == tagged(2, "half whole") + tagged(2, "next")
    os.close(reader)


def test_a_line_that_rewrites_itself_shows_what_was_left_standing() -> None:
    """A progress bar of somebody else's comes out as its last state; bytes that are no text do no harm."""
    stream = io.StringIO()
    transcript = Transcript(1, [stream, io.StringIO()])
    transcript.feed(0, 0, b"10 %\r50 %\r100 %\n\xff\xfe\nno end")
    transcript.end(0)
    transcript.show()
    assert stream.getvalue() == "[rank 0] 100 %\n[rank 0] \ufffd\ufffd\n[rank 0] no end\n"


def test_a_script_may_ask_for_another_buffering() -> None:
    """`sys.stdout.reconfigure(line_buffering=True)` at the top of a script does no harm in a rank."""
    reader, writer = os.pipe()
    stream = TaggedStream(writer, lambda: 7)
    stream.reconfigure(line_buffering=True, encoding="ascii")
    stream.write("é\n")
    assert os.read(reader, 100) == b"\x1e7\x1f\xc3\xa9\n"
    os.close(reader)
    os.close(writer)
