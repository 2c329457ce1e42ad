"""Records when each action ran."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from gpipe.execution.interpreter import Record
from gpipe.schedule import Action
from gpipe.stage.device import Device
from gpipe.timeline import Event, Timeline

__all__ = ["Recorder"]


class Recorder:
    """The records of one mini-batch, a list for each worker of this process to append to.

    Args:
        devices: That of each worker; its clock is the one of the records.
        num_workers: How many there are in all processes.
    """

    def __init__(self, devices: Mapping[int, Device], num_workers: int) -> None:
        self.devices = dict(devices)
        self.rows: dict[int, list[Record]] = {worker: [] for worker in devices}
        self._num_workers = num_workers

    @cached_property
    def timeline(self) -> Timeline:
        """In seconds since the start of the first action; made when it is first asked for.

        On an accelerator that is when the device did it; asking waits until it is done.
        """
        return self.timeline_of(self.events)

    @cached_property
    def events(self) -> list[Event]:
        """All actions of this process, in seconds of the host's clock."""
        return [
            Event(worker, *each)
            for worker, row in self.rows.items()
            for each in _times(self.devices[worker], row)
        ]

    def timeline_of(self, events: Sequence[Event]) -> Timeline:
        """The timeline of events of one clock."""
        zero_s = min((event.start_s for event in events), default=0.0)
        shifted = (
            event._replace(start_s=event.start_s - zero_s, end_s=event.end_s - zero_s)
            for event in events
        )
        return Timeline(tuple(shifted), self._num_workers)


def _times(device: Device, row: Sequence[Record]) -> Iterator[tuple[Action, float, float]]:
    seconds = iter(device.seconds([moment for _, *both in row for moment in both]))
    for (action, _, _), start_s, end_s in zip(row, seconds, seconds, strict=True):
        yield action, start_s, end_s
