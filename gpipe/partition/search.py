"""The best path, stage by stage (dynamic programming)."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpipe.partition.limits import Choices
from gpipe.partition.problem import Array

__all__ = ["Level", "Rule", "Values", "num_tried", "search", "starts_of", "trace"]

FEW = 2048  # starts: to try them all is faster than to find out which to try
MOST_AT_ONCE = 1 << 15  # starts: what is computed for them stays in the processor's cache


class Level(NamedTuple):
    """The best path to each place behind so many stages.

    Attributes:
        places: Where the paths end, ascending.
        values: What is minimised, of each path.
        starts: Where the last stage of each begins: indices into the places one level before.
    """

    places: Array
    values: Array
    starts: Array


# A rule says what is minimised. For a stage, the level before it and the places where it may end
# it gives a function, which maps indices of ends and of starts to the values of such paths.
Values: TypeAlias = Callable[[Array, Array], Array]
Rule: TypeAlias = Callable[[int, Level, Array], Values]


def search(choices: Choices, rule: Rule, dtype: type[Any], *, is_monotone: bool) -> list[Level]:
    """Extends the best paths by one stage at a time; of equal ones the last stage is shortest.

    Args:
        choices: What paths are made of.
        rule: What is minimised.
        dtype: The type of its values.
        is_monotone: Whether the best start never falls as the end grows. So it is for sums of a
            convex function of stage costs (the quadrangle inequality), and for the slowest stage,
            as long as a stage with further layers never costs less. A stage then takes a time
            of O(layers log layers), and O(layers²) otherwise.
    """
    levels = [Level(choices.places[0], np.zeros(1, dtype), np.zeros(1, int))]
    for stage, ends in enumerate(choices.places[1:]):
        before = levels[-1]
        low, high = _bounds(choices.earliest[stage], before.places, ends)
        has_start = low <= high
        ends, low, high = ends[has_start], low[has_start], high[has_start]
        num_starts = int(high[-1] - low[0] + 1)  # neither bound ever falls
        find = _by_halves if is_monotone and len(ends) * num_starts > FEW else _by_blocks
        levels.append(Level(ends, *find(low, high, rule(stage, before, ends), dtype)))
    return levels


def starts_of(ends: Array, earliest: Array, before: Array) -> tuple[Array, Array]:
    """All pairs of an end and a start: the indices of the ends, and those of the starts.

    Args:
        ends: The places where a stage may end; each has a start.
        earliest: The earliest start by end.
        before: The places where it may start.
    """
    return _pairs(*_bounds(earliest, before, ends))


def trace(levels: list[Level]) -> list[int]:
    """The best path to the last place."""
    index, path = len(levels[-1].places) - 1, []
    for level in reversed(levels):
        path.append(int(level.places[index]))
        index = int(level.starts[index])
    return path[::-1]


def num_tried(choices: Choices, is_monotone: bool) -> int:
    """How many starts a search tries, about."""
    total = 0
    for num_starts, num_ends in pairwise(len(places) for places in choices.places):
        num_all = num_starts * num_ends
        num_few = (num_starts + num_ends) * num_ends.bit_length()
        total += num_few if is_monotone and num_all > FEW else num_all
    return total


def _bounds(earliest: Array, before: Array, ends: Array) -> tuple[Array, Array]:
    """The first and the last index of the starts of each end."""
    return np.searchsorted(before, earliest[ends]), np.searchsorted(before, ends) - 1


def _pairs(low: Array, high: Array) -> tuple[Array, Array]:
    """The rows and the numbers from `low` to `high` of each, one after the other."""
    lengths = high - low + 1
    offsets = np.cumsum(lengths) - lengths
    row = np.repeat(np.arange(len(low)), lengths)
    return row, np.arange(len(row)) + np.repeat(low - offsets, lengths)


def _by_blocks(low: Array, high: Array, values: Values, dtype: type[Any]) -> tuple[Array, Array]:
    """The least value of each row, and the start that has it: the last of several."""
    least, best = np.zeros(len(low), dtype), np.zeros(len(low), int)
    num_rows = max(1, MOST_AT_ONCE // int(high[-1] - low[0] + 1))
    for first in range(0, len(low), num_rows):
        rows = np.arange(first, min(first + num_rows, len(low)))
        least[rows], best[rows] = _block(rows, low[rows], high[rows], values)
    return least, best


def _block(rows: Array, low: Array, high: Array, values: Values) -> tuple[Array, Array]:
    """The same for neighbouring rows, from a table of all starts that any of them has."""
    starts = np.arange(low[0], high[-1] + 1)
    found = values(rows[:, None], starts)
    is_none = (starts < low[:, None]) | (starts > high[:, None])
    found[is_none] = found.max() + 1
    last = len(starts) - 1 - np.argmin(found[:, ::-1], axis=1)
    return found[np.arange(len(rows)), last], starts[last]


def _by_halves(low: Array, high: Array, values: Values, dtype: type[Any]) -> tuple[Array, Array]:
    """The same where the best start never falls: it is between those of rows that are done."""
    num_rows = len(low)
    least, best = np.zeros(num_rows, dtype), np.zeros(num_rows + 2, int)
    best[-1] = high[-1]  # as if of a row behind the last; best[0] is that of one before the first
    for power in reversed(range(num_rows.bit_length())):
        step = 1 << power
        rows = np.arange(step, num_rows + 1, 2 * step)
        first = np.maximum(low[rows - 1], best[rows - step])
        last = np.minimum(high[rows - 1], best[np.minimum(rows + step, num_rows + 1)])
        least[rows - 1], best[rows] = _row_minima(rows - 1, first, last, values)
    return least, best[1:-1]


def _row_minima(rows: Array, low: Array, high: Array, values: Values) -> tuple[Array, Array]:
    """The same for rows with few starts in common."""
    row, start = _pairs(low, high)
    found = values(rows[row], start)
    least = np.minimum.reduceat(found, np.searchsorted(row, np.arange(len(rows))))
    ties = np.flatnonzero(found == least[row])
    best = np.zeros(len(rows), int)
    best[row[ties]] = start[ties]  # ascending: the last of several remains
    return least, best
