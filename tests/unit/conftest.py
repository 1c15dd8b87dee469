"""How property tests run here."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# a machine that other work keeps busy is slow now and then, and that is no failure
settings.register_profile("vizkit", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vizkit")
