"""The ledger: bytes by axis and kind beside the formula's, and each difference explained to the byte, or not."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vizkit as vk
from tests.handmade import record
from vizkit.errors import InvalidInputError
from vizkit.ledgers import Cause, ShardedMovement
from vizkit.ledgers.explanations import Calls, bytes_of, explain, formula_bytes
from vizkit.trace import Span, SpanKind, Trace
from vizkit.volume import Movement

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND = (
    SpanKind.ALL_REDUCE,
    SpanKind.ALL_GATHER,
    SpanKind.REDUCE_SCATTER,
    SpanKind.SEND,
)
sizes = st.integers(1, 200)
call_lists = st.lists(sizes, min_size=1, max_size=8)


def spans(kind: SpanKind, groups: Sequence[tuple[int, ...]], *payloads: int) -> list[Span]:
    """Every member of each group makes these calls."""
    return [
        Span(rank, kind, 0, 1, payload_bytes=payload, group=group)
        for group in groups
        for rank in group
        for payload in payloads
    ]


def trace(*calls: list[Span], world_size: int = 4, backend: str = "gloo") -> Trace:
    listed = [span for part in calls for span in part]
    return Trace.from_spans(listed, clock="virtual", world_size=world_size, notes={"backend": backend})


def causes(calls: Sequence[int], movements: Sequence[Movement], **keywords: int) -> list[tuple[Cause, float]]:
    kind = movements[0].kind if movements else ALL_REDUCE
    found = explain(Counter(calls), movements, kind, keywords.pop("num_ranks", 4), **keywords)
    return [(explanation.cause, explanation.difference_bytes) for explanation in found]


def formula(kind: SpanKind, payload_bytes: float, times: float = 1) -> list[Movement]:
    return [Movement("dp", kind, payload_bytes, times)]


# What one rank's calls are beside a formula's


@pytest.mark.parametrize(
    ("calls", "movements", "expected"),
    [
        ([64], formula(ALL_REDUCE, 64), []),
        ([64, 64], formula(ALL_REDUCE, 64, 2), []),
        ([40, 24], formula(ALL_REDUCE, 64), [(Cause.BUCKETS, 0)]),
        ([128], formula(ALL_REDUCE, 64, 2), [(Cause.BUCKETS, 0)]),
        ([64, 4], formula(ALL_REDUCE, 64), [(Cause.NOT_IN_THE_FORMULA, 4)]),
        ([64, 64], formula(ALL_REDUCE, 64), [(Cause.NOT_IN_THE_FORMULA, 64)]),
        ([40, 24, 4, 8], formula(ALL_REDUCE, 64), [(Cause.BUCKETS, 0), (Cause.NOT_IN_THE_FORMULA, 12)]),
        ([64], [], [(Cause.NOT_IN_THE_FORMULA, 64)]),
        ([], formula(ALL_REDUCE, 64, 2), [(Cause.NEVER_CAME, -128)]),
        ([64], formula(ALL_REDUCE, 64, 2), [(Cause.NEVER_CAME, -64)]),
        ([40, 24], formula(ALL_REDUCE, 64, 2), [(Cause.BUCKETS, 0), (Cause.NEVER_CAME, -64)]),
        ([100, 100, 100], formula(ALL_REDUCE, 120, 2), [(Cause.UNEXPLAINED, 60)]),
        ([50], formula(ALL_REDUCE, 64), [(Cause.UNEXPLAINED, -14)]),
        ([64], formula(ALL_GATHER, 60), [(Cause.PADDING, 4)]),
        ([64, 4], formula(ALL_GATHER, 60), [(Cause.PADDING, 4), (Cause.NOT_IN_THE_FORMULA, 4)]),
        ([32, 32], formula(REDUCE_SCATTER, 60), [(Cause.PADDING, 4), (Cause.BUCKETS, 0)]),
        ([400], formula(ALL_GATHER, 300), [(Cause.OWN_PART, 100)]),
        ([33], formula(ALL_REDUCE, 100 / 3), [(Cause.ROUNDING, pytest.approx(-1 / 3))]),
        ([32], formula(ALL_REDUCE, 32 + 1e-9), []),
        ([], formula(ALL_REDUCE, 100 / 3), [(Cause.NEVER_CAME, pytest.approx(-100 / 3))]),
        ([96], formula(ALL_REDUCE, 64, 1.5), []),
        ([0, 0], formula(SpanKind.BARRIER, 0, 2), []),
        ([], formula(SpanKind.BARRIER, 0, 2), [(Cause.NEVER_CAME, 0)]),
        ([], [], []),
    ],
)
def test_causes(calls: list[int], movements: list[Movement], expected: list[tuple[Cause, float]]) -> None:
    """On four ranks; the bytes of each cause."""
    assert causes(calls, movements) == expected


def test_steps_multiply_the_formula() -> None:
    assert causes([64] * 6, formula(ALL_REDUCE, 64, 2), steps=3) == []
    assert causes([64] * 6, formula(ALL_REDUCE, 64, 0.5), steps=12) == []


def test_twice_the_bytes_between_two_ranks_have_no_one_reason() -> None:
    """They could be the rank's own part, or elements of twice the size; between four ranks they are neither."""
    assert causes([128], formula(ALL_GATHER, 64), num_ranks=2) == [(Cause.UNEXPLAINED, 64)]
    assert causes([128], formula(ALL_GATHER, 64)) == [(Cause.UNEXPLAINED, 64)]


