"""Records when each action ran."""

from functools import cached_property

from gpipe.timeline import Event, Timeline

__all__ = ["Recorder"]


class Recorder:
    """The events of one mini-batch, a list for each worker to append to."""

    def __init__(self, num_workers: int) -> None:
        self.events: list[list[Event]] = [[] for _ in range(num_workers)]

    @cached_property
    def timeline(self) -> Timeline:
        """In seconds since the start of the first action; made when it is first asked for."""
        events = [event for row in self.events for event in row]
        zero_s = min((event.start_s for event in events), default=0.0)
        shifted = (
            Event(event.worker, event.action, event.start_s - zero_s, event.end_s - zero_s)
            for event in events
        )
        return Timeline(tuple(shifted), len(self.events))
