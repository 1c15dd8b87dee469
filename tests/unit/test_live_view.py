"""What the live view shows, in a page, in a terminal and as the summary that stays."""

from __future__ import annotations

import io
import json
import math
import re
from html.parser import HTMLParser

import pytest

from vizkit.errors import InvalidInputError, RunStoppedError
from vizkit.metrics import SlowRank
from vizkit.runtime.live_record import Point
from vizkit.runtime.live_state import Curve, LiveState, LiveSummary, RankNow, SlowEpisode, WaitNow
from vizkit.runtime.live_views import PANEL, SummaryOnly, TerminalView, line_of, view_for
from vizkit.runtime.live_watch import MOST_POINTS, thinned
from vizkit.widgets import live_html
from vizkit.widgets.live_panel import LivePanel

SLOW = SlowRank(rank=2, median_s=0.060, others_median_s=0.020, slower_in=20, steps=20, chance=1e-9)
WAIT = WaitNow("all_reduce 35", 0.04, (2,))


def state(ranks: int = 4, points: int = 300, **change: object) -> LiveState:
    """The middle of a run with rank 2 slow."""
    rows = tuple(
        RankNow(
            rank=rank,
            state="running",
            steps=34,
            step_s=0.0612,
            own_s=0.060 if rank == 2 else 0.0203,
            wait=None if rank == 2 else WAIT,
            posted_bytes=136_000,
            memory_bytes=248_000_000 + rank,
        )
        for rank in range(ranks)
    )
    curve = Curve("loss", 0, tuple(Point(n, 2.3 / n) for n in range(1, points + 1)))
    facts = {
        "elapsed_s": 12.3,
        "done": 34,
        "total": 200,
        "label": "step",
        "ranks": rows,
        "curves": (curve,),
        "bytes_per_s": 1.2e6,
        "slow": (SLOW,),
    }
    return LiveState(**{**facts, **change})


def summary(**change: object) -> LiveSummary:
    facts = {
        "progress": "step 40 of 40",
        "seconds": 2.61,
        "steps": (40, 40),
        "step_s": (0.0643, 0.0639),
        "own_s": (0.0212, 0.0614),
        "posted_bytes": (160_000, 160_000),
        "peak_memory_bytes": (248_000_000, None),
        "slow": (SlowEpisode(2, 40, SLOW),),
        "curves": {"loss": (Point(1, 1.0), Point(40, 0.025))},
    }
    return LiveSummary(**{**facts, **change})


