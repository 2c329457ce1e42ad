"""The order in which rows run against each other."""

from collections import defaultdict, deque
from collections.abc import Container
from typing import NamedTuple

from gpipe.schedule.action import Action
from gpipe.schedule.dependencies import predecessors
from gpipe.schedule.schedule import Schedule

__all__ = ["Order", "Wait", "run_order"]


class Wait(NamedTuple):
    """A worker that stands still: its next `action` needs `missing`, which has not run."""

    worker: int
    action: Action
    missing: Action


class Order(NamedTuple):
    """What ran, in a possible order, and who stands still in the end (nobody if all ran)."""

    actions: list[Action]
    waits: list[Wait]


def run_order(schedule: Schedule) -> Order:
    """Runs the rows against each other, without times, until nothing moves any more.

    Every worker that can move makes one step in turn. One that cannot is put aside under the
    action that it misses, and looked at again when that one has run and not before: the time is
    linear in the number of actions.

    Args:
        schedule: Any schedule; it need not be complete.

    Returns:
        The actions in an order that keeps every row and every predecessor, and the waits.
    """
    order: list[Action] = []
    done: set[Action] = set()
    aside: defaultdict[Action, list[int]] = defaultdict(list)
    position = [0] * schedule.num_workers
    movable = deque(range(schedule.num_workers))
    while movable:
        worker = movable.popleft()
        if position[worker] == len(schedule.rows[worker]):
            continue
        action = schedule.rows[worker][position[worker]]
        missing = _first_missing(action, schedule, done)
        if missing is not None:
            aside[missing].append(worker)
            continue
        order.append(action)
        done.add(action)
        position[worker] += 1
        movable.extend([*aside.pop(action, ()), worker])
    return Order(order, _waits(schedule, position, aside))


def _first_missing(action: Action, schedule: Schedule, done: Container[Action]) -> Action | None:
    for predecessor in predecessors(action, schedule):
        if predecessor not in done:
            return predecessor
    return None


def _waits(schedule: Schedule, position: list[int], aside: dict[Action, list[int]]) -> list[Wait]:
    return sorted(
        Wait(worker, schedule.rows[worker][position[worker]], missing)
        for missing, workers in aside.items()
        for worker in workers
    )
