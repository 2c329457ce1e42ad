"""What each action of a schedule waits for, in numbers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from gpipe.schedule.action import SEND_OF, Action, Kind, Transfer
from gpipe.schedule.dependencies import predecessors
from gpipe.schedule.lane import Lane
from gpipe.schedule.schedule import Schedule

__all__ = ["Graph", "Numbers", "graph_of"]

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Graph:
    """What each action waits for when rows are carried out as strictly as any executor may do it.

    A computing action waits for its `predecessors`. A receive is posted and does not wait, so that
    who needs what it brings waits for the send instead. A send waits until its receive is posted.

    Actions are numbers here: lane after lane, in each one for every micro-batch. So actions of two
    lanes on the same micro-batch are at the same distance, whichever it is.

    Attributes:
        schedule: Any schedule, valid or not.
        places: The places of the lanes: those of the schedule, then others that it needs.
        microbatches: Those that each lane has a number for: all of the schedule, then others that
            do not belong there, but are named.
        numbers: The rows, with the number of each action.
        needs: By place of a lane: what to add to a number to get those that it waits for. A send
            has its receive last.
        given: The numbers of recomputes that the schedule does not have: nobody waits for them.
    """

    schedule: Schedule
    places: dict[Lane, int]
    microbatches: Sequence[int]
    numbers: tuple[Numbers, ...]
    needs: list[tuple[int, ...]]
    given: list[int]

    @property
    def stride(self) -> int:
        """How many numbers each lane has."""
        return len(self.microbatches)

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return len(self.places) * self.stride

    @cached_property
    def counts(self) -> Numbers:
        """How often each action stands in the rows: by place of its lane, then by micro-batch."""
        numbers = np.concatenate([np.array([], np.int64), *self.numbers])
        return np.bincount(numbers, minlength=self.size).reshape(len(self.places), self.stride)

    def action(self, number: int) -> Action:
        """The action that has a number."""
        place, index = divmod(number, self.stride)
        return list(self.places)[place].action(self.microbatches[index])

    def distance(self, lane: Lane, other: Lane) -> int:
        """What to add to a number of `lane` to get the one of `other` on the same micro-batch."""
        return (self.places[other] - self.places[lane]) * self.stride


def graph_of(schedule: Schedule) -> Graph:
    """Reads a schedule; `predecessors` is asked once or twice per lane, not once per action."""
    waits = {lane: _waits(lane, schedule) for lane in schedule.lanes}
    needed = (other for others in waits.values() for other in others)
    places = {lane: place for place, lane in enumerate(dict.fromkeys([*waits, *needed]))}
    microbatches, numbers = _numbered(schedule)
    stride = len(microbatches)
    return Graph(
        schedule=schedule,
        places=places,
        microbatches=microbatches,
        numbers=numbers,
        needs=[
            tuple((places[other] - place) * stride for other in waits.get(lane, ()))
            for lane, place in places.items()
        ],
        given=[
            places[lane] * stride + microbatch for lane, microbatch in _never_recomputed(schedule)
        ],
    )


def _numbered(schedule: Schedule) -> tuple[Sequence[int], tuple[Numbers, ...]]:
    """The micro-batches that lanes have numbers for, and the rows in numbers."""
    named = [np.array([action[2] for action in row], np.int64) for row in schedule.rows]
    inside = range(schedule.num_microbatches)
    outside = {int(each) for row in named for each in row[(row < 0) | (row >= len(inside))]}
    microbatches = [*inside, *sorted(outside)] if outside else inside
    if outside:
        indices = {microbatch: index for index, microbatch in enumerate(microbatches)}
        named = [np.array([indices[each] for each in row.tolist()], np.int64) for row in named]
    numbers = (
        np.array(lanes, np.int64) * len(microbatches) + row
        for lanes, row in zip(schedule.lane_rows, named, strict=True)
    )
    return microbatches, tuple(numbers)


def _waits(lane: Lane, schedule: Schedule) -> list[Lane]:
    """The lanes of which this one waits for the action on its own micro-batch."""
    found = (
        Lane(other.kind, other.stage, other.peer)
        for microbatch in _representatives(lane, schedule)
        for other in _awaited(lane.action(microbatch), schedule)
    )
    return list(dict.fromkeys(found))


def _representatives(lane: Lane, schedule: Schedule) -> Iterable[int]:
    """One micro-batch of each sort: some backwards may find a recompute, and others none.

    Their lane waits for what both sorts need; the recomputes that do not exist are `given`.
    """
    if lane.kind != Kind.BACKWARD:
        return [0]
    recomputed = schedule.recomputed_in(lane.stage)
    kept = (each for each in range(schedule.num_microbatches) if each not in recomputed)
    return [*islice(recomputed, 1), *islice(kept, 1)]


def _awaited(action: Action, schedule: Schedule) -> Iterator[Action]:
    if action.kind in SEND_OF:
        return
    for other in predecessors(action, schedule):
        yield other.partner if isinstance(other, Transfer) else other
    if isinstance(action, Transfer):
        yield action.partner


def _never_recomputed(schedule: Schedule) -> Iterator[tuple[Lane, int]]:
    for lane in schedule.lanes:
        if lane.kind == Kind.RECOMPUTE:
            recomputed = schedule.recomputed_in(lane.stage)
            for microbatch in range(schedule.num_microbatches):
                if microbatch not in recomputed:
                    yield lane, microbatch
