"""What a schedule must hold, and what it may not."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from gpipe.schedule.action import Action, Kind
from gpipe.schedule.graph import Graph
from gpipe.schedule.lane import Lane
from gpipe.schedule.refusal import Mistake
from gpipe.schedule.schedule import Schedule

__all__ = ["miscounted", "workers_text"]


def miscounted(graph: Graph) -> list[Mistake]:
    """Names what is missing, what stands more than once and what does not belong here."""
    schedule, counts = graph.schedule, graph.counts.copy()
    inside = slice(schedule.num_microbatches)
    none = np.zeros(schedule.num_microbatches, np.int64)
    wrong: list[tuple[int, int, int, Action]] = []
    for rank, lane in enumerate(_expected(schedule)):
        place = graph.places.get(lane)
        found = none if place is None else counts[place, inside]
        is_wrong = found > 1 if lane.kind == Kind.RECOMPUTE else found != 1
        wrong += [
            (lane.stage, microbatch, rank, lane.action(microbatch))
            for microbatch in np.flatnonzero(is_wrong).tolist()
        ]
        if place is not None:
            counts[place, inside] = 0  # what is left in the end was not expected
    foreign = [graph.action(number) for number in np.flatnonzero(counts).tolist()]
    told = _told([action for *_, action in sorted(wrong)], schedule) if wrong else []
    return [*told, *(_foreign(action, schedule) for action in foreign)]


def workers_text(workers: Iterable[int]) -> str:
    """Worker numbers as a phrase: "workers 0, 1 and 2"."""
    *others, last = (str(worker) for worker in sorted(set(workers)))
    return f"workers {', '.join(others)} and {last}" if others else f"worker {last}"


def _expected(schedule: Schedule) -> Iterator[Lane]:
    """The lanes of which all actions must be there once; the recomputes may."""
    for stage in range(schedule.num_stages):
        for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD):
            yield Lane(kind, stage)
    if schedule.has_transfers:
        for way in _ways(schedule):
            yield from _both_directions(*way)


def _ways(schedule: Schedule) -> Iterator[tuple[int, int]]:
    stages = range(schedule.num_stages)
    boundaries = [(stage, stage + 1) for stage in stages[:-1]]
    for stash, pop in [*boundaries, *sorted(schedule.skips)]:
        if stash in stages and pop in stages and schedule.are_apart(stash, pop):
            yield stash, pop


def _both_directions(stash: int, pop: int) -> Iterator[Lane]:
    yield Lane(Kind.SEND_ACTIVATION, stash, pop)
    yield Lane(Kind.RECEIVE_ACTIVATION, pop, stash)
    yield Lane(Kind.SEND_GRADIENT, pop, stash)
    yield Lane(Kind.RECEIVE_GRADIENT, stash, pop)


def _told(actions: Sequence[Action], schedule: Schedule) -> Iterator[Mistake]:
    places: defaultdict[Action, list[int]] = defaultdict(list)
    for worker, row in enumerate(schedule.rows):
        for action in row:
            places[action].append(worker)
    for action in actions:
        if workers := places.get(action):
            fact = f"{action} stands {len(workers)} times, on {workers_text(workers)}."
            yield Mistake(f"{fact} Keep one.", (action,))
        else:
            fact = f"{action} stands in no row."
            yield Mistake(f"{fact} Add it to that of the worker of its stage.")


def _foreign(action: Action, schedule: Schedule) -> Mistake:
    _, stage, microbatch = action[:3]
    ends = (stage, action.peer or 0)
    if microbatch not in range(schedule.num_microbatches) or not all(
        end in range(schedule.num_stages) for end in ends
    ):
        sizes = f"{schedule.num_stages} stages and {schedule.num_microbatches} micro-batches"
        fact = f"{action} lies outside {sizes}, counted from 0."
    elif Lane(action.kind, stage, action.peer).ends is None:
        fact = (
            f"{action} leads the wrong way: gradients go to earlier stages, activations to later."
        )
    else:
        worker = schedule.worker_of(stage)
        fact = f"{action} has nowhere to go: both stages live on worker {worker}."
    return Mistake(f"{fact} Leave it out.", (action,))
