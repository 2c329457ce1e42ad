"""The schedules that have a name."""

from collections.abc import Callable

from gpipe.arguments import require_choice
from gpipe.schedule.fill_drain import fill_drain
from gpipe.schedule.one_f_one_b import one_f_one_b
from gpipe.schedule.schedule import Schedule

__all__ = ["SCHEDULES", "Builder", "resolve"]

Builder = Callable[[int, int], Schedule]
"""Takes the number of stages and the number of micro-batches, in this order."""

SCHEDULES: dict[str, Builder] = {"fill_drain": fill_drain, "1f1b": one_f_one_b}


def resolve(schedule: str, num_stages: int, num_microbatches: int) -> Schedule:
    """Builds the schedule that a caller asked for by name.

    Args:
        schedule: A key of `SCHEDULES`.
        num_stages: Stages of the model (K), at least 1.
        num_microbatches: Micro-batches of a mini-batch (M), at least 1.

    Returns:
        A schedule without recomputes.

    Raises:
        TypeError: `schedule` is no string, or a size is no whole number.
        ValueError: The name is unknown (the message names the nearest), or a size is below 1.
    """
    return SCHEDULES[require_choice("schedule", schedule, SCHEDULES)](num_stages, num_microbatches)
