"""The path of least variance: that of the least sum of squares."""

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import isqrt, sqrt

import numpy as np

from gpipe.partition.arithmetic import EPSILON, MANY_EXACT, MOST_EXACT, Arithmetic, exact, in_floats
from gpipe.partition.limits import Choices, even_path
from gpipe.partition.problem import Problem
from gpipe.partition.search import Level, num_tried, search, starts_of, trace

__all__ = ["least_squares"]

MOST_PAIRS = 1 << 20  # of places that are close to the best, and starts: more take too much memory


def least_squares(problem: Problem, choices: Choices, limit: int | None = None) -> list[int]:
    """The best path: least squares, then even numbers of layers, then short stages at the end.

    It is exact, unless that takes too long (`MOST_EXACT`): then it is the best path in floats.

    Args:
        problem: What is cut.
        choices: What paths can be made of.
        limit: The highest cost of a stage, as `Problem.stage_costs` counts, where the choices do
            not know it: with what boundaries add.
    """
    if limit is None:  # else the even path may exceed it
        choices = choices.within(_windows(problem, even_path(problem, choices)))
    numbers, choices = _affordable(problem, choices, limit)
    rule = numbers.squares()
    return trace(search(choices, rule, numbers.dtype, is_monotone=problem.is_monotone))


def _affordable(
    problem: Problem, choices: Choices, limit: int | None
) -> tuple[Arithmetic, Choices]:
    """The numbers to compute with, and the choices that are left."""
    numbers = exact(problem, limit, scale=problem.num_layers - problem.num_stages + 1)
    if numbers.dtype is not object or num_tried(choices, problem.is_monotone) <= MANY_EXACT:
        return numbers, choices
    floats = in_floats(problem, limit)
    if limit is None:  # else rounding may let pass a path that exceeds it
        levels = search(choices, floats.squares(), float, is_monotone=problem.is_monotone)
        choices = _close_to_best(choices, floats, levels)
        floats = floats.with_ties(float(levels[-1].values[-1]))
    is_few = num_tried(choices, problem.is_monotone) <= MOST_EXACT
    return numbers if is_few else floats, choices


def _windows(problem: Problem, path: list[int]) -> list[tuple[int, int]]:
    """The first and the last place of all paths as good as this one, behind each stage.

    The squares on both sides of a place are least where all stages of a side cost the same. A
    place for which that is already more than the path has is on no better path.
    """
    marks, unit, speed = problem.marks, problem.unit, sum(problem.speeds)
    spare = problem.squares(path) * speed - (unit * marks[-1]) ** 2
    windows = []
    for before in accumulate(problem.speeds, initial=0):
        ideal = marks[-1] * before
        radius = isqrt(spare * before * (speed - before) // unit**2)
        first = bisect_left(marks, -((radius - ideal) // speed))
        windows.append((first, bisect_right(marks, (ideal + radius) // speed) - 1))
    return windows


def _close_to_best(choices: Choices, floats: Arithmetic, levels: list[Level]) -> Choices:
    """Only the places on paths among which floats cannot decide; or all, where these are many."""
    best = float(levels[-1].values[-1])
    # Costs are off by a few EPSILON, because all layers together cost about 1; their squares by
    # 2 cost EPSILON. That sum is bounded by the sum of the squares (Cauchy-Schwarz).
    error = EPSILON**2 * sum(floats.speeds)
    most = best + 256 * (EPSILON * len(floats.speeds) * best + sqrt(best * error) + error)
    rule, places, rest = floats.squares(), [levels[-1].places], np.zeros(1)
    for stage in reversed(range(len(choices.earliest))):
        before, ends = levels[stage], places[-1]
        if len(ends) * len(before.places) > MOST_PAIRS:
            return choices
        row, start = starts_of(ends, choices.earliest[stage], before.places)
        values = rule(stage, before, ends)(row, start) + rest[row]
        start, values = start[values <= most], values[values <= most]
        least = np.full(len(before.places), np.inf)
        np.minimum.at(least, start, values - before.values[start])
        kept = np.flatnonzero(least < np.inf)
        places.append(before.places[kept])
        rest = least[kept]
    return choices._replace(places=places[::-1])
