"""What a run shows while it runs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

__all__ = ["Bar", "say", "speaking", "warn"]


class Bar(tqdm):  # type: ignore[type-arg] # only its stubs are generic
    """The progress of one epoch in rows, on stderr; gone when the epoch is over."""

    monitor_interval = 0  # tqdm would start a thread that outlives the run

    def __init__(self, label: str, num_rows: int) -> None:
        is_silent = not _speaks.get()
        super().__init__(total=num_rows, desc=label, unit=" rows", leave=False, disable=is_silent)

    def show(self, num_rows: int, loss: float) -> None:
        """Moves on by `num_rows`; tqdm adds the rows per second."""
        self.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        self.update(num_rows)
        if self.n == self.total:
            self.refresh()  # also where the whole epoch is shorter than the time between two looks


_speaks: ContextVar[bool] = ContextVar("gpipe_speaks", default=True)


@contextmanager
def speaking(speaks: bool) -> Iterator[None]:
    """Print what is said meanwhile, or nothing: of several processes one speaks for all."""
    token = _speaks.set(speaks)
    try:
        yield
    finally:
        _speaks.reset(token)


def say(text: str) -> None:
    """Prints a line of the result."""
    if not _speaks.get():
        return
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    """Prints a warning beside the result."""
    if not _speaks.get():
        return
    sys.stderr.write(f"warning: {text}\n")
