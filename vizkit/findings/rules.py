"""The table of rules: each kind of finding, and the function that looks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vizkit.findings.bubble import bubble
from vizkit.findings.buckets import small_buckets
from vizkit.findings.copies import drifted_replica, repeated_data
from vizkit.findings.cores import oversubscribed_cores
from vizkit.findings.evidence import Evidence
from vizkit.findings.exposed import exposed_communication
from vizkit.findings.finding import Finding, FindingKind
from vizkit.findings.imbalance import imbalance
from vizkit.findings.loader import starved_loader
from vizkit.findings.room import memory_near_limit
from vizkit.findings.serial import serial_transfer
from vizkit.findings.straggler import straggler

Rule = Callable[[Evidence], Iterator[Finding]]

RULES: Mapping[FindingKind, Rule] = {
    FindingKind.DRIFTED_REPLICA: drifted_replica,
    FindingKind.REPEATED_DATA: repeated_data,
    FindingKind.STRAGGLER: straggler,
    FindingKind.IMBALANCE: imbalance,
    FindingKind.SERIAL_TRANSFER: serial_transfer,
    FindingKind.BUBBLE: bubble,
    FindingKind.STARVED_LOADER: starved_loader,
    FindingKind.SMALL_BUCKETS: small_buckets,
    FindingKind.EXPOSED_COMMUNICATION: exposed_communication,
    FindingKind.OVERSUBSCRIBED_CORES: oversubscribed_cores,
    FindingKind.MEMORY_NEAR_LIMIT: memory_near_limit,
}
