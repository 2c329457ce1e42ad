"""Schedules as text: the grid and the picture."""

from collections.abc import Container, Sequence

from gpipe.schedule.action import Action, Kind
from gpipe.schedule.clock import clock, kind_durations
from gpipe.schedule.graph import graph_of
from gpipe.schedule.order import run
from gpipe.schedule.schedule import Schedule

__all__ = ["grid", "picture", "unit_slots"]

BUBBLE = "."
ELLIPSIS = "..."
SLOTS = {Kind.FORWARD: 1, Kind.RECOMPUTE: 1, Kind.BACKWARD: 1}


def grid(
    schedule: Schedule, marked: Container[Action] = frozenset(), reach: int | None = None
) -> str:
    """Draws the order of each worker: one line per row, action after action, no times.

    Args:
        schedule: Any schedule, valid or not.
        marked: Actions that get a star behind them.
        reach: How many actions to show on each side of the first marked one of a row (of its
            beginning, if none is); None shows whole rows.

    Returns:
        Lines without a line break at the end.
    """
    return _table([_excerpt(row, marked, reach) for row in schedule.rows])


def picture(schedule: Schedule) -> str:
    """Draws the schedule over time: every action takes one slot, the earliest one possible.

    A dot is a slot in which a worker waits (a bubble). Transfers take no time and are left out, and
    so is an action that can never run; `check` says why it cannot.

    Args:
        schedule: Any schedule, usually a valid one.

    Returns:
        Lines without a line break at the end, one per worker, as many columns as slots.
    """
    slots = unit_slots(schedule)
    num_slots = 1 + max(slots.values(), default=-1)
    lines = [[BUBBLE] * num_slots for _ in schedule.rows]
    for action, slot in slots.items():
        lines[schedule.worker_of(action.stage)][slot] = str(action)
    return _table(lines)


def unit_slots(schedule: Schedule) -> dict[Action, int]:
    """The earliest slot of every action where each takes one slot and a transfer none.

    Args:
        schedule: Any schedule, usually a valid one.

    Returns:
        Slots of all that compute, counted from 0; an action that can never run has none.
    """
    graph = graph_of(schedule)
    order = run(graph)
    starts = clock(graph, order, kind_durations(graph, SLOTS)).starts
    stops = dict(order.turns)  # the last turn of each worker stays
    return {
        action: int(starts[number])
        for worker, row in enumerate(schedule.rows)
        for action, number in zip(row[: stops[worker]], graph.numbers[worker], strict=False)
        if action.kind in SLOTS
    }


def _excerpt(row: Sequence[Action], marked: Container[Action], reach: int | None) -> list[str]:
    reach = len(row) if reach is None else reach
    centre = next((place for place, action in enumerate(row) if action in marked), 0)
    first, behind = max(0, centre - reach), centre + reach + 1
    cells = [f"{action}*" if action in marked else f"{action}" for action in row[first:behind]]
    before, after = [ELLIPSIS] * (first > 0), [ELLIPSIS] * (behind < len(row))
    return before + cells + after


def _table(lines: Sequence[Sequence[str]]) -> str:
    width = max((len(cell) for line in lines for cell in line), default=0)
    label_width = len(f"worker {len(lines) - 1}")
    labels = [f"worker {worker}".ljust(label_width) for worker in range(len(lines))]
    cells = [" ".join(_cell(cell, width) for cell in line) for line in lines]
    return "\n".join(f"{label}  {text}".rstrip() for label, text in zip(labels, cells, strict=True))


def _cell(cell: str, width: int) -> str:
    return cell.center(width) if cell == BUBBLE else cell.ljust(width)
