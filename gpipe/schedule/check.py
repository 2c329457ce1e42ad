"""The check that every schedule passes before it runs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from gpipe.errors import ScheduleError
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.dependencies import predecessors
from gpipe.schedule.order import Wait, run_order
from gpipe.schedule.schedule import Schedule
from gpipe.schedule.text import grid

__all__ = ["check"]

MAX_LINES = 20  # mistakes that a message spells out; the others are counted
REACH = 8  # actions that the grid of a message shows on each side of a marked one


class Mistake(NamedTuple):
    """A fact with its remedy, and the action to mark in the grid, if it stands there."""

    text: str
    action: Action | None = None


def check(schedule: Schedule) -> None:
    """Refuses a schedule that is incomplete, disordered or deadlocked.

    Every stage must have the forward and the backward of each micro-batch once and its recompute
    at most once, all of them in the row of one worker and in order; and when the rows run against
    each other, all must come to their end. The time is linear in the number of actions.

    Args:
        schedule: Any schedule; one of forwards only is incomplete.

    Raises:
        ScheduleError: All mistakes with their remedies, or, in a deadlock, which worker waits for
            what; then the grid with the actions concerned.
    """
    mistakes = [*_miscounted(schedule), *_misplaced(schedule), *_disordered(schedule)]
    if mistakes:
        raise ScheduleError(_message("is wrong", schedule, mistakes))
    waits = [_waiting(wait) for wait in run_order(schedule).waits]
    if waits:
        raise ScheduleError(_message("deadlocks", schedule, waits))


def _miscounted(schedule: Schedule) -> Iterator[Mistake]:
    """Names what is missing, what stands more than once and what does not belong here."""
    places = _places(schedule)
    pairs = product(range(schedule.num_stages), range(schedule.num_microbatches))
    for (stage, microbatch), kind in product(pairs, Kind):
        action = Action(kind, stage, microbatch)
        workers = places.pop(action, [])
        if len(workers) > 1:
            yield _repeated(action, workers)
        elif not workers and kind != Kind.RECOMPUTE:
            yield _missing(action)
    yield from (_foreign(action, schedule) for action in places)  # what the loop did not pop


def _places(schedule: Schedule) -> dict[Action, list[int]]:
    places: defaultdict[Action, list[int]] = defaultdict(list)
    for worker, row in enumerate(schedule.rows):
        for action in row:
            places[action].append(worker)
    return places


def _missing(action: Action) -> Mistake:
    return Mistake(f"{action} stands in no row. Add it to that of the worker of its stage.")


def _repeated(action: Action, workers: Sequence[int]) -> Mistake:
    fact = f"{action} stands {len(workers)} times, on {_workers(workers)}."
    return Mistake(f"{fact} Keep one.", action)


def _foreign(action: Action, schedule: Schedule) -> Mistake:
    sizes = f"{schedule.num_stages} stages and {schedule.num_microbatches} micro-batches"
    return Mistake(f"{action} lies outside {sizes}, counted from 0. Leave it out.", action)


def _misplaced(schedule: Schedule) -> Iterator[Mistake]:
    """Names the stages that live on several workers, and the workers without any."""
    homes: defaultdict[int, list[int]] = defaultdict(list)
    for worker in range(schedule.num_workers):
        stages = schedule.stages_of(worker)
        if not stages:
            yield Mistake(f"The row of worker {worker} is empty. Leave it out.")
        for stage in stages:
            homes[stage].append(worker)
    for stage, workers in sorted(homes.items()):
        if len(workers) > 1:
            yield Mistake(f"Stage {stage} lives on {_workers(workers)}. Move it to one of them.")


def _workers(workers: Sequence[int]) -> str:
    *others, last = (str(worker) for worker in sorted(set(workers)))
    return f"workers {', '.join(others)} and {last}" if others else f"worker {last}"


def _disordered(schedule: Schedule) -> Iterator[Mistake]:
    """Names the actions that stand before one that they need, in the same row."""
    for worker, row in enumerate(schedule.rows):
        later = set(row)
        for action in row:
            later.discard(action)
            needed = [str(other) for other in predecessors(action, schedule) if other in later]
            if needed:
                fact = f"{action} stands before {' and '.join(needed)} on worker {worker}."
                yield Mistake(f"{fact} Move it behind.", action)


def _waiting(wait: Wait) -> Mistake:
    fact = f"Worker {wait.worker} waits at {wait.action} for {wait.missing}, which never comes."
    return Mistake(f"{fact} Move {wait.action} back or {wait.missing} forward.", wait.action)


def _message(fact: str, schedule: Schedule, mistakes: Sequence[Mistake]) -> str:
    sizes = f"{schedule.num_stages} stages, {schedule.num_microbatches} micro-batches"
    lines = [mistake.text for mistake in mistakes[:MAX_LINES]]
    if len(mistakes) > MAX_LINES:
        lines.append(f"And {len(mistakes) - MAX_LINES} more mistakes.")
    marked = {mistake.action for mistake in mistakes if mistake.action is not None}
    legend = "The rows (* marks the actions above):"
    drawing = grid(schedule, marked, REACH)
    return "\n".join([f"The schedule ({sizes}) {fact}.", *lines, legend, drawing])
