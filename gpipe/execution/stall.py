"""Tells a step that stands still from one that goes on."""

from collections.abc import Callable, Mapping

from gpipe.execution.failure import Failure
from gpipe.execution.heartbeat import Beat

__all__ = ["Progress", "Stillness", "left_early", "missed", "table"]

Progress = Callable[[], tuple[int, str | None]]
"""A number that changes with every action, and what is waited for, None while it is not waiting."""


class Stillness:
    """For how long this rank has been waiting for one thing."""

    def __init__(self, progress: Progress | None, watchdog_s: float | None) -> None:
        self._progress = progress
        self._watchdog_s = watchdog_s
        self._counter: int | None = None
        self._told = False
        self.waits_for: str | None = None
        self.still_s = 0.0

    def look(self, elapsed_s: float) -> None:
        """Ask for the progress, so many seconds after the last look."""
        if self._progress is None:
            return
        counter, waits_for = self._progress()
        if waits_for is None or counter != self._counter or self.waits_for is None:
            self.still_s, self._told = 0.0, False
        else:
            self.still_s += elapsed_s
        self._counter, self.waits_for = counter, waits_for

    @property
    def is_to_be_told(self) -> bool:
        """Whether it has stood still for too long, and nobody was told yet."""
        return not self._told and self._watchdog_s is not None and self.still_s >= self._watchdog_s

    def speaks_for_all(self, rank: int, beats: Mapping[int, Beat | None]) -> bool:
        """Whether no lower rank will tell the same; marks it as told if so."""
        assert self._watchdog_s is not None
        self._told = not any(
            beat and not beat.has_left and beat.still_s >= self._watchdog_s / 2
            for other, beat in beats.items()
            if other < rank
        )
        return self._told


def table(rank: int, own: Stillness, beats: Mapping[int, Beat | None]) -> str:
    """What every rank waits for, a line each."""
    lines = {rank: own.waits_for} | {other: _doing(beat) for other, beat in beats.items()}
    rows = "".join(f"  rank {each}: {lines[each]}\n" for each in sorted(lines))
    return f"gpipe: rank {rank} has waited for {own.still_s:.0f} s, and waits on.\n{rows}"


def missed(
    rank: int, own: Stillness, beats: Mapping[int, Beat | None], patience_s: float
) -> Failure | None:
    """The failure that one rank has left while all others wait, and for long; None otherwise."""
    gone = [other for other, beat in beats.items() if beat and beat.has_left]
    there = [beat for beat in beats.values() if beat is None or not beat.has_left]
    if not gone or not all(_waits(beat, patience_s) for beat in there):
        return None
    return left_early(min(gone), f"rank {rank} still waits: {own.waits_for}")


def left_early(rank: int, but: str) -> Failure:
    """The failure of a rank that has ended its script although others need it."""
    error = (
        f"it has ended its script, but {but.rstrip('.')}. Give every rank as many steps, and look "
        "for a sys.exit."
    )
    return Failure(rank, error)


def _waits(beat: Beat | None, patience_s: float) -> bool:
    return beat is not None and beat.waits_for is not None and beat.still_s >= patience_s


def _doing(beat: Beat | None) -> str:
    if beat is None:
        return "has not begun"
    if beat.has_left:
        return "has left"
    return beat.waits_for or "does not wait"
