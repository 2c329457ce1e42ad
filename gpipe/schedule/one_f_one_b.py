"""1F1B: one forward, one backward, in turn."""

from collections.abc import Sequence
from itertools import chain

from gpipe.arguments import require_count
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.schedule import Schedule

__all__ = ["in_turn", "one_f_one_b"]


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """As long as fill-drain, but each backward starts as early as it can and frees its memory.

    Worker k (= stage k) runs K - 1 - k forwards ahead, then forward and backward in turn, then
    the backwards that are left: it never holds more than K - k micro-batches. All run from the
    first micro-batch to the last. Four stages, four micro-batches:

        worker 0  F0.0 F0.1 F0.2 F0.3  .    .    .   B0.0  .   B0.1  .   B0.2  .   B0.3
        worker 1   .   F1.0 F1.1 F1.2  .    .   B1.0 F1.3 B1.1  .   B1.2  .   B1.3  .
        worker 2   .    .   F2.0 F2.1  .   B2.0 F2.2 B2.1 F2.3 B2.2  .   B2.3  .    .
        worker 3   .    .    .   F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3  .    .    .

    Args:
        num_stages: Stages of the model (K), at least 1.
        num_microbatches: Micro-batches of a mini-batch (M), at least 1; it may be below K.

    Returns:
        K rows of 2M actions.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size is below 1.
    """
    num_stages = require_count("num_stages", num_stages)
    num_microbatches = require_count("num_microbatches", num_microbatches)
    rows = tuple(_row(stage, num_stages, num_microbatches) for stage in range(num_stages))
    return Schedule(rows, num_stages, num_microbatches)


def in_turn(
    forwards: Sequence[Action], backwards: Sequence[Action], num_ahead: int
) -> tuple[Action, ...]:
    """The first `num_ahead` forwards, then forward and backward in turn, then what is left.

    Args:
        forwards: Those of one worker, in order.
        backwards: As many, in order.
        num_ahead: Forwards that run before the first one that has a backward behind it.
    """
    num_ahead = min(num_ahead, len(forwards))
    pairs = zip(forwards[num_ahead:], backwards, strict=False)  # the last `num_ahead` have no pair
    left = backwards[len(forwards) - num_ahead :]
    return (*forwards[:num_ahead], *chain.from_iterable(pairs), *left)


def _row(stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    forwards = [Action(Kind.FORWARD, stage, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action(Kind.BACKWARD, stage, microbatch) for microbatch in range(num_microbatches)]
    return in_turn(forwards, backwards, num_stages - 1 - stage)