def test_one_rank_moves_nothing_whatever_the_formula_says() -> None:
    assert causes([64], formula(ALL_REDUCE, 64), num_ranks=1) == [(Cause.ONE_RANK, 0)]
    assert causes([], formula(ALL_REDUCE, 64), num_ranks=1) == [(Cause.ONE_RANK, -64)]
    assert causes([], [], num_ranks=1) == []


@pytest.mark.parametrize(
    ("shapes", "num_ranks", "padded"),
    [(((5, 3),), 2, 72), (((5, 3),), 5, 60), (((5, 3), (4,)), 3, 96), (((7,),), 4, 32), (((),), 4, 16)],
)
def test_rows_of_sharded_tensors_are_filled_up(
    shapes: tuple[tuple[int, ...], ...], num_ranks: int, padded: int
) -> None:
    """FSDP2 cuts dimension 0 and gives each rank as many rows as the largest shard has."""
    whole = 4 * sum(math.prod(shape) for shape in shapes)
    movement = ShardedMovement("dp", ALL_GATHER, whole, shapes=shapes)
    assert movement.padded_bytes(num_ranks) == padded
    expected = [(Cause.PADDING, padded - whole)] if padded != whole else []
    assert causes([padded], [movement], num_ranks=num_ranks) == expected
    assert causes([padded] * 2, [movement], num_ranks=num_ranks, steps=2) == [(c, 2 * b) for c, b in expected]


def test_a_search_that_takes_too_long_ends_unexplained() -> None:
    """No ledger hangs on calls of many sizes."""
    calls = Counter({2 * size: 50 for size in range(1_000, 1_100)})
    (explanation,) = explain(calls, formula(ALL_REDUCE, bytes_of(calls) - 77_777), ALL_REDUCE, 4)
    assert (explanation.cause, explanation.difference_bytes) == (Cause.UNEXPLAINED, 77_777)


@given(st.lists(sizes, max_size=8), st.lists(st.tuples(sizes, st.integers(0, 3)), max_size=4), st.integers(1, 5))
def test_explanations_add_up_to_the_difference(calls: list[int], terms: list[tuple[int, int]], num_ranks: int) -> None:
    """Whatever was called and whatever the formula says, for every kind of collective."""
    for kind in (ALL_REDUCE, ALL_GATHER):
        movements = [Movement("dp", kind, size, times) for size, times in terms]
        found = explain(Counter(calls), movements, kind, num_ranks)
        assert sum(e.difference_bytes for e in found) == sum(calls) - formula_bytes(movements)


@given(call_lists, st.data())
def test_other_portions_of_the_same_bytes_match(terms: list[int], data: st.DataObject) -> None:
    """Cut the formula's bytes anywhere: only buckets differ."""
    total = sum(terms)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(total - 1, 1)), max_size=6)) - {total})
    calls = [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]
    found = causes(calls, [Movement("dp", ALL_REDUCE, size) for size in terms])
    assert found in ([], [(Cause.BUCKETS, 0)])


