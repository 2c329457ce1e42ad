"""What is shown of a schedule."""

from gpipe.schedule.held import peak_held
from gpipe.schedule.schedule import Schedule
from gpipe.schedule.text import picture, unit_slots

__all__ = ["summary"]


def summary(schedule: Schedule) -> str:
    """The sizes, the drawing over time, and what follows from them.

    Args:
        schedule: Any schedule, valid or not.

    Returns:
        Lines without a line break at the end.
    """
    slots = unit_slots(schedule)
    num_slots = 1 + max(slots.values(), default=-1)
    num_actions = sum(action.peer is None for row in schedule.rows for action in row)
    idle = 1 - len(slots) / (schedule.num_workers * num_slots) if num_slots else 0.0
    lines = [
        f"{schedule.num_stages} stages on {schedule.num_workers} workers, "
        f"{schedule.num_microbatches} micro-batches.",
        picture(schedule),
        f"{num_slots} slots; the bubble is {idle:.1%} where every action takes one slot.",
        f"Micro-batches held at most, by worker: {', '.join(map(str, peak_held(schedule)))}.",
    ]
    if len(slots) < num_actions:
        lines.append(f"{num_actions - len(slots)} actions can never run; `check` says why.")
    return "\n".join(lines)
