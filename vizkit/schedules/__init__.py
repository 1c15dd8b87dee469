"""Pipeline schedules as data: built by name, read from CSV, checked."""

from vizkit.schedules.actions import Action, Cell
from vizkit.schedules.catalogue import recipe, schedule, schedule_names
from vizkit.schedules.schedule import Schedule

__all__ = ["Action", "Cell", "Schedule", "recipe", "schedule", "schedule_names"]
