"""The builders of all named schedules, in one table, from the simplest to the newest."""

from vizkit.schedules.builders import classic, dualpipe, interleaved, v_shape, zbv, zero_bubble

RECIPES = (
    *classic.RECIPES,
    *interleaved.RECIPES,
    *zero_bubble.RECIPES,
    *zbv.RECIPES,
    *v_shape.RECIPES,
    *dualpipe.RECIPES,
)
