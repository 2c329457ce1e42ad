"""What is to be cut, in whole numbers."""

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Memory", "Problem", "as_array"]

Array: TypeAlias = NDArray[Any]  # of int64, of Python's integers, of float64 or of bool


@dataclass(frozen=True)
class Memory:
    """What layers need and stages may hold.

    Attributes:
        marks: What all layers before each place need together.
        limits: What each stage may hold.
        unit_bytes: The bytes that 1 stands for.
    """

    marks: list[int]
    limits: list[int]
    unit_bytes: Fraction


@dataclass(frozen=True)
class Problem:
    """Layers with their costs, and stages with their speeds; every number is whole.

    A place is where a boundary can be cut: the number of layers before it, from 0 to all of
    them. A path is the places where all stages begin, and the last place.

    Attributes:
        marks: Cost of all layers before each place.
        speeds: Speed of each stage.
        boundaries: What a cut at each place adds to both its stages; None where nothing does.
        memory: What stages may hold; None where it does not matter.
        cuts: The places where a boundary must be cut, ascending.
    """

    marks: list[int]
    speeds: list[int]
    boundaries: list[int] | None
    memory: Memory | None
    cuts: list[int]

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.marks) - 1

    @property
    def num_stages(self) -> int:
        """How many stages there are to be."""
        return len(self.speeds)

    @property
    def is_monotone(self) -> bool:
        """Whether a stage with further layers never costs less."""
        return self.boundaries is None

    @property
    def is_uniform(self) -> bool:
        """Whether it does not matter which stage has which layers."""
        limits = self.memory.limits if self.memory else []
        return self.is_monotone and len({*self.speeds}) == 1 and len({*limits}) <= 1

    @property
    def unit(self) -> int:
        """What the costs of stages are multiplied by, to be whole at every speed."""
        return lcm(*self.speeds)

    @property
    def slowness(self) -> list[int]:
        """What each stage makes of a cost of 1, times `unit`."""
        unit = self.unit
        return [unit // speed for speed in self.speeds]

    def stage_costs(self, path: list[int]) -> list[int]:
        """The cost of each stage of a path, times `unit`."""
        added = self.boundaries or [0] * len(self.marks)
        unit = self.unit
        return [
            slowness * (self.marks[end] - self.marks[start]) + unit * (added[start] + added[end])
            for slowness, (start, end) in zip(self.slowness, pairwise(path), strict=True)
        ]

    def squares(self, path: list[int]) -> int:
        """The sum of the squares of these costs, weighted by speed."""
        costs = self.stage_costs(path)
        return sum(speed * cost**2 for speed, cost in zip(self.speeds, costs, strict=True))


def as_array(numbers: list[int], bound: int) -> Array:
    """Whole numbers as int64, where `bound` fits it, and else as Python's integers.

    Args:
        numbers: What the array is to hold.
        bound: The largest absolute value that is to be computed from them.
    """
    return np.array(numbers, np.int64 if bound < 2**63 else object)
