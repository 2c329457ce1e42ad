"""Breadth-first: fill-drain for stages that live on any workers."""

from collections.abc import Sequence
from itertools import product

from gpipe.schedule.action import Action, Kind
from gpipe.schedule.schedule import Schedule

__all__ = ["breadth_first"]


def breadth_first(worker_of: Sequence[int], num_microbatches: int) -> Schedule:
    """All micro-batches go through one stage of a worker before any goes through its next.

    The forwards of each worker run stage after stage, in each from the first micro-batch to the
    last; the backwards are their mirror image. With one stage per worker it is `fill_drain`. It
    never deadlocks: an action only waits for one of an earlier stage, or back, of a later one.

    Args:
        worker_of: The worker of each stage; every worker from 0 has one.
        num_microbatches: Micro-batches of a mini-batch (M), at least 1.
    """
    stages_of: list[list[int]] = [[] for _ in range(max(worker_of) + 1)]
    for stage, worker in enumerate(worker_of):
        stages_of[worker].append(stage)
    rows = tuple(_row(stages, num_microbatches) for stages in stages_of)
    return Schedule(rows, len(worker_of), num_microbatches)


def _row(stages: Sequence[int], num_microbatches: int) -> tuple[Action, ...]:
    pairs = list(product(stages, range(num_microbatches)))
    fill = [Action(Kind.FORWARD, *pair) for pair in pairs]
    drain = [Action(Kind.BACKWARD, *pair) for pair in reversed(pairs)]
    return (*fill, *drain)
