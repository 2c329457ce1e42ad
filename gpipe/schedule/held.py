"""How many micro-batches a worker holds."""

import numpy as np

from gpipe.schedule.action import Kind
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
    change = np.array([CHANGE.get(lane.kind, 0) for lane in schedule.lanes], np.int64)
    levels = (np.cumsum(change[list(row)]) for row in schedule.lane_rows)
    return tuple(int(level.max(initial=0)) for level in levels)
