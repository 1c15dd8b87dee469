"""The schedules that vizkit knows by name."""

from __future__ import annotations

import difflib

from vizkit.errors import InvalidInputError
from vizkit.schedules.builders import RECIPES
from vizkit.schedules.recipe import Recipe
from vizkit.schedules.schedule import Schedule


def schedule_names() -> list[str]:
    """The names that `schedule` takes, from the simplest to the newest.

    >>> schedule_names()[:3]
    ['Sequential', 'GPipe', '1F1B']
    """
    return [recipe.name for recipe in RECIPES]


def schedule(name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The pipeline schedule of this name, as data: what each rank does, in order.

    Names are those of `torch.distributed.pipelining` where it has the schedule, in any case; `schedule_names` lists
    all. `stages_per_rank` defaults to what the schedule is made for. Raises `InvalidInputError` for an unknown name and
    for sizes that the schedule does not have, with the nearest that it has.

    >>> print(schedule("1F1B", num_ranks=2, num_microbatches=2))
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    return recipe(name).build(num_ranks, num_microbatches, stages_per_rank)


def recipe(name: str, argument: str = "name") -> Recipe:
    """What is known of the schedule of this name: its builder, rules, paper, bubble and memory.

    Raises `InvalidInputError` for an unknown name; `argument` is what the caller calls it.

    >>> recipe("zb-h1").bubble, recipe("zb-h1").activations, recipe("zb-h1").paper
    ('(p−1)(F+I−W)', 'p', 'Qi et al., 2023, arXiv:2401.10241')
    """
    wanted = _key(name) if isinstance(name, str) else None
    for candidate in RECIPES:
        if wanted in map(_key, (candidate.name, *candidate.aliases)):
            return candidate
    names = {_key(name): name for name in schedule_names()}
    meant = [names[key] for key in difflib.get_close_matches(wanted or "", names, n=1)]
    raise InvalidInputError.because(
        argument,
        name,
        "is not a schedule that vizkit knows",
        "".join(f"did you mean {found}? " for found in meant) + f"use one of {', '.join(schedule_names())}",
    )


def _key(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
