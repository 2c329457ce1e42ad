"""Records when each action ran."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from gpipe.execution.interpreter import Record
from gpipe.schedule import Action
from gpipe.stage.device import Device
from gpipe.timeline import Event, Timeline

__all__ = ["Recorder"]


class Recorder:
    """The records of one mini-batch, a list for each worker to append to.

    Args:
        devices: That of each worker; its clock is the one of the records.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.rows: list[list[Record]] = [[] for _ in devices]

    @cached_property
    def timeline(self) -> Timeline:
        """In seconds since the start of the first action; made when it is first asked for.

        On an accelerator that is when the device did it; asking waits until it is done.
        """
        times = [list(_times(*each)) for each in zip(self.devices, self.rows, strict=True)]
        zero_s = min((start_s for row in times for _, start_s, _ in row), default=0.0)
        events = (
            Event(worker, action, start_s - zero_s, end_s - zero_s)
            for worker, row in enumerate(times)
            for action, start_s, end_s in row
        )
        return Timeline(tuple(events), len(times))


def _times(device: Device, row: Sequence[Record]) -> Iterator[tuple[Action, float, float]]:
    seconds = iter(device.seconds([moment for _, *both in row for moment in both]))
    for (action, _, _), start_s, end_s in zip(row, seconds, seconds, strict=True):
        yield action, start_s, end_s