@given(call_lists, st.data())
def test_a_call_too_few_is_never_accounted_for(terms: list[int], data: st.DataObject) -> None:
    calls = list(terms)
    lost = calls.pop(data.draw(st.integers(0, len(terms) - 1)))
    movements = [Movement("dp", ALL_GATHER, size) for size in terms]
    assert causes(calls, movements) == [(Cause.NEVER_CAME, -lost)]


def test_padding_is_not_taken_for_calls_on_top() -> None:
    """Twelve calls of 528 B are twelve of 440 B, padded; not ten for twelve and two on top, though bytes add up."""
    movement = ShardedMovement("dp", ALL_GATHER, 440, 12, shapes=((10, 10), (10,)))
    assert causes([528] * 12, [movement]) == [(Cause.PADDING, 12 * 88)]
    assert causes([528] * 12, formula(ALL_REDUCE, 440, 12)) == [(Cause.UNEXPLAINED, 12 * 88)]


@given(call_lists, sizes)
def test_a_call_too_many_is_named_with_its_bytes(terms: list[int], extra: int) -> None:
    movements = [Movement("dp", ALL_REDUCE, size) for size in terms]
    assert causes([*terms, extra], movements) == [(Cause.NOT_IN_THE_FORMULA, extra)]


# Rows: by axis of the mesh and kind

WORLD, TP, DP = [(0, 1, 2, 3)], [(0, 1), (2, 3)], [(0, 2), (1, 3)]


def test_rows_follow_the_axes_of_the_mesh() -> None:
    """In the mesh's order, then groups along several axes, then groups that follow none, by their ranks."""
    found = vk.ledger(
        trace(
            spans(ALL_REDUCE, [(0, 3)], 8),
            spans(ALL_REDUCE, WORLD, 16),
            spans(ALL_GATHER, TP, 32, 32),
            spans(ALL_REDUCE, TP, 64),
            spans(ALL_REDUCE, DP, 128),
        ),
        vk.Mesh(dp=2, tp=2),
    )
    assert [(row.axis, row.kind.value, row.calls, row.payload_bytes) for row in found.rows] == [
        ("dp", "all_reduce", 1, 128),
        ("tp", "all_reduce", 1, 64),
        ("tp", "all_gather", 2, 64),
        ("dp×tp", "all_reduce", 1, 16),
        ("ranks 0, 3", "all_reduce", 1, 8),
    ]


def test_without_a_mesh_all_ranks_are_an_axis_called_world() -> None:
    found = vk.ledger(trace(spans(ALL_REDUCE, [(), (0, 1, 2, 3)][1:], 8), spans(ALL_REDUCE, TP, 8)))
    assert [row.axis for row in found.rows] == ["world", "ranks 0, 1", "ranks 2, 3"]


def test_a_group_that_is_not_named_is_the_world() -> None:
    whole = Trace.from_spans([Span(r, ALL_REDUCE, 0, 1, payload_bytes=8) for r in range(2)], clock="ideal")
    assert [row.axis for row in vk.ledger(whole, vk.Mesh(dp=2)).rows] == ["dp"]


def test_an_axis_of_one_rank() -> None:
    """Its calls stand on it; nothing leaves the rank, so no formula is broken."""
    calls = trace(spans(ALL_REDUCE, [(0,), (1,)], 8), world_size=2)
    found = vk.ledger(calls, vk.Mesh(dp=2, tp=1), [Movement("tp", ALL_GATHER, 16)])
    assert [(row.axis, row.kind.value, row.wire_bytes) for row in found.rows] == [
        ("tp", "all_reduce", 0),
        ("tp", "all_gather", 0),
    ]
    assert found.matches
    assert [row.axis for row in vk.ledger(calls, vk.Mesh(dp=2)).rows] == ["ranks 0", "ranks 1"]


