"""Carries boundaries and gradients between the stages of one process."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from gpipe.schedule import Kind

__all__ = ["Aborted", "Channel", "Mailbox"]


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


class Channel:
    """The routes of one mini-batch: a mailbox before each stage in both directions.

    The caller feeds the mailbox before the first stage and reads the one behind the last, and the
    other way round for gradients, so that to a worker every stage looks like an inner one.
    """

    def __init__(self, num_stages: int) -> None:
        self.aborted = False
        # forward[s] is what stage s receives; forward[num_stages] is the output of the last.
        self.forward = [Mailbox() for _ in range(num_stages + 1)]
        # backward[s + 1] is what stage s receives; backward[0] are the gradients of the input.
        self.backward = [Mailbox() for _ in range(num_stages + 1)]

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
        for mailbox in (*self.forward, *self.backward):
            mailbox.close()


def _nothing(_: int) -> None:
    """What a recompute receives."""
