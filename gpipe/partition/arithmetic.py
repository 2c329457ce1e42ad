"""Costs of many stages at once, exact or in floats."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpipe.partition.problem import Array, Problem, as_array
from gpipe.partition.search import Level, Rule, Values

__all__ = ["EPSILON", "MANY_EXACT", "MOST_EXACT", "Arithmetic", "exact", "in_floats"]

EPSILON = float(np.finfo(float).eps)

# Starts that are tried in Python's integers, at about half a microsecond each: above the first
# number floats choose the places that matter, and where these still are too many, floats decide.
MANY_EXACT = 20_000
MOST_EXACT = 200_000


@dataclass(frozen=True)
class Arithmetic:
    """The numbers of a problem, ready to compute with.

    Attributes:
        dtype: What is computed with: int64, Python's integers (object) or float64.
        marks: Cost of all layers before each place.
        boundaries: What a cut at each place adds to both its stages; None where nothing does.
        slowness: What each stage makes of a cost of 1.
        speeds: The weight of each stage's square.
        target: What is taken off each cost before it is squared, close to their mean: it changes
            all sums of squares by the same, and leaves fewer digits to be rounded.
        limit: The highest cost of a stage, where there is one.
        penalty: What a stage above the limit costs: more than any sum of squares.
        tie: What a squared number of layers costs: too little to matter except between equals.
    """

    dtype: type[Any]
    marks: Array
    boundaries: Array | None
    slowness: list[int] | list[float]
    speeds: list[int] | list[float]
    target: float
    limit: float | None
    penalty: float
    tie: float

    def with_ties(self, best: float) -> "Arithmetic":
        """The same where ties count, in floats: too little to add 1e-13 to the best value."""
        tie = 1e-13 * best * len(self.speeds) / len(self.marks) ** 2
        return replace(self, tie=tie)

    def slowest(self) -> Rule:
        """Minimises the cost of the slowest stage."""

        def rule(stage: int, before: Level, ends: Array) -> Values:
            right, left = self._right(stage, ends), self._left(stage, before.places)

            def values(row: Array, start: Array) -> Array:
                slowest: Array = np.maximum(before.values[start], right[row] - left[start])
                return slowest

            return values

        return rule

    def squares(self) -> Rule:
        """Minimises the sum of squared costs; between equals, that of squared layer counts."""

        def rule(stage: int, before: Level, ends: Array) -> Values:
            right, left = self._right(stage, ends), self._left(stage, before.places)

            def values(row: Array, start: Array) -> Array:
                sums: Array = before.values[start] + self._squared(stage, right[row] - left[start])
                if self.tie:
                    num_layers = ends[row] - before.places[start]
                    sums += num_layers * num_layers * self.tie
                return sums

            return values

        return rule

    def _right(self, stage: int, places: Array) -> Array:
        """The cost of a stage from the first layer to each place."""
        marks = self.marks[places] * self.slowness[stage]
        return marks if self.boundaries is None else marks + self.boundaries[places]

    def _left(self, stage: int, places: Array) -> Array:
        """How much less it is where the stage begins at each place."""
        marks = self.marks[places] * self.slowness[stage]
        return marks if self.boundaries is None else marks - self.boundaries[places]

    def _squared(self, stage: int, costs: Array) -> Array:
        off = costs - self.target
        squares = off * off * self.speeds[stage]
        if self.limit is None:
            return squares
        return np.where(costs > self.limit, self.penalty, squares)


def exact(problem: Problem, limit: int | None = None, *, scale: int = 1) -> Arithmetic:
    """Whole numbers: int64 where it holds every sum of squares, and else Python's integers.

    Args:
        problem: What is cut.
        limit: The highest cost of a stage, as `Problem.stage_costs` counts.
        scale: What costs are multiplied by. With the number of layers, less that of stages,
            plus 1, different sums of squares differ by more than squared numbers of layers can.
    """
    unit, slowness, speeds = problem.unit, problem.slowness, problem.speeds
    marks = [scale * mark for mark in problem.marks]
    added = [scale * unit * cost for cost in problem.boundaries or ()]
    target = 0 if added else unit * marks[-1] // sum(speeds)
    total = max(slowness) * marks[-1] + 2 * sum(added)
    penalty = max(speeds) * total**2 + sum(speeds) * target**2 + problem.num_layers**2 + 1
    bound = penalty * (problem.num_stages + 1 if added else 1) + max(slowness) + max(speeds)
    return Arithmetic(
        dtype=np.int64 if bound < 2**63 else object,
        marks=as_array(marks, bound),
        boundaries=as_array(added, bound) if added else None,
        slowness=slowness,
        speeds=speeds,
        target=target,
        limit=None if limit is None else scale * limit,
        penalty=penalty,
        tie=1,
    )


def in_floats(problem: Problem, limit: int | None = None) -> Arithmetic:
    """Floats of at most 1, in a unit of their own, whatever the scale of the problem.

    Args:
        problem: What is cut.
        limit: The highest cost of a stage, as `Problem.stage_costs` counts.
    """
    unit, slowness, speeds = problem.unit, problem.slowness, problem.speeds
    slowest, fastest = max(slowness), max(speeds)
    added = [unit * cost for cost in problem.boundaries or ()]
    total = slowest * problem.marks[-1] + 2 * max(added, default=0) or 1
    # Whole numbers of any size are divided with a single rounding, and no quotient overflows.
    return Arithmetic(
        dtype=float,
        marks=np.array([mark * slowest / total for mark in problem.marks]),
        boundaries=np.array([cost / total for cost in added]) if added else None,
        slowness=[each / slowest for each in slowness],
        speeds=[each / fastest for each in speeds],
        target=0.0 if added else unit * problem.marks[-1] / (sum(speeds) * total),
        limit=None if limit is None else limit / total + 4 * EPSILON,
        penalty=np.inf,
        tie=0.0,
    )