class Text(HTMLParser):
    """The words of a page, and whether its tags are in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_says_all_of_it_in_words():
    """Progress, speed, bytes, curve, and each rank with its time, memory, and whom it waits for."""
    words = " ".join(Text(live_html.body(state())).words)
    for said in (
        "step 34 of 200 · 61.2 ms a step · 12 s since the start · 1.2 MB/s posted, 544 kB in all",
        "loss 0.007667 at step 300 (rank 0); from 0.007667 to 2.3",
        "0 34 61.2 ms 20.3 ms 248 MB waits in all_reduce 35 for rank 2",
        "2 slow 34 61.2 ms 60 ms 248 MB running",
    ):
        assert said in re.sub(r"\s+", " ", words)
    assert " ".join(Text(live_html.alert(state())).words) == (
        "Slow: rank 2 takes 60 ms a step, the others 20 ms (3.0×); slower than most of them in 20 of 20 steps"
    )
    assert live_html.alert(state(slow=())) == ""


@pytest.mark.parametrize(("ranks", "kilobytes"), [(1, 2), (4, 3), (16, 6), (64, 6)])
def test_a_refresh_is_a_few_kilobytes(ranks: int, kilobytes: int):
    """What goes over the link at each refresh, as JSON: 3 kB for 4 ranks, 6 kB for 16 and more, at 2.5 a second."""
    sent = json.dumps(
        {"alert": live_html.alert(state(ranks)), "body": live_html.body(state(ranks, points=MOST_POINTS))}
    )
    assert len(sent.encode()) < kilobytes * 1000


def test_many_ranks_are_represented_by_the_slowest():
    """Sixteen rows, the slow one among them, in order of ranks."""
    page = live_html.table(state(64))
    shown = [int(found) for found in re.findall(r"<tr[^>]*><td>(\d+)", page)]
    assert len(shown) == 16
    assert 2 in shown
    assert shown == sorted(shown)
    assert "the 16 slowest of 64 ranks" in page


def test_what_comes_from_the_program_is_text():
    """Labels and names cannot become markup."""
    odd = state(label="<b>", curves=(Curve("<i>", 0, (Point(1, 1.0),)),))
    assert "<b>" not in live_html.body(odd)
    assert "&lt;i&gt;" in live_html.body(odd)


@pytest.mark.parametrize("values", [(math.nan,), (math.inf, 1.0), (1.0, math.nan, 2.0), (5.0, 5.0), (1.0,)])
def test_losses_that_are_no_numbers_leave_a_gap(values: tuple[float, ...]):
    """The words say "nan" or "inf", the curve has the rest."""
    page = live_html.curves([Curve("loss", 1, tuple(Point(n, value) for n, value in enumerate(values, 1)))])
    assert f"loss {values[-1]:.4g} at step {len(values)} (rank 1)" in page
    drawn = re.search(r'points="([^"]*)"', page)
    assert len(drawn[1].split()) == sum(map(math.isfinite, values)) if drawn else not any(map(math.isfinite, values))


def test_a_run_that_has_not_begun_shows_too():
    """No steps, no times, no memory: dashes and no error."""
    early = LiveState(0.1, 0, 0, "", (RankNow(0, "starting"),), (), 0.0, ())
    assert "step 0 · no step is done yet" in live_html.body(early)
    assert "–" in live_html.table(early)
    assert line_of(early) == "step 0  0 B/s posted"


def test_long_curves_are_thinned_and_keep_their_ends():
    """At most 400 points are held for a number, over a run of any length."""
    points: tuple[Point, ...] = ()
    for n in range(5_000):
        points = thinned((*points, Point(n, float(n))))
    assert len(points) <= MOST_POINTS
    assert (points[0].step, points[-1].step) == (0, 4_999)
    assert list(points) == sorted(points)


def test_the_terminal_has_one_line_that_is_rewritten(capsys: pytest.CaptureFixture[str]):
    """The line is blanked in the end, and the summary printed."""
    stream = io.StringIO()
    view = TerminalView(stream)
    view.show(state())
    view.show(state(slow=()))
    view.close(summary())
    first, second, blank = stream.getvalue().split("\r")[1:4]
    assert first == (
        "step [#####.........................] 34/200  61.2 ms a step  loss 0.007667  1.2 MB/s posted  "
        "slow: rank 2 (3.0×)"
    )
    assert "slow" not in second
    assert len(second) == len(first)
    assert blank.strip() == ""
    assert capsys.readouterr().out == f"{summary()}\n"


def test_a_long_wait_shows_in_the_line():
    """A hang is seen before it is found to be one."""
    waiting = RankNow(0, "running", wait=WaitNow("all_reduce 4", 1.5, (1, 2)))
    assert line_of(LiveState(3, 3, 0, "", (waiting,), (), 0, ())) == (
        "step 3  0 B/s posted  rank 0 waits 1.5 s in all_reduce 4 for ranks 1, 2"
    )


def test_the_summary_is_plain_text():
    """What a saved notebook keeps."""
    assert str(summary()) == (
        "step 40 of 40 in 2.61 s (wall clock), 2 ranks\n"
        "loss: 1 at step 1, 0.025 at step 40\n"
        "rank  steps  a step (median)  own work (median)  posted (payload)  peak memory (resident)\n"
        "   0     40          64.3 ms            21.2 ms            160 kB                  248 MB\n"
        "   1     40          63.9 ms            61.4 ms            160 kB                       –\n"
        "slow: steps 2 to 40: rank 2 takes 60 ms a step, the others 20 ms (3.0×); "
        "slower than most of them in 20 of 20 steps"
    )
    assert str(summary(slow=())).endswith("\nslow: nobody (no rank took 1.3× what the others did by more than chance)")
    assert str(summary(trouble="ValueError: no")).endswith("\nthe view failed: ValueError: no")


@pytest.mark.parametrize("live", [None, 1, 0, "yes", SummaryOnly, [], object()])
def test_odd_values_of_live_are_refused(live: object):
    """Value, rule and remedy."""
    with pytest.raises(InvalidInputError) as refused:
        view_for(live)
    assert str(refused.value) == f"live={live!r}: must be True or False, or a view of your own; use live=True"


def test_a_view_of_ones_own_is_taken_as_it_is():
    """Whatever shows, closes, and says whether to stop."""
    view = SummaryOnly()
    assert view_for(view) is view
    assert view_for(False) is None


def test_the_panel_is_found_where_the_runtime_names_it(monkeypatch: pytest.MonkeyPatch):
    """The runtime imports no widget: it names one; without ipywidgets the summary takes its place."""
    import pkgutil

    from vizkit.runtime import live_views

    assert pkgutil.resolve_name(PANEL) is LivePanel
    monkeypatch.setattr(live_views, "PANEL", "vizkit.widgets_that_are_not_installed:Panel")
    assert isinstance(live_views._panel(), SummaryOnly)


def test_the_panel_sends_only_what_has_changed_and_ends_as_text(monkeypatch: pytest.MonkeyPatch):
    """One piece for what always moves, one for the alert; in the end the summary stands alone, and nothing is kept."""
    from ipywidgets.widgets.widget import _instances

    from vizkit.widgets import live_panel

    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            assert raw
            shown.append(data)

    monkeypatch.setattr(live_panel, "display", lambda widget, display_id: Handle())
    before = set(_instances)
    panel = LivePanel()
    panel.show(state())
    sent: list[str] = []
    for name in ("alert", "body"):
        getattr(panel, name).observe(lambda change, name=name: sent.append(name), "value")
    panel.show(state())
    panel.show(state(done=35))
    panel.show(state(done=36, slow=()))
    assert sent == ["body", "alert", "body"]
    assert not panel.stop_wanted
    panel.stop.pressed = True
    assert panel.stop_wanted
    panel.close(summary())
    assert shown == [{"text/plain": str(summary())}]
    assert set(_instances) == before


def test_a_run_that_was_over_at_once_has_no_panel(monkeypatch: pytest.MonkeyPatch):
    """Nothing was shown: the summary is displayed, and no widget is made."""
    from ipywidgets.widgets.widget import _instances

    from vizkit.widgets import live_panel

    shown: list[dict[str, str]] = []
    monkeypatch.setattr(live_panel, "display", lambda words, raw: shown.append(words))
    before = set(_instances)
    LivePanel().close(summary())
    assert shown == [{"text/plain": str(summary())}]
    assert set(_instances) == before


def test_a_stopped_run_says_so_without_a_traceback():
    """Whoever pressed Stop knows where; what was recorded is at hand."""
    stopped = RunStoppedError("stopped at step 3", run="the run")
    assert stopped.run == "the run"
    assert stopped._render_traceback_() == ["RunStoppedError: stopped at step 3"]
