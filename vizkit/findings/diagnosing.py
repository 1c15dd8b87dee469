"""`diagnose`: all rules on one run or trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from vizkit.durations import Durations, Seconds
from vizkit.errors import InvalidInputError
from vizkit.findings.evidence import Evidence, Machine
from vizkit.findings.finding import Diagnosis
from vizkit.findings.rules import RULES
from vizkit.hardware import FREE_LINK, Link
from vizkit.record import Record
from vizkit.trace import NS_PER_S, Trace

_DEFAULT_LINK = Link()


@runtime_checkable
class RunLike(Protocol):
    """What `vk.launch` gives back, as far as a diagnosis needs it."""

    record: Record
    device: str
    cores: int
    num_threads: int

    @property
    def trace(self) -> Trace: ...

    def replay(self, link: Link | None = ..., durations: Any = ...) -> Trace: ...


def diagnose(
    run_or_trace: RunLike | Trace,
    *,
    link: Link | None = _DEFAULT_LINK,
    durations: Durations | Mapping[str, Seconds] | None = None,
    memory_limit_bytes: float | None = None,
) -> Diagnosis:
    """What is wrong with a run, in words: findings with cost, evidence and remedy, most costly first.

    A run on CPUs is judged on the virtual clock (`link` and `durations` as in `run.replay`), because the wall clock of
    a crowded machine shows its scheduler as much as the program; a run on GPUs on the wall clock. A trace is judged on
    its own clock; `link` and `durations` do not apply to it. Rules that need what a trace lacks find nothing:
    oversubscribed cores and sleeping loaders need a run without given durations, drifted replicas and repeated data
    need `vk.fingerprint`, full memory needs `memory_limit_bytes` for each rank. `vizkit.findings.rules` lists the
    rules; each says how it finds and what its cost means. Raises `InvalidInputError` for anything else and for a limit
    that is not positive.

    >>> from vizkit.trace import Span
    >>> steps = [Span(rank, "F", 10 * step, 10 * step + 10) for rank in (0, 1) for step in range(3)]
    >>> print(diagnose(Trace.from_spans(steps, clock="ideal")))
    nothing found: 11 rules, 2 ranks, 30 ns on the ideal clock
    """
    if memory_limit_bytes is not None and not memory_limit_bytes > 0:
        raise InvalidInputError.because(
            "memory_limit_bytes", memory_limit_bytes, "is the memory of one rank", "give bytes, such as 80e9"
        )
    evidence = _evidence(run_or_trace, link, durations, memory_limit_bytes)
    found = [finding for rule in RULES.values() for finding in rule(evidence)]
    trace = evidence.trace
    return Diagnosis(
        tuple(sorted(found, key=lambda finding: -finding.cost_s)),
        clock=trace.clock,
        makespan_s=trace.duration_ns / NS_PER_S,
        world_size=trace.world_size,
        num_rules=len(RULES),
    )


def _evidence(run: Any, link: Link | None, durations: Any, memory_limit_bytes: float | None) -> Evidence:
    if isinstance(run, Trace):
        if durations is not None or link is not _DEFAULT_LINK:
            raise InvalidInputError.because(
                "link" if durations is None else "durations",
                link if durations is None else durations,
                "a trace has its times already",
                "give the run, or run.replay(link=…, durations=…)",
            )
        return Evidence(run, memory_limit_bytes=memory_limit_bytes)
    if not isinstance(run, RunLike):
        raise InvalidInputError.because(
            "run_or_trace", type(run).__name__, "is neither a run nor a trace", "give what vk.launch returned"
        )
    machine = Machine(run.record, run.cores, run.num_threads, run.trace) if durations is None else None
    if run.device != "cpu":
        return Evidence(run.trace, machine=None, memory_limit_bytes=memory_limit_bytes)
    trace = run.replay(link=link, durations=durations)
    return Evidence(trace, link or FREE_LINK, machine, memory_limit_bytes)
