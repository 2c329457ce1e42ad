"""Looped breadth-first: fill-drain with several stages per worker."""

from gpipe.arguments import require_count
from gpipe.schedule.breadth_first import breadth_first
from gpipe.schedule.schedule import Schedule

__all__ = ["looped_breadth_first"]


def looped_breadth_first(
    num_workers: int, stages_per_worker: int, num_microbatches: int
) -> Schedule:
    """All micro-batches go through one group of stages before any goes through the next.

    Stage s lives on worker s mod K; group g is the stages g K to g K + K - 1, one per worker. The
    forwards run group after group, in each from the first micro-batch to the last. The backwards
    are their mirror image: from the last group to the first, in each from the last micro-batch to
    the first. Every worker holds v M micro-batches at the turn, each stage counted. With one
    stage per worker it is `fill_drain`. Two workers with two stages each, three micro-batches:

        worker 0  F0.0 F0.1 F0.2 F2.0 F2.1 F2.2  .    .   B2.2 B2.1 B2.0 B0.2 B0.1 B0.0
        worker 1   .   F1.0 F1.1 F1.2 F3.0 F3.1 F3.2 B3.2 B3.1 B3.0 B1.2 B1.1 B1.0  .

    Args:
        num_workers: Workers (K), at least 1.
        stages_per_worker: Stages of each (v), at least 1; the model has v K stages.
        num_microbatches: Micro-batches of a mini-batch (M), at least 1; it may be below K.

    Returns:
        K rows of 2 v M actions.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size is below 1.
    """
    num_workers = require_count("num_workers", num_workers)
    num_stages = require_count("stages_per_worker", stages_per_worker) * num_workers
    num_microbatches = require_count("num_microbatches", num_microbatches)
    return breadth_first([stage % num_workers for stage in range(num_stages)], num_microbatches)
