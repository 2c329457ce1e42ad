"""The smallest possible cost of the slowest stage."""

from bisect import bisect_right
from itertools import pairwise

import numpy as np

from gpipe.partition.arithmetic import MOST_EXACT, exact, in_floats
from gpipe.partition.limits import Choices, choices, earliest_starts, even_path
from gpipe.partition.problem import Problem
from gpipe.partition.search import num_tried, search, trace

__all__ = ["furthest_ends", "least_limit", "least_slowest", "packed"]


def least_slowest(problem: Problem, everything: Choices) -> int:
    """The least cost of the slowest stage, as `Problem.stage_costs` counts.

    It is exact, unless that takes too long (`MOST_EXACT`): then it is that of the best path in
    floats.

    Args:
        problem: What is cut.
        everything: What paths can be made of, when only the cost of stages is not limited.
    """
    if problem.is_uniform:
        return least_limit(problem.marks, furthest_ends(problem), problem.num_stages)
    return _by_search(problem, everything)


def furthest_ends(problem: Problem) -> list[int]:
    """The furthest end of a stage by its start, where all stages have the same limits."""
    earliest = earliest_starts(problem)[0]
    ends = np.searchsorted(earliest, np.arange(len(earliest)), "right") - 1
    return [int(end) for end in ends]


def least_limit(marks: list[int], furthest: list[int], num_stages: int) -> int:
    """The smallest limit on the sum of a stage that so many stages can keep.

    Args:
        marks: The sum of all layers before each place.
        furthest: The furthest end of a stage by its start; so many stages can keep it.
        num_stages: Stages to cut into, at most (K).
    """
    low, high = -(-marks[-1] // num_stages), marks[-1]
    while low < high:
        # A path stays the same down to its largest stage, and up to the smallest stage with one
        # layer more: both bounds move on to such sums, so that their digits do not matter.
        stages = list(pairwise(packed(marks, furthest, num_stages, (low + high) // 2)))
        if stages[-1][1] == len(marks) - 1:
            high = max(marks[end] - marks[start] for start, end in stages)
        else:
            held = [(start, end) for start, end in stages if end < furthest[start]]
            low = min(marks[end + 1] - marks[start] for start, end in held)
    return high


def packed(marks: list[int], furthest: list[int], num_stages: int, limit: int) -> list[int]:
    """The path whose stages are as long as the limit allows, with so many stages at most.

    Args:
        marks: The sum of all layers before each place.
        furthest: The furthest end of a stage by its start.
        num_stages: Where to stop.
        limit: The largest sum of a stage.
    """
    path = [0]
    while path[-1] < len(marks) - 1 and len(path) <= num_stages:
        start = path[-1]
        path.append(min(bisect_right(marks, marks[start] + limit) - 1, furthest[start]))
    return path


def _by_search(problem: Problem, everything: Choices) -> int:
    """The same where stages differ: in floats, then in exact numbers on what these leave."""
    limit = max(problem.stage_costs(even_path(problem, everything)))
    whole = exact(problem)
    for numbers in (in_floats(problem), whole) if whole.dtype is object else (whole,):
        left = choices(problem, limit)
        assert left is not None  # the path that gave the limit is in it
        if numbers.dtype is object and num_tried(left, problem.is_monotone) > MOST_EXACT:
            break
        levels = search(left, numbers.slowest(), numbers.dtype, is_monotone=problem.is_monotone)
        limit = min(limit, max(problem.stage_costs(trace(levels))))
    return limit
