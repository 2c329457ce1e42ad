"""When each action ran, predicted or measured."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpipe.arguments import require_count
from gpipe.schedule import Action

__all__ = ["Event", "Timeline", "ideal_bubble"]


class Event(NamedTuple):
    """One action of one worker, from `start_s` to `end_s`, seconds on any one clock."""

    worker: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The events of one mini-batch: what a simulation predicts and what an execution measures.

    Attributes:
        events: In any order; they are kept sorted by start, then end, then worker.
        num_workers: Workers that took part, idle ones included.

    Raises:
        TypeError: `num_workers` is no whole number.
        ValueError: `num_workers` is below 1, or an event names another worker or ends before it
            starts.
    """

    events: tuple[Event, ...]
    num_workers: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_workers", require_count("num_workers", self.num_workers))
        object.__setattr__(self, "events", _sorted(self.events))
        for event in self.events:
            _require_possible(event, self.num_workers)

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end; 0.0 without events."""
        starts = (event.start_s for event in self.events)
        ends = (event.end_s for event in self.events)
        return max(ends, default=0.0) - min(starts, default=0.0)

    @cached_property
    def bubble(self) -> float:
        """The part of all workers' time in which they idle, 0 to 1; 0.0 without any time."""
        if self.makespan_s == 0:
            return 0.0
        busy_s = sum(event.end_s - event.start_s for event in self.events)
        idle = 1 - busy_s / (self.num_workers * self.makespan_s)
        return max(0.0, idle)  # rounding can leave a full timeline just below

    @cached_property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each worker in the order of their starts, as a schedule has them."""
        rows: list[list[Action]] = [[] for _ in range(self.num_workers)]
        for event in self.events:
            rows[event.worker].append(event.action)
        return tuple(tuple(row) for row in rows)


def ideal_bubble(num_stages: int, num_microbatches: int) -> float:
    """The bubble of fill-drain and 1F1B over equal stages, recompute apart: (K-1) / (M+K-1).

    Args:
        num_stages: Stages of the model (K), at least 1.
        num_microbatches: Micro-batches of a mini-batch (M), at least 1.

    Returns:
        A fraction of all workers' time, 0 to 1; the costs of forward and backward do not matter.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size is below 1.
    """
    num_waits = require_count("num_stages", num_stages) - 1
    return num_waits / (require_count("num_microbatches", num_microbatches) + num_waits)


def _sorted(events: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(sorted(events, key=lambda event: (event.start_s, event.end_s, event.worker)))


def _require_possible(event: Event, num_workers: int) -> None:
    if not 0 <= event.worker < num_workers:
        raise ValueError(
            f"{event.action} ran on worker {event.worker} of {num_workers}. "
            "Count workers from 0, or raise `num_workers`."
        )
    if not event.start_s <= event.end_s:  # also refuses NaN
        raise ValueError(
            f"{event.action} starts at {event.start_s} s and ends at {event.end_s} s. "
            "Take both times from one clock."
        )
