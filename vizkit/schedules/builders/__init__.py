"""The builders of all named schedules, in one table."""

from vizkit.schedules.builders import classic

RECIPES = classic.RECIPES
