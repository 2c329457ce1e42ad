"""Waits for other processes, so that whoever asked for it can be interrupted."""

from collections.abc import Callable
from typing import Self, TypeVar

from gpipe.execution.caller import CallerState
from gpipe.execution.threaded import ThreadedExecutor

__all__ = ["Waiter"]

_GIVES_UP_AFTER_S = 1.0  # of an interrupted caller

R = TypeVar("R")


class Waiter:
    """A worker thread that may wait for ever, and what it waits for.

    A member of the company of processes: it is interrupted when another one has failed.

    Args:
        name: Who waits, such as "worker 1".
    """

    def __init__(self, name: str) -> None:
        self.executor = ThreadedExecutor(1, gives_up_after_s=_GIVES_UP_AFTER_S)
        self._name = name
        self._waits_for: str | None = None
        self._num_waits = 0

    def run(self, function: Callable[[], R], what: str) -> R:
        """Call the function in the worker, and wait here for its end.

        Args:
            function: Waits for other ranks.
            what: What it waits for.

        Raises:
            BaseException: What the function raised, or what has interrupted it.
        """

        def waiting() -> R:
            with self.waiting(what):
                return function()

        return self.call(waiting)

    def call(self, function: Callable[[], R]) -> R:
        """The same for a function that says itself when it waits."""
        results: list[R] = []
        self.executor.run([lambda: results.append(function())], CallerState(), lambda: None)
        return results.pop()

    def waiting(self, what: str) -> Self:
        """A context in which `progress` tells of this wait."""
        self._waits_for = what
        return self

    def __enter__(self) -> None:
        self._num_waits += 1

    def __exit__(self, *_: object) -> None:
        self._waits_for, self._num_waits = None, self._num_waits + 1

    def progress(self) -> tuple[int, str | None]:
        """How often a wait has begun or ended, and who waits for what now."""
        what = self._waits_for
        return self._num_waits, None if what is None else f"{self._name} waits for {what}"

    def interrupt(self, error: BaseException) -> None:
        """Let whoever waits for the worker raise this error; the worker may wait for ever."""
        self.executor.interrupt(error)

    @property
    def has_lost_worker(self) -> bool:
        """Whether the worker was given up and has not come back."""
        return self.executor.has_lost_worker