def test_messages_count_at_their_sender_along_the_axis_in_which_its_ends_differ() -> None:
    """Receives are listed only where the formula asks for them."""
    calls = [
        Span(0, "send", 0, 1, payload_bytes=8, peer=2),
        Span(2, "receive", 0, 1, payload_bytes=8, peer=0),
        Span(1, "send", 0, 1, payload_bytes=4, peer=0),
    ]
    mesh = vk.Mesh(pp=2, cp=2)
    assert [(row.axis, row.kind.value, row.wire_bytes) for row in vk.ledger(trace(calls), mesh).rows] == [
        ("pp", "send", 8),
        ("cp", "send", 4),
    ]
    found = vk.ledger(trace(calls), mesh, [Movement("pp", SpanKind.RECEIVE, 8)])
    assert found.row("pp", "receive").payload_bytes == 8


def test_the_ends_of_a_pipeline_send_a_part_of_what_the_middle_sends() -> None:
    """A formula for messages is that of the fullest rank; less elsewhere is accounted for, more is not."""
    edges = [(0, 1), (1, 0), (1, 2), (2, 1)]
    calls = trace([Span(a, SEND, 0, 1, payload_bytes=8, peer=b) for a, b in edges for _ in range(4)], world_size=3)
    found = vk.ledger(calls, vk.Mesh(pp=3), [Movement("pp", SEND, 8, 8)])
    row = found.row("pp", "send")
    assert (row.payload_bytes, row.least_payload_bytes, row.rank) == (64, 32, 1)
    assert list(map(str, row.explanations)) == ["ranks 0, 2: 4 messages fewer than the 8 of rank 1"]
    assert found.matches
    odd = trace(
        [Span(1, SEND, 0, 1, payload_bytes=8, peer=0), Span(0, SEND, 0, 1, payload_bytes=5, peer=1)], world_size=2
    )
    assert not vk.ledger(odd, vk.Mesh(pp=2), [Movement("pp", SEND, 8)]).explained


def test_each_rank_is_held_against_the_formula_of_a_collective() -> None:
    """An all-reduce that only one of the two groups made is found, though the fullest rank has the formula's bytes."""
    found = vk.ledger(trace(spans(ALL_REDUCE, [(0, 1)], 64), spans(ALL_GATHER, TP, 8)), vk.Mesh(dp=2, tp=2), [
        Movement("tp", ALL_REDUCE, 64),
        Movement("tp", ALL_GATHER, 8),
    ])  # fmt: skip
    row = found.row("tp", "all_reduce")
    assert (row.payload_bytes, row.least_payload_bytes, row.difference_bytes) == (64, 0, 0)
    assert list(map(str, row.explanations)) == ["ranks 2, 3: never came: 1 call of 64 B"]
    assert (found.explained, found.matches) == (False, False)
    assert str(found).endswith("\nNOT explained: tp all_reduce")


def test_wrong_group() -> None:
    """What went along the wrong axis is there, and what should have gone along the right one never came."""
    found = vk.ledger(
        trace(spans(ALL_REDUCE, TP, 64)), vk.Mesh(dp=2, tp=2), [Movement("dp", ALL_REDUCE, 64, why="gradients")]
    )
    assert [(row.axis, row.explanations[0].cause, row.explained) for row in found.rows] == [
        ("tp", Cause.NOT_IN_THE_FORMULA, True),
        ("dp", Cause.NEVER_CAME, False),
    ]
    assert found.row("dp", "all_reduce").formula == ("gradients",)
    assert not found.explained


@pytest.mark.parametrize(
    ("backend", "kind", "wire", "ring", "cause"),
    [
        ("gloo", ALL_REDUCE, 96, 96, None),
        ("gloo", ALL_GATHER, 48, 48, None),
        ("gloo", REDUCE_SCATTER, 96, 48, Cause.GLOO_REDUCE_SCATTER),
        ("nccl", REDUCE_SCATTER, 48, 48, None),
        ("nccl", SpanKind.BROADCAST, 64, 128, Cause.OTHER_ALGORITHM),
        ("", REDUCE_SCATTER, 48, 48, None),
    ],
)
def test_wire_bytes(backend: str, kind: SpanKind, wire: int, ring: int, cause: Cause | None) -> None:
    """64 B on four ranks: a ring sends (n - 1)/n of them, twice for an all-reduce; gloo's reduce-scatter is one.

    A broadcast's root sends all of it to each of its children in the textbook's tree, and once along NCCL's ring.
    """
    row = vk.ledger(trace(spans(kind, WORLD, 64), backend=backend)).rows[0]
    assert (row.payload_bytes, row.wire_bytes, row.ring_bytes) == (64, wire, ring)
    found = row.wire_explanation
    assert (found and found.cause) == cause
    if found:
        assert found.difference_bytes == wire - ring


