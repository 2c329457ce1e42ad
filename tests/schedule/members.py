"""All members over which a law of schedules is tested."""

from itertools import product

from gpipe.schedule import (
    LOOPED_SCHEDULES,
    RECOMPUTE_MODES,
    SCHEDULE_NAMES,
    SCHEDULES,
)

NAMES = sorted(SCHEDULE_NAMES)
MODES = RECOMPUTE_MODES


def builders(workers, stages_per_worker, microbatches):
    """Every builder at every size: (name, K, v, M, schedule)."""
    for num_workers, num_microbatches in product(workers, microbatches):
        for name, build in SCHEDULES.items():
            yield name, num_workers, 1, num_microbatches, build(num_workers, num_microbatches)
        for (name, looped), v in product(LOOPED_SCHEDULES.items(), stages_per_worker):
            yield name, num_workers, v, num_microbatches, looped(num_workers, v, num_microbatches)
