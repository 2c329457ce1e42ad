"""Fill-drain: all forwards, then all backwards."""

from gpipe.arguments import require_count
from gpipe.schedule.breadth_first import breadth_first
from gpipe.schedule.schedule import Schedule

__all__ = ["fill_drain"]


def fill_drain(num_stages: int, num_microbatches: int) -> Schedule:
    """The order of the paper: fill the pipe with all forwards, then drain it of all backwards.

    The forwards run from the first micro-batch to the last, the backwards from the last to the
    first, so that the last stage starts on what it has just computed. Worker = stage; each holds
    all micro-batches at the turn. Four stages, four micro-batches:

        worker 0  F0.0 F0.1 F0.2 F0.3  .    .    .    .    .    .   B0.3 B0.2 B0.1 B0.0
        worker 1   .   F1.0 F1.1 F1.2 F1.3  .    .    .    .   B1.3 B1.2 B1.1 B1.0  .
        worker 2   .    .   F2.0 F2.1 F2.2 F2.3  .    .   B2.3 B2.2 B2.1 B2.0  .    .
        worker 3   .    .    .   F3.0 F3.1 F3.2 F3.3 B3.3 B3.2 B3.1 B3.0  .    .    .

    Args:
        num_stages: Stages of the model (K), at least 1.
        num_microbatches: Micro-batches of a mini-batch (M), at least 1.

    Returns:
        K rows of 2M actions.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size is below 1.
    """
    stages = range(require_count("num_stages", num_stages))
    return breadth_first(stages, require_count("num_microbatches", num_microbatches))
