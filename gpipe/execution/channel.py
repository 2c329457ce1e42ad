"""Carries boundaries and gradients between the stages of one process."""

from queue import SimpleQueue
from typing import Any

from gpipe.schedule import Action, Kind

__all__ = ["Aborted", "Channel", "Mailbox"]


class Aborted(Exception):  # noqa: N818 - no error of its own: another worker has failed
    """Another worker has failed: nothing will be received any more."""


class Mailbox:
    """One route: payloads go in in any order, and are taken out by micro-batch."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._early: dict[int, Any] = {}

    def put(self, microbatch: int, payload: Any) -> None:
        """Leave a payload; never waits."""
        self._queue.put((microbatch, payload))

    def take(self, microbatch: int) -> Any:
        """Wait for the payload of this micro-batch.

        Raises:
            Aborted: The mailbox was closed meanwhile or before.
        """
        if microbatch in self._early:
            return self._early.pop(microbatch)
        while True:
            arrived, payload = self._queue.get()
            if arrived == microbatch:
                return payload
            if arrived == _CLOSED:
                raise Aborted
            self._early[arrived] = payload

    def close(self) -> None:
        """Let the reader, who waits or will come, leave with `Aborted`."""
        self._queue.put((_CLOSED, None))


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

    def receive(self, action: Action) -> Any:
        """Wait for what the action needs from its neighbour; a recompute needs nothing.

        Raises:
            Aborted: Another worker has failed.
        """
        if self.aborted:
            raise Aborted
        kind, stage, microbatch = action
        if kind is Kind.FORWARD:
            return self.forward[stage].take(microbatch)
        if kind is Kind.BACKWARD:
            return self.backward[stage + 1].take(microbatch)
        return None

    def send(self, action: Action, payload: Any) -> None:
        """Pass on what the action made."""
        kind, stage, microbatch = action
        if kind is Kind.BACKWARD:
            self.backward[stage].put(microbatch, payload)
        else:
            self.forward[stage + 1].put(microbatch, payload)

    def abort(self) -> None:
        """Let every worker that waits here, or will, stop."""
        self.aborted = True
        for mailbox in (*self.forward, *self.backward):
            mailbox.close()
