"""Schedules as CSV: torch's grammar in both dialects of B, and what is wrong with a file said by line and column."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vizkit.errors import InvalidInputError
from vizkit.schedules import Schedule, schedule, schedule_names
from vizkit.schedules.torch_csv import read_csv, write_csv

SHARED = Path(__file__).parents[3] / "shared" / "data" / "schedules"
LOOPED = [["0F0", "2F0", "2B0", "0B0"], ["1F0", "3F0", "3I0", "3W0", "1I0", "1W0"]]
OVERLAPPED = [["0F0", "1F0", ("0F1", "1B0"), ("1F1", "0B0"), "1B1", "0I1", "0W1"]]
BOTH_WAYS = [["0F0", "3F1", "3B1", "0B0"], ["1F0", "1B0", "2F1", "2B1"]]


def read(tmp_path: Path, content: str | bytes) -> Schedule:
    path = tmp_path / "mine.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_csv(path)


@pytest.mark.parametrize(
    "content",
    [
        "0F0,0B0\n1F0,1B0\n",
        "0F0,0B0\r\n1F0,1B0",
        b"\xef\xbb\xbf0F0,0B0\n1F0,1B0\n",
        "0F0,,0B0,,,\n,1F0,1B0,,\n",
        " 0F0 ,\t0B0 \n1F0, 1B0\n",
        '"0F0","0B0"\n1F0, "1B0"\n',
        '0F0,0B0\n1F0,1B0\n\n , ,\n""\n',
    ],
    ids=["plain", "crlf", "byte order mark", "idle cells", "spaces", "quotes", "empty lines at the end"],
)
def test_what_editors_and_spreadsheets_make_of_a_file_changes_nothing(tmp_path: Path, content: str | bytes):
    """Line ends, a mark, idle cells, trailing commas, spaces and quotes; the name is the file's."""
    read_back = read(tmp_path, content)
    assert read_back == Schedule.from_rows([["0F0", "0B0"], ["1F0", "1B0"]])
    assert (read_back.name, read_back.notes) == ("mine", ())


def test_a_name_of_ones_own(tmp_path: Path):
    """Instead of the file's."""
    path = write_csv(Schedule.from_rows(LOOPED), tmp_path / "a.csv")
    assert Schedule.from_csv(str(path), name="looped").name == "looped"


@pytest.mark.parametrize("rows", [LOOPED, OVERLAPPED])
def test_a_file_reads_back_as_the_schedule_that_was_written(tmp_path: Path, rows: list):
    """Including overlapped cells."""
    written = Schedule.from_rows(rows)
    assert read_csv(written.to_csv(tmp_path / "s.csv")) == written


@pytest.mark.parametrize("name", schedule_names())
def test_every_named_schedule_makes_the_round_trip(tmp_path: Path, name: str):
    """DualPipe with its two pipelines, too."""
    built = schedule(name, num_ranks=2, num_microbatches=8)
    assert read_csv(built.to_csv(tmp_path / "s.csv")) == built


def test_two_pipelines_are_known_by_their_microbatches_and_ranks(tmp_path: Path):
    """No microbatch passes more than half of the stages: that is no single pipeline."""
    written = Schedule.from_rows(BOTH_WAYS, num_pipelines=2)
    read_back = read_csv(written.to_csv(tmp_path / "s.csv"))
    assert read_back == written
    assert read_back.notes == ("read as two pipelines in opposite directions, each with half of the microbatches",)
    assert read_back.check() == []


