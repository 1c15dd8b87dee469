"""One rank for which the others wait."""

from __future__ import annotations

from collections.abc import Iterator

from vizkit.findings.evidence import Evidence
from vizkit.findings.finding import Finding, FindingKind
from vizkit.units import seconds_text


def straggler(evidence: Evidence) -> Iterator[Finding]:
    """A rank to which 70 % or more of all waiting at collectives is due.

    Cost: what the others would wait less if it arrived together with the next to last, mean over the ranks. Messages of
    pipelines do not count, where waiting follows from the order of the stages. Measured work has jitter: there it
    counts from 20 % of the makespan on, or from 10 % where that rank is the last more often than chance explains.
    """
    late = evidence.lateness
    rank = late.culprit
    if rank is None or not evidence.is_beyond_jitter(float(late.saved_s[rank]), late.is_steady(rank)):
        return
    cost_s = float(late.saved_s[rank])
    computed = evidence.parts.compute
    others = [int(computed[other]) for other in evidence.ranks.tolist() if other != rank]
    yield Finding(
        FindingKind.STRAGGLER,
        (rank,),
        cost_s,
        evidence.trace.clock,
        f"the other ranks wait for rank {rank}: {evidence.share_text(cost_s)} of the time",
        f"rank {rank} was last in {late.last_in[rank]} of {late.operations} collectives at which ranks waited; it "
        f"computed {seconds_text(computed[rank] / 1e9)}, the others {seconds_text(sum(others) / len(others) / 1e9)} "
        "on the mean",
        f"look at what rank {rank} alone does (evaluation, checkpoints, logging), at its cores, clock and neighbours; "
        "move that work to all ranks, or the rank to another device",
    )
