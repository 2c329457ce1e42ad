"""How many micro-batches a worker holds."""

from itertools import accumulate

from gpipe.schedule.action import Action, Kind
from gpipe.schedule.schedule import Schedule

__all__ = ["peak_held"]

CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD: -1}


def peak_held(schedule: Schedule) -> tuple[int, ...]:
    """The most micro-batches that each worker holds at once, from forward to backward.

    A worker with several stages counts a micro-batch once for each of them. A recomputed
    micro-batch counts, too: its boundary input is held.

    Args:
        schedule: A valid schedule.

    Returns:
        One number per worker.
    """
    return tuple(_peak(row) for row in schedule.rows)


def _peak(row: tuple[Action, ...]) -> int:
    return max(accumulate(CHANGE.get(action.kind, 0) for action in row), default=0)
