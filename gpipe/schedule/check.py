"""The check that every schedule passes before it runs."""

from collections import defaultdict
from collections.abc import Iterator

from gpipe.schedule.collector import paused_collector
from gpipe.schedule.completeness import miscounted, workers_text
from gpipe.schedule.crossing import crossed
from gpipe.schedule.dependencies import predecessors
from gpipe.schedule.graph import graph_of
from gpipe.schedule.held import peak_held
from gpipe.schedule.order import run
from gpipe.schedule.refusal import Mistake, deadlock, refusal
from gpipe.schedule.schedule import Schedule
from gpipe.schedule.transfers import merge_transfers

__all__ = ["check"]


@paused_collector()
def check(schedule: Schedule) -> tuple[int, ...]:
    """Refuses a schedule that is incomplete, disordered or deadlocked.

    Every stage must have the forward and the backward of each micro-batch once and its recompute
    at most once, all of them in the row of one worker and in order. Whatever goes from one worker
    to another must be sent once and received once, in an order on which both rows agree. And when
    the rows run against each other, all must come to their end, even if each send waits until its
    receive is posted. The time is linear in the number of actions.

    Args:
        schedule: Any schedule; one of forwards only is incomplete. Where it has no transfers, they
            are added before the check.

    Returns:
        The most micro-batches that each worker holds at once (`peak_held`).

    Raises:
        ScheduleError: All mistakes with their remedies, or, in a deadlock, which worker waits for
            what; then the grid with the actions concerned.
    """
    graph = graph_of(schedule)
    order = run(graph)
    mistakes = [*miscounted(graph), *_misplaced(schedule)]
    # What stands before something that it needs, in its own row, waits for ever.
    mistakes += _disordered(schedule) if order.waits else []
    mistakes += [] if mistakes else crossed(graph)
    if mistakes:
        raise refusal("is wrong", schedule, mistakes)
    if order.waits:
        raise deadlock(schedule, order.waits)
    if not schedule.has_transfers:
        complete = merge_transfers(graph, order)
        if complete.has_transfers:
            check(complete)
    return peak_held(schedule)


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
            where = workers_text(workers)
            yield Mistake(f"Stage {stage} lives on {where}. Move it to one of them.")


def _disordered(schedule: Schedule) -> Iterator[Mistake]:
    """Names the actions that stand before one that they need, in the same row."""
    for worker, row in enumerate(schedule.rows):
        later = set(row)
        for action in row:
            later.discard(action)
            needed = [str(other) for other in predecessors(action, schedule) if other in later]
            if needed:
                fact = f"{action} stands before {' and '.join(needed)} on worker {worker}."
                yield Mistake(f"{fact} Move it behind.", (action,))