@pytest.mark.parametrize("rows", [LOOPED, OVERLAPPED])
def test_torch_loads_what_is_written(tmp_path: Path, rows: list):
    """Its runtime reads the file, finds it valid and adds the communication; each cell is the same text in torch."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    ours = Schedule.from_rows(rows)
    path = ours.to_csv(tmp_path / "s.csv")
    stage = SimpleNamespace(num_stages=ours.num_stages, group_size=ours.num_ranks, group_rank=0)
    runtime = schedules._PipelineScheduleRuntime([stage], ours.num_microbatches)
    runtime._load_csv(path, format="compute_only")
    assert runtime.stage_index_to_group_rank == dict(enumerate(ours.stage_ranks))
    for line, theirs in zip(path.read_text().splitlines(), runtime.pipeline_order.values(), strict=True):
        assert line.split(",") == [str(action) for action in theirs]

    dumped = tmp_path / "with_communication.csv"
    runtime._dump_csv(dumped, format="compute_comms")
    read_back = read_csv(dumped)
    assert read_back == ours
    assert "left out, as it follows from the compute: " in repr(read_back)


def test_communication_is_left_out_counted_and_said(tmp_path: Path):
    """Sends, receives, and what FSDP adds."""
    read_back = read(
        tmp_path, "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD\n"
    )
    assert read_back == Schedule.from_rows([["0F0", "0B0"], ["1F0", "1B0"]])
    assert read_back.notes == (
        "left out, as it follows from the compute: "
        "1 UNSHARD, 1 SEND_F, 1 RECV_B, 1 REDUCE_GRAD, 2 RESHARD, 1 RECV_F, 1 SEND_B",
    )


@pytest.mark.parametrize(
    "content, row, note",
    [
        ("0F0,0B0,0W0,0F1,0B1,0W1", ["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"], "2 B read as I"),
        ("0F0,0BW0", ["0F0", "0B0"], "1 BW read as B"),
        ("0F0,0B0,0F1,0BW1,0W0", ["0F0", "0I0", "0F1", "0B1", "0W0"], "1 B read as I, 1 BW read as B"),
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1,0W0,0W1", ["0F0", ("0F1", "0I0"), "0I1", "0W0", "0W1"], "2 B read as I"),
    ],
)
def test_the_older_dialect_of_b_is_converted_and_said(tmp_path: Path, content: str, row: list, note: str):
    """There B beside a W is the gradient for the inputs, and BW is the full backward."""
    read_back = read(tmp_path, content)
    assert read_back == Schedule.from_rows([row])
    assert read_back.notes == (f"torch's older dialect: {note}",)
    assert read_back.notes[0] in repr(read_back)


@pytest.mark.parametrize("content", ["0F0,0B0", "0F0,0I0,0W0", "0F0,0F1,0B0,0I1,0W1", "0F0"])
def test_the_dialect_of_today_stands_as_it_is(tmp_path: Path, content: str):
    """B alone is full; I has its W; both may stand in one file."""
    read_back = read(tmp_path, content)
    assert read_back == Schedule.from_rows([content.split(",")])
    assert read_back.notes == ()


@pytest.mark.parametrize(
    "content, message",
    [
        (
            "0F0,0B0,0W0\n1F0,1I0,1W0\n",
            "cell='0B0': line 1, column 2 of mine.csv: 0B0 stands beside a W, as in torch's older dialect, but 1I0 "
            "(line 2, column 2) is of today's; write I and W for a split backward, and B for a full one",
        ),
        (
            "0F0,0F1,0B0,,0W0,0B1\n",
            "cell='0B0': line 1, column 3 of mine.csv: 0B0 stands beside a W, as in torch's older dialect, but 0B1 "
            "(line 1, column 6) is of today's; write I and W for a split backward, and B for a full one",
        ),
        (
            "0F0,0BW0,0F1,0I1,0W1",
            "cell='0BW0': line 1, column 2 of mine.csv: 0BW0 is the full backward, as in torch's older dialect, but "
            "0I1 (line 1, column 4) is of today's; write I and W for a split backward, and B for a full one",
        ),
    ],
)
def test_mixed_dialects_are_refused_with_a_cell_of_each(tmp_path: Path, content: str, message: str):
    """Nobody can say which B is meant."""
    with pytest.raises(InvalidInputError) as error:
        read(tmp_path, content)
    assert str(error.value) == message


GRAMMAR = (
    "is no action of a schedule, such as 2F0 or (0F7;7B3)OVERLAP_F_B; "
    "write stage, one letter of F, B, I, W, and microbatch; leave idle cells empty"
)
NUMBERED = "stages and microbatches are numbered from 0 without a gap; renumber them"


@pytest.mark.parametrize(
    "content, message",
    [
        ("0F0,0B0\n1F0,,1X0\n", f"cell='1X0': line 2, column 3 of mine.csv: {GRAMMAR}"),
        ("rank,0F0\n", f"cell='rank': line 1, column 1 of mine.csv: {GRAMMAR}"),
        ("0F0x\n", f"cell='0F0x': line 1, column 1 of mine.csv: {GRAMMAR}"),
        ("0F\n", f"cell='0F': line 1, column 1 of mine.csv: {GRAMMAR}"),
        ("(0F0)OVERLAP_F_B\n", f"cell='(0F0)OVERLAP_F_B': line 1, column 1 of mine.csv: {GRAMMAR}"),
        (
            '0F0,"0B0\n1F0,1B0\n',
            "cell='0B0\\n1F0,1B0': line 1, column 2 of mine.csv: a cell holds no comma; "
            "look for a quote that is not closed",
        ),
        ("0f0\n", "cell='0f0': line 1, column 1 of mine.csv: letters are capitals; write 0F0"),
        (
            "0F-1\n",
            "cell='0F-1': line 1, column 1 of mine.csv: stages and microbatches are numbered from 0; renumber them",
        ),
        ("999999999F0\n", f"cell='999999999F0': line 1, column 1 of mine.csv: {NUMBERED}"),
        ("0F0,0F4096\n", f"cell='0F4096': line 1, column 2 of mine.csv: {NUMBERED}"),
        (f"0F{'9' * 5000}\n", f"cell='0F{'9' * 38}…': line 1, column 1 of mine.csv: {NUMBERED}"),
        (
            "0F0;0B0\n1F0;1B0\n",
            "cell='0F0;0B0': line 1, column 1 of mine.csv: cells are separated by commas, not by semicolons; "
            "export the file with commas",
        ),
        (
            ";(0F1;0B0)OVERLAP_F_B",
            "cell=';(0F1;0B0)OVERLAP_F_B': line 1, column 1 of mine.csv: cells are separated by commas, not by "
            "semicolons; export the file with commas",
        ),
        (
            "0F0\t0B0\n",
            "cell='0F0\\t0B0': line 1, column 1 of mine.csv: cells are separated by commas, not by tabs; "
            "export the file with commas",
        ),
        (
            "0F0 0B0\n",
            "cell='0F0 0B0': line 1, column 1 of mine.csv: cells are separated by commas, not by spaces; "
            "export the file with commas",
        ),
        (
            "0F0,(0B0;0F1)OVERLAP_F_B\n",
            "cell='(0B0;0F1)OVERLAP_F_B': line 1, column 2 of mine.csv: only a forward and a backward overlap, in "
            "this order; write it like (0F7;7B3)OVERLAP_F_B",
        ),
        (
            "0F0,0B0\n\n1F0,1B0\n",
            "line=2: of mine.csv gives a rank nothing to compute; delete the line, or write the rank's actions",
        ),
        (
            "0F0\n0SEND_F0,,\n1F0\n",
            "line=2: of mine.csv gives a rank nothing to compute; delete the line, or write the rank's actions",
        ),
    ],
)
def test_a_cell_that_cannot_be_read_is_named(tmp_path: Path, content: str, message: str):
    """File, line and column from 1, text, rule, remedy."""
    with pytest.raises(InvalidInputError) as error:
        read(tmp_path, content)
    assert str(error.value) == message


@pytest.mark.parametrize("content", ["", "\n\n", ",,\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str | bytes):
    """A schedule has an action."""
    with pytest.raises(InvalidInputError, match=r"mine.csv': holds no action; write a line for each rank: 0F0,0B0"):
        read(tmp_path, content)


@pytest.mark.parametrize("content", [b"\x00\x01\x02", b"\x89PNG\r\n\xff", "0F0,0B0".encode("utf-16")])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes):
    """Binary, or another encoding."""
    with pytest.raises(InvalidInputError, match=r"is not text in UTF-8; save the schedule as CSV in UTF-8"):
        read(tmp_path, content)


def test_a_quote_that_swallows_the_file_is_named(tmp_path: Path):
    """The csv module gives up at a cell of 131,072 letters."""
    with pytest.raises(
        InvalidInputError, match=r"line=1: of mine.csv is not CSV .*; look for a quote that is not clos"
    ):
        read(tmp_path, '0F0,"' + "0B0," * 40_000)


def test_a_path_that_is_no_file_is_refused(tmp_path: Path):
    """A directory, or nothing there; for writing too."""
    with pytest.raises(InvalidInputError, match=r"cannot be read \(Is a directory\); give the path of a CSV file"):
        read_csv(tmp_path)
    with pytest.raises(InvalidInputError, match=r"cannot be read \(No such file or directory\)"):
        read_csv(tmp_path / "missing.csv")
    with pytest.raises(InvalidInputError, match=r"cannot be written \(No such file or directory\)"):
        write_csv(Schedule.from_rows(LOOPED), tmp_path / "missing" / "s.csv")


CELL = st.one_of(
    st.from_regex(r"[0-3](F|B|I|W|BW|SEND_F|UNSHARD)[0-3]", fullmatch=True),
    st.from_regex(r"\([0-3]F[0-3];[0-3][BIW][0-3]\)OVERLAP_F_B", fullmatch=True),
    st.text(alphabet='0129FBIWX;()",\n\r\t -', max_size=8),
)


@given(st.lists(st.lists(CELL, max_size=6), max_size=5))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]):
    """Never another error; and what was read can be checked, and reads back the same."""
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_text("\n".join(map(",".join, rows)), encoding="utf-8")
    try:
        read_once = read_csv(path)
    except InvalidInputError:
        return
    read_once.check()
    if not read_once.notes:
        again = read_csv(read_once.to_csv(path))
        assert again == read_once


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs torch's own files in {SHARED}")
@pytest.mark.parametrize(
    "file, said",
    [
        ("torch_dualpipev_4rank_10mb.csv", "4 ranks, 8 stages, 10 microbatches, 182 actions)"),
        (
            "torch_zb1p_2rank_2stage_old_dialect.csv",
            "2 ranks, 4 stages, 8 microbatches, 96 actions; torch's older dialect: 32 B read as I)",
        ),
    ],
)
def test_torchs_own_files_are_read_and_can_run(file: str, said: str):
    """The artifacts of torch's tests, one in each dialect."""
    theirs = Schedule.from_csv(SHARED / file)
    assert repr(theirs).endswith(said)
    assert theirs.check() == []
