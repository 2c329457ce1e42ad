"""What is said about a schedule that cannot run."""

from collections.abc import Sequence
from typing import NamedTuple

from gpipe.errors import ScheduleError
from gpipe.schedule.action import Action
from gpipe.schedule.order import Wait
from gpipe.schedule.schedule import Schedule
from gpipe.schedule.text import grid

__all__ = ["Mistake", "deadlock", "refusal"]

MAX_LINES = 20  # mistakes that a message spells out; the others are counted
REACH = 8  # actions that the grid of a message shows on each side of a marked one


class Mistake(NamedTuple):
    """A fact with its remedy, and the actions to mark in the grid, where they stand there."""

    text: str
    actions: tuple[Action, ...] = ()


def refusal(fact: str, schedule: Schedule, mistakes: Sequence[Mistake]) -> ScheduleError:
    """The error that tells all mistakes at once and shows where they stand.

    Args:
        fact: What the schedule does or is: "is wrong".
        schedule: The one that is refused.
        mistakes: At least one.
    """
    sizes = f"{schedule.num_stages} stages, {schedule.num_microbatches} micro-batches"
    lines = [mistake.text for mistake in mistakes[:MAX_LINES]]
    if len(mistakes) > MAX_LINES:
        lines.append(f"And {len(mistakes) - MAX_LINES} more mistakes.")
    marked = {action for mistake in mistakes for action in mistake.actions}
    legend = "The rows (* marks the actions above):"
    drawing = grid(schedule, marked, REACH)
    return ScheduleError("\n".join([f"The schedule ({sizes}) {fact}.", *lines, legend, drawing]))


def deadlock(schedule: Schedule, waits: Sequence[Wait]) -> ScheduleError:
    """The error that tells which worker waits for what."""
    return refusal("deadlocks", schedule, [_waiting(wait) for wait in waits])


def _waiting(wait: Wait) -> Mistake:
    fact = f"Worker {wait.worker} waits at {wait.action} for {wait.missing}, which never comes."
    remedy = f"Move {wait.action} back or {wait.missing} forward."
    return Mistake(f"{fact} {remedy}", (wait.action,))
