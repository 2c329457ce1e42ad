"""Finds pairs of accesses that nothing orders, from vector clocks.

A lane is a stream, or the host. What runs on a lane is in order; between two lanes only events
order, and whatever the host enqueues comes after what the host has done and waited for. Of each
storage the detector knows the last write and the reads since. When it goes back to its allocator it
counts as written to on the lane that it was allocated on, as the next owner of the memory would.

What it cannot see: races between threads of the host, whose work counts as one lane.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import RLock
from typing import NamedTuple

__all__ = ["Clock", "Detector", "Lane", "Memory"]

Clock = dict[str, int]


class Access(NamedTuple):
    """One operation of a lane."""

    lane: str
    tick: int
    operation: str


class Lane:
    """A stream, or the host: how far it is, and how far all others are that it has waited for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {}

    def wait(self, clock: Clock) -> None:
        """Come after all that had happened there."""
        for name, tick in clock.items():
            self.clock[name] = max(tick, self.clock.get(name, 0))

    def advance(self, operation: str) -> Access:
        """Do one operation more."""
        tick = self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return Access(self.name, tick, operation)


@dataclass
class Memory:
    """A storage: where its memory comes from, and who has used it."""

    allocated_on: Lane
    written: Access | None = None
    read: dict[str, Access] = field(default_factory=dict)
    retained_for: list[Lane] = field(default_factory=list)


class Detector:
    """Books accesses; each pair without an order becomes a report in words."""

    def __init__(self) -> None:
        self.lock = RLock()  # a storage may be freed while anything is booked
        self.host = Lane("host")
        self.reports: list[str] = []

    def book(
        self, operation: str, lane: Lane, reads: Iterable[Memory], writes: Iterable[Memory]
    ) -> None:
        """One operation is enqueued on a lane."""
        with self.lock:
            lane.wait(self.host.clock)
            access = lane.advance(operation)
            for memory in reads:
                self._after(access, lane.clock, memory.written)
                memory.read[lane.name] = access
            for memory in writes:
                self._after(access, lane.clock, memory.written, *memory.read.values())
                memory.written, memory.read = access, {}

    def free(self, memory: Memory) -> None:
        """The last owner of a storage has let go of it; the host's allocator waits by itself."""
        if memory.allocated_on is self.host:
            return
        with self.lock:
            reuse = Lane(memory.allocated_on.name)
            for lane in (memory.allocated_on, self.host, *memory.retained_for):
                reuse.wait(lane.clock)
            access = Access(reuse.name, 0, "the next owner of freed memory")
            self._after(access, reuse.clock, memory.written, *memory.read.values())

    def _after(self, access: Access, clock: Clock, *earlier: Access | None) -> None:
        for other in earlier:
            if other is not None and other.tick > clock.get(other.lane, 0):
                self.reports.append(
                    f"{access.operation} on {access.lane} does not wait for "
                    f"{other.operation} on {other.lane}"
                )