def test_what_counts_as_run() -> None:
    """A trace, a record, or anything with a trace, such as what `vk.launch` gives."""
    made = record([("post", "a", "all_reduce")], [("post", "a", "all_reduce")], backend="gloo")
    of_record = vk.ledger(made)
    assert [(row.axis, row.payload_bytes) for row in of_record.rows] == [("world", 8)]
    from vizkit.record import wall_trace

    whole = wall_trace(made)
    assert vk.ledger(whole) == vk.ledger(SimpleNamespace(trace=whole)) == of_record


def test_a_run_without_communication() -> None:
    found = vk.ledger(Trace.from_spans([Span(0, "F", 0, 1)], clock="ideal"), vk.Mesh(dp=1), [])
    assert found.rows == ()
    assert found.matches
    assert str(found).splitlines()[-1] == "equal to the formula"


# How it reads


@pytest.mark.parametrize(
    ("calls", "verdict"),
    [
        ([60], "equal to the formula"),
        ([40, 20], "equal to the formula"),
        ([64], "the formula's calls and no others; every difference is explained"),
        ([60, 8], "every difference is explained; some calls are not in the formula"),
        ([50], "NOT explained: dp all_gather"),
    ],
)
def test_the_last_line_is_the_verdict(calls: list[int], verdict: str) -> None:
    found = vk.ledger(trace(spans(ALL_GATHER, WORLD, *calls)), vk.Mesh(dp=4), formula(ALL_GATHER, 60))
    assert str(found).splitlines()[-1] == verdict


EXAMPLE = (
    trace(spans(ALL_REDUCE, DP, 600, 424, 4), spans(REDUCE_SCATTER, TP, 64)),
    vk.Mesh(dp=2, tp=2),
    [Movement("dp", ALL_REDUCE, 1024), Movement("tp", REDUCE_SCATTER, 64)],
)


def test_text() -> None:
    assert str(vk.ledger(*EXAMPLE)).splitlines() == [
        "Bytes of one rank, 4 ranks as Mesh(dp=2, tp=2), gloo, formula of 1 step",
        "axis  collective      calls  payload (B)  wire (B)  ring (B)  formula calls  formula (B)  difference (B)",
        "dp    all_reduce          3        1,028     1,028     1,028              1        1,024              +4",
        "tp    reduce_scatter      1           64        64        32              1           64               0",
        "dp all_reduce: 1 call of 1,024 B came as 1 call of 424 B, 1 call of 600 B",
        "dp all_reduce: not in the formula: 1 call of 4 B",
        "tp reduce_scatter: gloo runs reduce-scatter as an all-reduce of the full input: "
        "+32 B a rank beside the textbook's",
        "every difference is explained; some calls are not in the formula",
    ]


def test_text_without_a_formula() -> None:
    calls, mesh, _ = EXAMPLE
    assert str(vk.ledger(calls, mesh)).splitlines()[:3] == [
        "Bytes of one rank, 4 ranks as Mesh(dp=2, tp=2), gloo",
        "axis  collective      calls  payload (B)  wire (B)  ring (B)",
        "dp    all_reduce          3        1,028     1,028     1,028",
    ]


