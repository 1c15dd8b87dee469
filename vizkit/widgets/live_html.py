"""The live view's pieces as HTML and SVG: small, in the page's own colours, and readable as text."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from vizkit.runtime.live_state import Curve, LiveState, RankNow
from vizkit.units import bytes_text, seconds_text

MOST_ROWS = 16
CURVE_POINTS = 60
_WIDTH, _HEIGHT, _PAD = 240, 56, 3
_BAR_PX = 160

STYLE = """<style>
.vk-live { font: 13px/1.5 var(--jp-ui-font-family, sans-serif); color: var(--jp-ui-font-color1, currentColor); }
.vk-live table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.vk-live caption { text-align: left; padding: 2px 0; }
.vk-live th, .vk-live td { text-align: left; padding: 1px 14px 1px 0; font-weight: normal; white-space: nowrap; }
.vk-live thead th { border-bottom: 1px solid; opacity: .8; }
.vk-live td.n { text-align: right; }
.vk-live tr.slow td { font-weight: bold; }
.vk-live .bar { display: inline-block; height: 11px; width: 160px; vertical-align: -1px; }
.vk-live .bar i { display: inline-block; height: 9px; border: 1px solid; box-sizing: content-box; vertical-align: top; }
.vk-live .own { background: #0072b2; }
.vk-live .slow .own { background: #d55e00; }
.vk-live .idle { background: repeating-linear-gradient(45deg, transparent 0 3px, currentColor 3px 4px); }
.vk-live .bar .idle { border-left: 0; }
.vk-live figure { display: inline-block; margin: 4px 18px 4px 0; }
.vk-live svg { display: block; border-left: 1px solid; border-bottom: 1px solid; }
.vk-live progress { width: 240px; vertical-align: -3px; }
.vk-live .alert { border: 2px solid #d55e00; padding: 2px 8px; display: inline-block; }
</style>"""
"""Sent once; every refresh then only names classes."""


def body(state: LiveState) -> str:
    """All that changes from one refresh to the next."""
    return f'<div class="vk-live">{head(state)}{curves(state.curves)}{table(state)}</div>'


def head(state: LiveState) -> str:
    """How far, how fast, and how much is posted."""
    steps = [rank.step_s for rank in state.ranks if rank.step_s is not None]
    posted = sum(rank.posted_bytes for rank in state.ranks)
    bar = f'<progress value="{state.done}" max="{state.total}"></progress> ' if state.total else ""
    facts = [
        state.progress,
        f"{seconds_text(max(steps))} a step" if steps else "no step is done yet",
        f"{state.elapsed_s:.0f} s since the start",
        f"{bytes_text(state.bytes_per_s)}/s posted, {bytes_text(posted)} in all",
    ]
    stopping = " · <b>stopping</b>" * state.is_stopping
    return f"<div>{bar}{html.escape(' · '.join(facts))}{stopping}</div>"


def alert(state: LiveState) -> str:
    """Who is slow, in a sentence; empty while nobody is."""
    said = "<br>".join(f"Slow: {html.escape(str(slow))}" for slow in state.slow)
    return f'<div class="vk-live"><span class="alert" role="alert">{said}</span></div>' if said else ""


def table(state: LiveState) -> str:
    """A row for each rank: what a step takes, split into own work and waiting, memory, and what it does now."""
    slow = {found.rank: found for found in state.slow}
    rows = state.ranks
    if len(rows) > MOST_ROWS:  # the slowest say most
        chosen = sorted(rows, key=lambda r: (r.rank not in slow, -(r.own_s or 0), r.rank))[:MOST_ROWS]
        rows = tuple(sorted(chosen, key=lambda r: r.rank))
    longest = max((rank.step_s or 0 for rank in state.ranks), default=0) or 1.0
    left = len(state.ranks) - len(rows)
    more = f"the {len(rows)} slowest of {len(state.ranks)} ranks; " if left else ""
    caption = f"{more}a step: median of the latest, wall clock; filled: own work, hatched: waiting for others"
    titles = "".join(f"<th>{title}</th>" for title in ("rank", "step", "", "a step", "own work", "memory", "now"))
    return (
        f"<table><caption>{caption}</caption><thead><tr>{titles}</tr></thead>"
        f"<tbody>{''.join(_row(rank, longest, rank.rank in slow) for rank in rows)}</tbody></table>"
    )


def _row(rank: RankNow, longest_s: float, is_slow: bool) -> str:
    step_s, own_s = rank.step_s, rank.own_s
    bar = ""
    if step_s is not None and own_s is not None:
        own = round(_BAR_PX * min(own_s, step_s) / longest_s)
        rest = max(0, round(_BAR_PX * step_s / longest_s) - own)
        bar = f'<i class="own" style="width:{own}px"></i>' + f'<i class="idle" style="width:{rest}px"></i>' * (rest > 1)
    cells = [
        f"<td>{rank.rank}{' slow' * is_slow}</td><td class=n>{rank.steps}</td>",
        f'<td><span class="bar">{bar}</span></td>',
        f"<td class=n>{_time(step_s)}</td><td class=n>{_time(own_s)}</td>",
        f"<td class=n>{'–' if rank.memory_bytes is None else bytes_text(rank.memory_bytes)}</td>",
        f"<td>{html.escape(rank.doing)}</td>",
    ]
    return f"<tr{' class=slow' * is_slow}>{''.join(cells)}</tr>"


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else seconds_text(seconds)


def curves(shown: Sequence[Curve]) -> str:
    """One small curve for each number that the ranks log, with its last value in words."""
    return "".join(map(_figure, shown))


def _figure(curve: Curve) -> str:
    points = [point for point in curve.points if math.isfinite(point.value)]
    last = curve.points[-1]
    words = f"{curve.name} {last.value:.4g} at step {last.step} (rank {curve.rank})"
    if not points:
        return f"<figure><figcaption>{html.escape(words)}</figcaption></figure>"
    low, high = min(point.value for point in points), max(point.value for point in points)
    first, end = points[0].step, max(points[-1].step, points[0].step + 1)
    every = max(1, math.ceil(len(points) / CURVE_POINTS))
    chosen = [*points[:-1:every], points[-1]]
    places = " ".join(
        f"{_PAD + (_WIDTH - 2 * _PAD) * (point.step - first) / (end - first):.0f},"
        f"{_HEIGHT - _PAD - (_HEIGHT - 2 * _PAD) * (point.value - low) / ((high - low) or 1):.0f}"
        for point in chosen
    )
    said = html.escape(f"{words}; from {low:.4g} to {high:.4g}")
    return (
        f'<figure><svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{said}">'
        f'<polyline points="{places}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
        f"<figcaption>{said}</figcaption></figure>"
    )
