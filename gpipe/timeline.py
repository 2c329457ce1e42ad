"""When each action ran, predicted or measured."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from gpipe.arguments import require_count
from gpipe.schedule import Action

__all__ = ["Event", "HeldBytes", "LostTime", "Timeline", "ideal_bubble"]


class Event(NamedTuple):
    """One action of one worker, from `start_s` to `end_s`, seconds on any one clock."""

    worker: int
    action: Action
    start_s: float
    end_s: float


class HeldBytes(NamedTuple):
    """What a worker holds for its backwards over time.

    Attributes:
        times_s: When it changes, ascending.
        levels_bytes: How much it is from then on, until the next change.
    """

    times_s: tuple[float, ...]
    levels_bytes: tuple[float, ...]


class LostTime(NamedTuple):
    """Seconds of the makespan in which a worker runs neither a forward nor a backward, by reason.

    All but `recompute_s` are idle time, which is its bubble.

    Attributes:
        fill_s: Idle before its first backward, as it would be with equal stages, too.
        drain_s: Idle afterwards, as it would be with equal stages, too.
        imbalance_s: Idle beyond that, since others have more to do: stages differ, or recompute.
        transfer_s: What the makespan would be shorter if transfers took no time.
        recompute_s: Its own recomputes.
    """

    fill_s: float
    drain_s: float
    imbalance_s: float
    transfer_s: float
    recompute_s: float

    @property
    def idle_s(self) -> float:
        """The part of the makespan in which the worker computes nothing."""
        return self.fill_s + self.drain_s + self.imbalance_s + self.transfer_s


@dataclass(frozen=True)
class Timeline:
    """The events of one mini-batch: what a simulation predicts and what an execution measures.

    Attributes:
        events: In any order; they are kept sorted by start, then end, then worker. A transfer is
            an event of both its workers, with the same times; it keeps neither of them busy.
        num_workers: Workers that took part, idle ones included.
        held_bytes: By worker: what it holds over time. None where that is not known: a measured
            timeline has no bytes.
        lost_time: By worker: why it did not run forwards and backwards; None if not known.

    Raises:
        TypeError: `num_workers` is no whole number.
        ValueError: `num_workers` is below 1, or an event names another worker or ends before it
            starts.
    """

    events: tuple[Event, ...]
    num_workers: int
    held_bytes: tuple[HeldBytes, ...] | None = None
    lost_time: tuple[LostTime, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_workers", require_count("num_workers", self.num_workers))
        object.__setattr__(self, "events", _sorted(self.events))
        for event in self.events:
            worker, _, start_s, end_s = event
            if not (0 <= worker < self.num_workers and start_s <= end_s):  # also refuses NaN
                raise _impossible(event, self.num_workers)

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
        idle = 1 - sum(self._busy_s) / (self.num_workers * self.makespan_s)
        return max(0.0, idle)  # rounding can leave a full timeline just below

    @cached_property
    def worker_bubbles(self) -> tuple[float, ...]:
        """By worker: the part of the makespan in which it idles, 0 to 1; 0.0 without any time."""
        if self.makespan_s == 0:
            return (0.0,) * self.num_workers
        return tuple(max(0.0, 1 - busy_s / self.makespan_s) for busy_s in self._busy_s)

    @cached_property
    def _busy_s(self) -> list[float]:
        busy_s = [0.0] * self.num_workers
        for worker, action, start_s, end_s in self.events:
            if action.peer is None:
                busy_s[worker] += end_s - start_s
        return busy_s

    @cached_property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """By worker: the most that it holds at once; None where `held_bytes` is."""
        if self.held_bytes is None:
            return None
        return tuple(max(held.levels_bytes, default=0) for held in self.held_bytes)

    @cached_property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """What each worker computed, in the order of the starts, as in a schedule's rows.

        Transfers, which run beside, are left out.
        """
        rows: list[list[Action]] = [[] for _ in range(self.num_workers)]
        for event in self.events:
            if event.action.peer is None:
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
    # Three sorts by one item each are faster than one by three.
    by_worker = sorted(events, key=itemgetter(0))
    by_end = sorted(by_worker, key=itemgetter(3))
    return tuple(sorted(by_end, key=itemgetter(2)))


def _impossible(event: Event, num_workers: int) -> ValueError:
    if not 0 <= event.worker < num_workers:
        return ValueError(
            f"{event.action} ran on worker {event.worker} of {num_workers}. "
            "Count workers from 0, or raise `num_workers`."
        )
    return ValueError(
        f"{event.action} starts at {event.start_s} s and ends at {event.end_s} s. "
        "Take both times from one clock."
    )
