"""Which places can be cut, within all limits."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from gpipe.partition.problem import Array, Problem, as_array

__all__ = ["Choices", "choices", "earliest_starts", "even_path", "reached"]


class Choices(NamedTuple):
    """What a path can be made of.

    Attributes:
        places: The places behind so many stages, none to all, ascending.
        earliest: Per stage, the earliest start by end. Every later start keeps the limits, too,
            and it never falls with the end, because nothing that is limited is negative.
    """

    places: list[Array]
    earliest: list[Array]

    def within(self, windows: list[tuple[int, int]]) -> "Choices":
        """Only the places from the first to the last of a window each."""
        kept = [
            places[np.searchsorted(places, first) : np.searchsorted(places, last, "right")]
            for places, (first, last) in zip(self.places, windows, strict=True)
        ]
        return self._replace(places=kept)


def choices(problem: Problem, limit: int | None = None) -> Choices | None:
    """The places on all paths whose stages keep the limits; None where there is no such path.

    Args:
        problem: What is cut.
        limit: The highest cost of a stage, as `Problem.stage_costs` counts, but without what
            boundaries add.
    """
    earliest = earliest_starts(problem, limit)
    table = reached(earliest)
    if not table[-1, -1]:
        return None
    _keep_what_leads_on(table, earliest)
    return Choices([np.flatnonzero(row) for row in table], earliest)


def earliest_starts(problem: Problem, limit: int | None = None) -> list[Array]:
    """Per stage, the earliest place where it may begin, by the place where it ends."""
    by_cuts = _behind_cuts(problem)
    earliest = [by_cuts] * problem.num_stages
    if limit is not None:
        by_cost = _by_limit(problem.marks)
        costs = [limit // slowness for slowness in problem.slowness]
        earliest = [np.maximum(by_cuts, by_cost(cost)) for cost in costs]
    if problem.memory:
        by_memory = _by_limit(problem.memory.marks)
        pairs = zip(earliest, problem.memory.limits, strict=True)
        earliest = [np.maximum(starts, by_memory(held)) for starts, held in pairs]
    return earliest


def _behind_cuts(problem: Problem) -> Array:
    cuts = np.array([0, *problem.cuts])
    last = np.searchsorted(cuts, np.arange(problem.num_layers + 1)) - 1
    return cuts[np.maximum(last, 0)]


def _by_limit(marks: list[int]) -> Callable[[int], Array]:
    """The earliest start by end, as a function of the limit; for equal limits computed once."""
    total = marks[-1]
    before = as_array(marks, total)

    @cache
    def starts(limit: int) -> Array:
        return np.searchsorted(before, before - min(limit, total))

    return starts


def reached(earliest: list[Array]) -> Array:
    """Whether so many stages (row), none of them empty, can end at a place (column)."""
    places = np.arange(len(earliest[0]))
    table = np.zeros((len(earliest) + 1, len(places)), bool)
    table[0, 0] = True
    for stage, starts in enumerate(earliest):
        nearest = np.maximum.accumulate(np.where(table[stage], places, -1))
        table[stage + 1, 1:] = nearest[:-1] >= starts[1:]
    return table


def _keep_what_leads_on(table: Array, earliest: list[Array]) -> None:
    """Clears, in place, what is on no path to the last place."""
    num_places = table.shape[1]
    places = np.arange(num_places)
    table[-1, :-1] = False
    for stage in reversed(range(len(earliest))):
        backwards = np.where(table[stage + 1], places, num_places)[::-1]
        nearest = np.minimum.accumulate(backwards)[::-1]
        starts = np.append(earliest[stage], num_places)
        table[stage, :-1] &= starts[nearest[1:]] <= places[:-1]
        table[stage, -1] = False


def even_path(problem: Problem, choices: Choices) -> list[int]:
    """A path close to where all stages would cost the same."""
    path, speed = [0], 0
    for stage, places in enumerate(choices.places[1:]):
        speed += problem.speeds[stage]
        first = np.searchsorted(places, path[-1], "right")
        last = np.searchsorted(choices.earliest[stage][places], path[-1], "right") - 1
        nearest = np.searchsorted(places, _place_of(problem, speed))
        path.append(int(places[min(max(nearest, first), last)]))
    return path


def _place_of(problem: Problem, speed: int) -> int:
    """The place before which the share of the cost is that of the speed."""
    marks = problem.marks
    ideal = marks[-1] * speed // sum(problem.speeds)
    place = bisect_left(marks, ideal)
    return place - (place > 0 and ideal - marks[place - 1] < marks[place] - ideal)
