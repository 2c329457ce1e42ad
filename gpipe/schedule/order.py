"""The order in which rows run against each other."""

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from gpipe.schedule.action import Action
from gpipe.schedule.graph import Graph

__all__ = ["Order", "Wait", "run"]


class Wait(NamedTuple):
    """A worker that stands still: its next `action` needs `missing`, which has not run."""

    worker: int
    action: Action
    missing: Action


class Order(NamedTuple):
    """How the rows ran against each other.

    Attributes:
        turns: Pairs (worker, place): the worker carries out its row up to that place, excluded.
        waits: Who stands still in the end; nobody if all ran.
    """

    turns: list[tuple[int, int]]
    waits: list[Wait]


def run(graph: Graph) -> Order:
    """Runs the rows against each other, without times, until nothing moves any more.

    A worker goes on until it must wait. It is then put aside under the action that it misses, and
    looked at again when that one has run and not before: the time is linear in the number of
    actions.

    Args:
        graph: That of any schedule; it need not be complete.

    Returns:
        Turns that keep every row and every wait, and who is left.
    """
    done = bytearray(graph.size)
    for number in graph.given:
        done[number] = True
    aside: defaultdict[int, list[int]] = defaultdict(list)
    movable = deque(range(graph.schedule.num_workers))
    workers = [_work(graph, worker, done, aside, movable) for worker in movable]
    turns, waiting = [], {}
    while movable:
        worker = movable.popleft()
        place, missing = next(workers[worker])
        turns.append((worker, place))
        waiting[worker] = place, missing
        if missing is not None:
            aside[missing].append(worker)
    return Order(turns, list(_waits(graph, waiting)))


def _work(
    graph: Graph,
    worker: int,
    done: bytearray,
    aside: dict[int, list[int]],
    movable: deque[int],
) -> Iterator[tuple[int, int | None]]:
    """Carries out a row; yields the place and the missing number each time that it must wait."""
    needs, lanes = graph.needs, graph.schedule.lane_rows[worker]
    for place, number in enumerate(graph.numbers[worker].tolist()):
        for distance in needs[lanes[place]]:
            while not done[number + distance]:
                yield place, number + distance
        done[number] = True
        if number in aside:
            movable.extend(aside.pop(number))
    yield len(lanes), None


def _waits(graph: Graph, waiting: dict[int, tuple[int, int | None]]) -> Iterator[Wait]:
    for worker, (place, missing) in sorted(waiting.items()):
        if missing is not None:
            action = graph.schedule.rows[worker][place]
            yield Wait(worker, action, graph.action(missing))
