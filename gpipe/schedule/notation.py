"""Schedules as text files, written and read."""

import re
from collections.abc import Iterator, Sequence

from gpipe.errors import ScheduleError
from gpipe.schedule.action import Action, Kind, Transfer
from gpipe.schedule.schedule import Schedule
from gpipe.schedule.text import BUBBLE, grid

__all__ = ["from_text", "sized", "to_text"]

COMPUTING = re.compile(r"([FRB])(\d+)\.(\d+)")
TRANSFER = re.compile(r"([AG])(\d+)([<>])(\d+)\.(\d+)")
SIZE = re.compile(r"(\d+) (stages|micro-batches)")
ROW = re.compile(r"worker (\d+)(?:\s+(.*))?")


def to_text(schedule: Schedule) -> str:
    """The text form of a schedule: its sizes, then one line per worker.

        2 stages
        2 micro-batches
        worker 0  F0.0 F0.1 B0.0 B0.1
        worker 1  F1.0 B1.0 F1.1 B1.1

    Args:
        schedule: Any schedule.

    Returns:
        Text that `from_text` reads, with a line break at the end.
    """
    sizes = f"{schedule.num_stages} stages\n{schedule.num_microbatches} micro-batches\n"
    return f"{sizes}{grid(schedule)}\n"


def from_text(text: str) -> Schedule:
    """Reads the text form of a schedule.

    A row may also be drawn over time, as `picture` does: dots are skipped. Empty lines and what
    follows a `#` are, too. Sizes that are not told are as large as the actions need.

    Args:
        text: The lines; the workers in order, from 0 on.

    Returns:
        The schedule; it is not checked.

    Raises:
        ScheduleError: A line cannot be understood; the message has its number.
    """
    rows: list[tuple[Action, ...]] = []
    sizes: dict[str, int] = {}
    for number, line in _lines(text):
        if size := SIZE.fullmatch(line):
            sizes[size[2]] = int(size[1])
        elif row := ROW.fullmatch(line):
            rows.append(_row(number, row, len(rows)))
        else:
            raise ScheduleError(
                f"Line {number}, {line!r}, is no line of a schedule. Write `worker 0  F0.0 B0.0`, "
                "`4 stages` or `8 micro-batches`."
            )
    return sized(rows, sizes.get("stages"), sizes.get("micro-batches"))


def sized(
    rows: Sequence[Sequence[Action]],
    num_stages: int | None = None,
    num_microbatches: int | None = None,
) -> Schedule:
    """A schedule whose sizes are as large as its actions need, where they are not told.

    Raises:
        ScheduleError: There are not even as many actions as forwards are needed.
    """
    actions = [action for row in rows for action in row]
    stages = (max(action.stage, action.peer or 0) for action in actions)
    if num_stages is None:
        num_stages = 1 + max(stages, default=0)
    if num_microbatches is None:
        num_microbatches = 1 + max((action.microbatch for action in actions), default=0)
    # Also keeps a slip such as F0.1000000000 from becoming that many complaints.
    if not 0 < num_stages * num_microbatches <= len(actions):
        raise ScheduleError(
            f"{len(actions)} actions cannot be a schedule of {num_stages} stages and "
            f"{num_microbatches} micro-batches. Write at least a forward for each pair of them."
        )
    return Schedule(tuple(map(tuple, rows)), num_stages, num_microbatches)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line := line.partition("#")[0].strip():
            yield number, line


def _row(number: int, row: re.Match[str], worker: int) -> tuple[Action, ...]:
    if int(row[1]) != worker:
        raise ScheduleError(
            f"Line {number} is the row of worker {row[1]}, and worker {worker} is next. Write the "
            "rows in order, from worker 0 on."
        )
    words = (row[2] or "").split()
    return tuple(_action(number, word) for word in words if word != BUBBLE)


def _action(number: int, word: str) -> Action:
    if found := COMPUTING.fullmatch(word):
        return Action(Kind(found[1]), int(found[2]), int(found[3]))
    if found := TRANSFER.fullmatch(word):
        letter, stage, arrow, peer, microbatch = found.groups()
        return Transfer(Kind(letter + arrow), int(stage), int(microbatch), int(peer))
    raise ScheduleError(
        f"{word!r} in line {number} is no action. Write F, R or B, the stage, a dot and the "
        "micro-batch, such as F0.3; or a transfer, such as A0>1.3 or G0<1.3."
    )