class Headers(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scopes: list[str | None] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "th":
            self.scopes.append(dict(attrs).get("scope"))


def test_html_can_be_followed_by_a_screen_reader() -> None:
    """A caption, a scope for each header, no colour of its own, text escaped."""
    assert repr(vk.ledger(*EXAMPLE)) == str(vk.ledger(*EXAMPLE))
    page = vk.ledger(*EXAMPLE)._repr_html_()
    parser = Headers()
    parser.feed(page)
    assert parser.scopes == ["col"] * 9 + ["row"] * 2
    assert parser.tags.count("caption") == 1
    assert "color" not in page
    assert "textbook&#x27;s" in page


def test_long_lists_of_explanations_are_cut() -> None:
    calls = [Span(r, ALL_REDUCE, 0, 1, payload_bytes=r + 1) for r in range(12)]
    text = str(vk.ledger(trace(calls, world_size=12), vk.Mesh(dp=12), []))
    assert "dp all_reduce: and 4 more, in ledger.row('dp', 'all_reduce').explanations" in text


def test_frame() -> None:
    frame = vk.ledger(*EXAMPLE).to_frame()
    assert frame["difference_bytes"].tolist() == [4, 0]
    assert frame.loc[0, ["axis", "kind", "calls", "payload_bytes", "expected_bytes"]].tolist() == [
        "dp",
        "all_reduce",
        3,
        1028,
        1024,
    ]
    assert frame.loc[0, "explanation"].endswith("; not in the formula: 1 call of 4 B")


def test_importing_the_package_of_ledgers_leaves_the_function_callable() -> None:
    """`vk.ledger` stays a function whatever was imported first; nothing heavy is loaded."""
    code = (
        "import sys, vizkit as vk; from vizkit.ledgers import Cause; assert callable(vk.ledger);"
        "assert not {'torch', 'pandas', 'plotly', 'ipywidgets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Bad input

ONE = trace(spans(ALL_REDUCE, WORLD, 8))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: vk.ledger(3), "run='int': must be a run, a record or a trace; give what vk.launch returned"),
        (
            lambda: vk.ledger(ONE, vk.Mesh(dp=2)),
            "world_size=4: Mesh(dp=2) needs 2 ranks; use world_size=2, or Mesh(dp=4)",
        ),
        (
            lambda: vk.ledger(ONE, {"dp": 4}),
            "mesh='dict': must be a vk.Mesh or a DeviceMesh with mesh_dim_names; use vk.Mesh(dp=4)",
        ),
        (
            lambda: vk.ledger(ONE, vk.Mesh(dp=4), [Movement("tp", ALL_REDUCE, 8)]),
            "axis='tp': Mesh(dp=4) has no such axis; use dp",
        ),
        (
            lambda: vk.ledger(ONE, expected=[Movement("dp", ALL_REDUCE, 8)]),
            "axis='dp': Mesh(world=4) has no such axis; use world",
        ),
        (
            lambda: vk.ledger(ONE, vk.Mesh(dp=4), [8]),
            "expected=8: must be a vizkit.volume.Movement; use vk.volume.movements(model, layout)",
        ),
        (
            lambda: vk.ledger(ONE, vk.Mesh(dp=4), [Movement("dp", SpanKind.FORWARD, 8)]),
            "kind='F': moves nothing between ranks; use one of all_reduce, all_gather, reduce_scatter, all_to_all, "
            "broadcast, reduce, gather, scatter, barrier, send, receive",
        ),
        (
            lambda: vk.ledger(ONE, vk.Mesh(dp=4), [Movement("dp", ALL_REDUCE, -8)]),
            "payload_bytes=-8: must be finite and not negative; use 0 for nothing",
        ),
        (
            lambda: vk.ledger(ONE, vk.Mesh(dp=4), [Movement("dp", ALL_REDUCE, 8, float("nan"))]),
            "times=nan: must be finite and not negative; use 0 for nothing",
        ),
        (lambda: vk.ledger(ONE, steps=0), "steps=0: must be a whole number, at least 1; use steps=1"),
        (
            lambda: vk.ledger(ONE).explained,
            "expected=None: there is no formula to compare with; give expected=vk.volume.movements(…)",
        ),
        (
            lambda: vk.ledger(ONE).row("world", "broadcast"),
            "row='world broadcast': the ledger has world all_reduce; ask for one of these",
        ),
        (
            lambda: ShardedMovement("dp", ALL_GATHER, 7, shapes=((2, 3),)).padded_bytes(2),
            "payload_bytes=7: must be bytes an element times the 6 elements of shapes; "
            "use payload_bytes=24 for float32",
        ),
    ],
)
def test_what_is_refused(call: object, expected: str) -> None:
    """Value, rule and remedy."""
    with pytest.raises(InvalidInputError) as caught:
        call()  # type: ignore[operator]
    assert str(caught.value) == expected


def test_calls_are_counters() -> None:
    assert bytes_of(Calls({8: 2, 4: 1})) == 20
