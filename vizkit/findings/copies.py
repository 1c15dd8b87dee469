"""What replicas should share and do not, and what they should not share and do: from `vk.fingerprint`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from vizkit.findings.evidence import Evidence
from vizkit.findings.finding import Finding, FindingKind, ranks_text
from vizkit.fingerprints import Noted
from vizkit.trace import NS_PER_S

MOST_CAMPS = 4
Series = Mapping[int, Mapping[int, Noted]]
"""By step and rank."""


def drifted_replica(evidence: Evidence) -> Iterator[Finding]:
    """Fingerprints that should be the same on all ranks of their group, and differ from some step on.

    Cost: from the last step at which all agreed (the start of the trace, if none) to the end; what was computed since
    then has to be computed again. `ranks` are those that differ from the most frequent hash, all where there is none.
    """
    for (name, _), steps in _series(evidence, same=True).items():
        agreed_ns, agreed = evidence.trace.extent_ns[0], None
        for step, by_rank in sorted(steps.items()):
            hashes = {rank: one.fingerprint.value for rank, one in by_rank.items()}
            if len(set(hashes.values())) > 1:
                yield _drift(evidence, name, step, hashes, agreed, agreed_ns)
                break
            agreed, agreed_ns = step, max(one.time_ns for one in by_rank.values())


def _drift(
    evidence: Evidence, name: str, step: int, hashes: Mapping[int, int], agreed: int | None, agreed_ns: int
) -> Finding:
    (most, count), *others = Counter(hashes.values()).most_common()
    has_majority = all(other < count for _, other in others)
    odd = tuple(sorted(rank for rank, value in hashes.items() if value != most or not has_majority))
    until = "never before" if agreed is None else f"up to step {agreed}"
    return Finding(
        FindingKind.DRIFTED_REPLICA,
        odd,
        (evidence.trace.extent_ns[1] - agreed_ns) / NS_PER_S,
        evidence.trace.clock,
        f"{name} of {ranks_text(odd)} differ{'s' * (not name.endswith('s'))} from "
        + ("the others'" if has_majority else "each other")
        + f" from step {step} on",
        f"{name} had one hash on all {len(hashes)} ranks {until}; at step {step} they have {len(others) + 1}: "
        + _camps(hashes),
        "start all replicas from one state (DDP does, or broadcast), let every update follow the averaged gradients, "
        "and look for what one rank did alone between these steps",
    )


def _camps(hashes: Mapping[int, int]) -> str:
    """Who agrees with whom, the largest camps first.

    >>> _camps({0: 7, 1: 5, 2: 7})
    'ranks 0 and 2; rank 1'
    """
    camps: dict[int, list[int]] = defaultdict(list)
    for rank, value in sorted(hashes.items()):
        camps[value].append(rank)
    named = sorted(camps.values(), key=lambda ranks: (-len(ranks), ranks))
    return "; ".join(map(ranks_text, named[:MOST_CAMPS])) + "; …" * (len(named) > MOST_CAMPS)


def repeated_data(evidence: Evidence) -> Iterator[Finding]:
    """Fingerprints that should differ between the ranks of their group, and are equal at one step.

    Cost: makespan × the share of noted batches that another rank had at the same step.
    """
    for (name, _), steps in _series(evidence, same=False).items():
        ranks: set[int] = set()
        repeats, total, at = 0, 0, []
        for step, by_rank in sorted(steps.items()):
            counts = Counter(one.fingerprint.value for one in by_rank.values())
            twice = {rank for rank, one in by_rank.items() if counts[one.fingerprint.value] > 1}
            total += len(by_rank)
            if twice:
                ranks |= twice
                repeats += len(by_rank) - len(counts)
                at.append(step)
        if not at:
            continue
        yield Finding(
            FindingKind.REPEATED_DATA,
            tuple(sorted(ranks)),
            evidence.trace.duration_ns / NS_PER_S * repeats / total,
            evidence.trace.clock,
            f"{ranks_text(ranks)} read the same {name}, so that equal work is done more than once",
            f"{repeats} of {total} noted batches were another rank's too, at {len(at)} of {len(steps)} steps "
            f"(first: step {at[0]})",
            "give each rank its own share: DistributedSampler, or samples[rank::world_size]; put the rank into the "
            "seed of what is drawn at random",
        )


def _series(evidence: Evidence, same: bool) -> dict[tuple[str, tuple[int, ...]], Series]:
    """What is to be compared, by name and group: steps at which two ranks or more noted something."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, Noted]]] = defaultdict(lambda: defaultdict(dict))
    for one in evidence.fingerprints:
        if one.fingerprint.same == same:
            key = (one.fingerprint.name, one.fingerprint.members)
            found[key][one.fingerprint.step][one.rank] = one
    return {key: {step: by for step, by in steps.items() if len(by) > 1} for key, steps in found.items()}
