"""The schedules that have a name."""

from collections.abc import Callable

from gpipe.arguments import require_choice, require_count
from gpipe.errors import ScheduleError
from gpipe.schedule.fill_drain import fill_drain
from gpipe.schedule.interleaved import interleaved_1f1b
from gpipe.schedule.looped_breadth_first import looped_breadth_first
from gpipe.schedule.one_f_one_b import one_f_one_b
from gpipe.schedule.schedule import Schedule

__all__ = [
    "LOOPED_SCHEDULES",
    "SCHEDULES",
    "SCHEDULE_NAMES",
    "Builder",
    "LoopedBuilder",
    "as_schedule",
    "resolve",
]

Builder = Callable[[int, int], Schedule]
"""Takes the number of stages and the number of micro-batches, in this order."""

LoopedBuilder = Callable[[int, int, int], Schedule]
"""Takes the numbers of workers, of stages per worker and of micro-batches, in this order."""

SCHEDULES: dict[str, Builder] = {"fill_drain": fill_drain, "1f1b": one_f_one_b}
"""Those with one stage per worker."""

LOOPED_SCHEDULES: dict[str, LoopedBuilder] = {
    "interleaved_1f1b": interleaved_1f1b,
    "looped_breadth_first": looped_breadth_first,
}
"""Those with any number of stages per worker: stage s lives on worker s mod K."""

SCHEDULE_NAMES = (*SCHEDULES, *LOOPED_SCHEDULES)


def resolve(
    schedule: str, num_stages: int, num_microbatches: int, num_workers: int | None = None
) -> Schedule:
    """Builds the schedule that a caller asked for by name.

    Args:
        schedule: One of `SCHEDULE_NAMES`.
        num_stages: Stages of the model, at least 1.
        num_microbatches: Micro-batches of a mini-batch (M), at least 1.
        num_workers: Workers that share the stages; None for one worker per stage.

    Returns:
        A schedule without recomputes and transfers.

    Raises:
        TypeError: `schedule` is no string, or a size is no whole number.
        ValueError: The name is unknown (the message names the nearest), a size is below 1, or the
            stages cannot be shared out evenly, or not under this schedule.
    """
    name = require_choice("schedule", schedule, SCHEDULE_NAMES)
    num_stages = require_count("num_stages", num_stages)
    num_workers = num_stages if num_workers is None else require_count("num_workers", num_workers)
    stages_per_worker = _share(name, num_stages, num_workers)
    if name in LOOPED_SCHEDULES:
        return LOOPED_SCHEDULES[name](num_workers, stages_per_worker, num_microbatches)
    return SCHEDULES[name](num_stages, num_microbatches)


def as_schedule(
    spec: str | Schedule | Builder,
    num_stages: int,
    num_microbatches: int,
    num_workers: int | None = None,
) -> Schedule:
    """The schedule that a caller asked for in any of the ways that there are.

    Args:
        spec: A name, a schedule, or a function that makes one of the number of stages and the
            number of micro-batches.
        num_stages: Stages of the model, at least 1.
        num_microbatches: Micro-batches of a mini-batch (M), at least 1.
        num_workers: Workers that share the stages. None: as many as a schedule or a function has
            rows; for a name, one per stage.

    Returns:
        A schedule of these sizes; it is not checked.

    Raises:
        ScheduleError: A schedule has other sizes than these; the message has both.
        TypeError: `spec` is none of the three, or the function does not return a schedule.
        ValueError: As for `resolve`.
    """
    if isinstance(spec, str):
        return resolve(spec, num_stages, num_microbatches, num_workers)
    schedule = spec if isinstance(spec, Schedule) else _built(spec, num_stages, num_microbatches)
    found = [schedule.num_stages, schedule.num_microbatches, schedule.num_workers]
    asked = [num_stages, num_microbatches, found[-1] if num_workers is None else num_workers]
    if found != asked:
        raise ScheduleError(
            f"The schedule is for {_sizes(*found)}; this model runs with {_sizes(*asked)}. Build "
            "the schedule for these sizes, or pass a function (num_stages, num_microbatches) that "
            "does."
        )
    return schedule


def _share(name: str, num_stages: int, num_workers: int) -> int:
    """The stages per worker."""
    if num_stages % num_workers:
        raise ValueError(
            f"{num_stages} stages cannot be shared evenly by {num_workers} workers. Make the "
            "number of stages a multiple of the number of workers."
        )
    if name in SCHEDULES and num_stages != num_workers:
        looped = " or ".join(map(repr, LOOPED_SCHEDULES))
        raise ValueError(
            f"{name!r} has one stage per worker, and there are {num_stages} stages on "
            f"{num_workers} workers. Use {looped}, or as many workers as stages."
        )
    return num_stages // num_workers


def _built(builder: object, num_stages: int, num_microbatches: int) -> Schedule:
    if not callable(builder):
        names = ", ".join(map(repr, SCHEDULE_NAMES))
        raise TypeError(
            f"`schedule` is {builder!r}, of type {type(builder).__name__}. Use one of {names}, a "
            "Schedule, or a function (num_stages, num_microbatches) that returns one."
        )
    schedule = builder(num_stages, num_microbatches)
    if not isinstance(schedule, Schedule):
        name = getattr(builder, "__name__", repr(builder))
        raise TypeError(
            f"{name}({num_stages}, {num_microbatches}) returned {schedule!r}, of type "
            f"{type(schedule).__name__}. Let it return a Schedule."
        )
    return schedule


def _sizes(num_stages: int, num_microbatches: int, num_workers: int) -> str:
    return f"{num_stages} stages, {num_microbatches} micro-batches and {num_workers} workers"
