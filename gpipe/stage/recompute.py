"""Tells a layer whether its forward is being repeated."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["is_recomputing", "recomputing"]

_recomputing: ContextVar[bool] = ContextVar("gpipe_recomputing", default=False)


def is_recomputing() -> bool:
    """Whether the forward that runs now repeats an earlier one, for the sake of its backward.

    Layers that count their calls, and hooks that log, ask this so as to do it once a micro-batch.
    """
    return _recomputing.get()


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Make `is_recomputing()` true for this thread meanwhile."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)
