"""What is wrong with a run, in words: findings with what they cost, the evidence, and a remedy."""

from __future__ import annotations

from vizkit.findings.diagnosing import diagnose
from vizkit.findings.finding import Diagnosis, Finding, FindingKind
from vizkit.findings.rules import RULES

__all__ = ["RULES", "Diagnosis", "Finding", "FindingKind", "diagnose"]
