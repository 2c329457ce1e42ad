"""What a rank does once the first failure of the job is known."""

import threading
from collections.abc import Callable

from gpipe.execution.failure import Failure
from gpipe.execution.hard_end import end_hard, main_thread_place, say

__all__ = ["Ending"]


class Ending:
    """Tells the first failure, wakes the main thread, and ends the process if that does not come.

    Attributes:
        failure: The first failure, None while there is none.
        known: Set once there is one.
    """

    def __init__(
        self,
        rank: int,
        grace_s: float,
        on_failure: Callable[[Failure], None],
        stop: threading.Event,
    ) -> None:
        self._rank = rank
        self._grace_s = grace_s
        self._on_failure = on_failure
        self._stop = stop
        self._lock = threading.Lock()
        self._is_said = False
        self._acknowledged = threading.Event()
        self.failure: Failure | None = None
        self.known = threading.Event()

    def acknowledge(self) -> None:
        """The main thread is about to raise."""
        self._acknowledged.set()

    def learn(self, failure: Failure) -> None:
        """Keep it if it is the first."""
        with self._lock:
            self.failure = self.failure or failure
        self.known.set()

    def tell(self, failure: Failure) -> None:
        """Print it once; an own one is printed by whoever has raised it."""
        with self._lock:
            is_said, self._is_said = self._is_said, True
        if not is_said and failure.rank != self._rank:
            say(f"gpipe: rank {self._rank} ends, since another has failed.\n  {failure}\n")

    def react(self, failure: Failure) -> None:
        """All of it, where another rank has failed."""
        self.learn(failure)
        if failure.rank != self._rank and not self._stop.is_set():
            self.tell(failure)
            self.end(failure)

    def end(self, failure: Failure, *, is_new: bool = False) -> None:
        """Wake the main thread, and end the process if it stays away.

        Args:
            failure: What the main thread is told.
            is_new: Whether an acknowledgement from before does not count.
        """
        if is_new:
            self._acknowledged.clear()
        try:
            self._on_failure(failure)
        finally:
            if not self._acknowledged.wait(self._grace_s) and not self._stop.is_set():
                say(
                    f"gpipe: rank {self._rank} is ended, since its main thread has not come back "
                    f"within {self._grace_s:g} s. It was at {main_thread_place()}.\n"
                )
                end_hard()
