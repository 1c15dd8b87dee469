"""One time axis for hosts whose clocks differ, from what their ranks did together."""

from vizkit.alignment.bounds import MAX_DRIFT, Bounds, ClockAlignment, align
from vizkit.alignment.records import observed, on_common_clock, without_failed

__all__ = ["MAX_DRIFT", "Bounds", "ClockAlignment", "align", "observed", "on_common_clock", "without_failed"]
