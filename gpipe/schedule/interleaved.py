"""Interleaved 1F1B: several stages per worker, one forward, one backward, in turn."""

from collections.abc import Sequence
from itertools import product

from gpipe.arguments import require_count
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.one_f_one_b import in_turn
from gpipe.schedule.schedule import Schedule

__all__ = ["interleaved_1f1b"]


def interleaved_1f1b(num_workers: int, stages_per_worker: int, num_microbatches: int) -> Schedule:
    """1F1B in smaller steps: a micro-batch goes round the workers once per stage that each has.

    Stage s lives on worker s mod K. In each round the workers do K micro-batches with one stage,
    then the same K with the next. For stages that cost t_F and t_B, and M a multiple of K, it
    takes (v M + K - 1)(t_F + t_B): the bubble is that of 1F1B divided by v, since a step is. Any
    other M is built for the next multiple of K, and the surplus micro-batches are left out, which
    leaves gaps but never a deadlock. With one stage per worker it is `one_f_one_b`.

    Worker k runs (v - 1) K + 2 (K - 1 - k) forwards ahead: K - 1 - k more than the bubble needs, so
    that a transfer, of which there are v times as many, has the time of a step before it is waited
    for. It holds at most one micro-batch more than that, each stage counted, and never more than
    v M; where M is a multiple of K, exactly the smaller of the two. Two workers with two stages
    each, three micro-batches; a fourth would fill the gaps:

        worker 0  F0.0 F0.1 F2.0 F2.1 F0.2 B2.0  .   B2.1 F2.2 B0.0 B0.1  .   B2.2  .   B0.2
        worker 1   .   F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 B1.1 F3.2 B3.2  .   B1.2  .

    Args:
        num_workers: Workers (K), at least 1.
        stages_per_worker: Stages of each (v), at least 1; the model has v K stages.
        num_microbatches: Micro-batches of a mini-batch (M), at least 1.

    Returns:
        K rows of 2 v M actions.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size is below 1.
    """
    num_workers = require_count("num_workers", num_workers)
    stages_per_worker = require_count("stages_per_worker", stages_per_worker)
    num_microbatches = require_count("num_microbatches", num_microbatches)
    num_built = -(-num_microbatches // num_workers) * num_workers
    rows = []
    for worker in range(num_workers):
        stages = range(worker, stages_per_worker * num_workers, num_workers)
        forwards = _rounds(Kind.FORWARD, stages, num_built, num_workers)
        backwards = _rounds(Kind.BACKWARD, stages[::-1], num_built, num_workers)
        row = in_turn(forwards, backwards, _num_ahead(worker, num_workers, stages_per_worker))
        rows.append(tuple(action for action in row if action.microbatch < num_microbatches))
    return Schedule(tuple(rows), stages_per_worker * num_workers, num_microbatches)


def _num_ahead(worker: int, num_workers: int, stages_per_worker: int) -> int:
    """The forwards that a worker runs before the first one that has a backward behind it."""
    num_behind = num_workers - 1 - worker
    if stages_per_worker == 1:
        return num_behind  # 1F1B
    return (stages_per_worker - 1) * num_workers + 2 * num_behind


def _rounds(
    kind: Kind, stages: Sequence[int], num_microbatches: int, num_workers: int
) -> list[Action]:
    """All actions of a kind on one worker: groups of micro-batches, in each stage after stage."""
    return [
        Action(kind, stage, first + place)
        for first, stage in product(range(0, num_microbatches, num_workers), stages)
        for place in range(num_workers)
    ]
