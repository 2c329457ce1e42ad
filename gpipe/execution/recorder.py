"""Records when each action ran."""

from functools import cached_property

from gpipe.execution.interpreter import Record
from gpipe.timeline import Event, Timeline

__all__ = ["Recorder"]


class Recorder:
    """The records of one mini-batch, a list for each worker to append to."""

    def __init__(self, num_workers: int) -> None:
        self.rows: list[list[Record]] = [[] for _ in range(num_workers)]

    @cached_property
    def timeline(self) -> Timeline:
        """In seconds since the start of the first action; made when it is first asked for."""
        zero_s = min((start_s for row in self.rows for _, start_s, _ in row), default=0.0)
        events = (
            Event(worker, action, start_s - zero_s, end_s - zero_s)
            for worker, row in enumerate(self.rows)
            for action, start_s, end_s in row
        )
        return Timeline(tuple(events), len(self.rows))
