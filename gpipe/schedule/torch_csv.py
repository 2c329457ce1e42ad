"""Schedules in the CSV form of torch.distributed.pipelining."""

import csv
import re
from io import StringIO

from gpipe.errors import ScheduleError
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.notation import sized
from gpipe.schedule.schedule import Schedule

__all__ = ["from_csv", "to_csv"]

LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}
CELL = re.compile(r"(\d+)([FB])(\d+)")


def to_csv(schedule: Schedule) -> str:
    r"""The forwards and backwards, one line per rank: `0F0,0F1,0B0,0B1`.

    That is the "compute_only" form; stage, letter, micro-batch. Recomputes and transfers are left
    out: torch recomputes inside a backward, and adds the transfers when it loads the file.

    Args:
        schedule: A valid schedule.

    Returns:
        Lines that end with "\n".
    """
    return "".join(
        ",".join(f"{stage}{LETTERS[kind]}{microbatch}" for kind, stage, microbatch in row) + "\n"
        for row in (
            [action[:3] for action in row if action.kind in LETTERS] for row in schedule.rows
        )
    )


def from_csv(text: str) -> Schedule:
    """Reads the forwards and backwards of each rank; empty cells are skipped.

    Args:
        text: Lines as `to_csv` and torch's "compute_only" form have them.

    Returns:
        The schedule, as large as its actions need; it is not checked.

    Raises:
        ScheduleError: A cell is neither a forward nor a whole backward: split backwards and
            communication have no counterpart here.
    """
    rows = [
        [_action(number, cell.strip()) for cell in row if cell.strip()]
        for number, row in enumerate(csv.reader(StringIO(text)), start=1)
    ]
    return sized(rows)


def _action(number: int, cell: str) -> Action:
    found = CELL.fullmatch(cell)
    if found is None:
        raise ScheduleError(
            f"{cell!r} in line {number} is neither a forward nor a whole backward. Use the "
            "compute_only form, with cells such as 0F1 and 0B1."
        )
    stage, letter, microbatch = found.groups()
    return Action(Kind(letter), int(stage), int(microbatch))
