"""Cleans up to the end, whatever the user presses."""

from collections.abc import Callable, Iterable

__all__ = ["insist"]


def insist(steps: Iterable[Callable[[], None]]) -> None:
    """Take every step, each of which may be taken twice, and only then let Ctrl-C through."""
    interruption: KeyboardInterrupt | None = None
    for step in list(steps):
        while True:
            try:
                step()
            except KeyboardInterrupt as error:
                interruption = error
            else:
                break
    if interruption is not None:
        raise interruption
