"""Carries boundaries and gradients between the stages of one process."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Protocol

from gpipe.execution.inlet import Inlet
from gpipe.execution.link import Link
from gpipe.schedule import Kind
from gpipe.stage.boundary import Boundary, Payload
from gpipe.stage.device import Device, Traffic

__all__ = ["Aborted", "Between", "Channel", "Mailbox", "between_devices"]


class Aborted(Exception):  # noqa: N818 - no error of its own: another worker has failed
    """Another worker has failed: nothing will be received any more."""


class Mailbox:
    """One route: payloads go in in any order, and are taken out by micro-batch."""

    def __init__(self) -> None:
        queue: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._put, self._get = queue.put, queue.get
        self._early: dict[int, Any] = {}

    def put(self, microbatch: int, payload: Any) -> None:
        """Leave a payload; never waits."""
        self._put((microbatch, payload))

    def fill(self, payloads: Sequence[Any]) -> None:
        """Leave one for each micro-batch, before anybody takes any."""
        self._early.update(enumerate(payloads))

    def take(self, microbatch: int) -> Any:
        """Wait for the payload of this micro-batch.

        Raises:
            Aborted: The mailbox was closed meanwhile or before.
        """
        if microbatch in self._early:
            return self._early.pop(microbatch)
        while True:
            arrived, payload = self._get()
            if arrived == microbatch:
                return payload
            if arrived == _CLOSED:
                raise Aborted
            self._early[arrived] = payload

    def close(self) -> None:
        """Let the reader, who waits or will come, leave with `Aborted`."""
        self._put((_CLOSED, None))


_CLOSED = -1


class _Linked(Mailbox):
    """A route between two devices: what is put in is on its way already when it is taken out."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def put(self, microbatch: int, payload: Payload) -> None:
        """Send a payload; never waits."""
        super().put(microbatch, self._link.send(payload))

    def take(self, microbatch: int) -> Payload:
        """Wait until it is sent; what the device computes next finds it there."""
        return self._link.receive(super().take(microbatch))


class _Arriving(Mailbox):
    """The route from the caller to a device."""

    def __init__(self, inlet: Inlet) -> None:
        super().__init__()
        self._inlet = inlet

    def take(self, microbatch: int) -> Boundary:
        """Bring this micro-batch to the device, and none before it is needed."""
        return self._inlet(super().take(microbatch))


class Between(Protocol):
    """Makes the route from one stage to another."""

    def __call__(self, source: int, target: int, traffic: Traffic, *, leads: bool) -> Mailbox:
        """What `leads` says, see `Link`."""


def between_devices(devices: Sequence[Device]) -> Between:
    """Routes between the stages of one process.

    On one device there is nothing to order: whoever has taken something out enqueues behind
    whoever has made it.

    Args:
        devices: That of each stage.
    """

    def between(source: int, target: int, traffic: Traffic, *, leads: bool) -> Mailbox:
        start, end = devices[source], devices[target]
        return Mailbox() if start is end else _Linked(Link(start, end, traffic, leads=leads))

    return between


class Channel:
    """The routes of one mini-batch: a mailbox before each stage in both directions.

    The caller feeds the mailbox before the first stage and reads the one behind the last, and the
    other way round for gradients, so that to a worker every stage looks like an inner one.

    Args:
        num_stages: How many there are.
        between: Makes the routes between two of them.
        inlet: What brings the caller's input to the first of them, where it is not there.
    """

    def __init__(self, num_stages: int, between: Between, inlet: Inlet | None = None) -> None:
        self.aborted = False
        down, up = Traffic.ACTIVATIONS, Traffic.GRADIENTS
        first = Mailbox() if inlet is None else _Arriving(inlet)
        pairs = list(pairwise(range(num_stages)))
        # forward[s] is what stage s receives; the last is what leaves the last stage.
        downward = [between(a, b, down, leads=False) for a, b in pairs]
        self.forward = [first, *downward, Mailbox()]
        # backward[s + 1] is what stage s receives; backward[0] are the gradients of the input.
        upward = [between(b, a, up, leads=False) for a, b in pairs]
        self.backward = [Mailbox(), *upward, Mailbox()]

    def source(self, kind: Kind, stage: int) -> Callable[[int], Any]:
        """What gives an action of this kind its input, by micro-batch; it may wait."""
        if kind is Kind.FORWARD:
            return self.forward[stage].take
        return self.backward[stage + 1].take if kind is Kind.BACKWARD else _nothing

    def target(self, kind: Kind, stage: int) -> Callable[[int, Any], None]:
        """What takes the result of an action of this kind, by micro-batch."""
        return self.backward[stage].put if kind is Kind.BACKWARD else self.forward[stage + 1].put

    def abort(self) -> None:
        """Let every worker that waits here, or will, stop."""
        self.aborted = True
        for each in (*self.forward, *self.backward):
            each.close()


def _nothing(_: int) -> None:
    """What a recompute receives."""
