"""Cutting layers into stages of even cost."""

from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm
from numbers import Rational, Real

from gpipe.arguments import require_count
from gpipe.errors import PlanError

__all__ = ["balance_costs"]


def balance_costs(costs: Iterable[float], num_stages: int) -> list[int]:
    """Cuts layers into consecutive stages whose summed costs have the smallest possible variance.

    The result is the optimum and not an approximation: costs are computed with as the exact
    numbers that they are, whatever their scale. Among equals the numbers of layers vary least;
    among those the last stage is shortest, then the one before it, and so on:

        balance_costs([1.0] * 30, 4)           # [8, 8, 7, 7]
        balance_costs([7, 2, 2, 2, 7], 3)      # [1, 3, 1]

    Args:
        costs: One cost per layer, of any unit: finite, at least 0.
        num_stages: Stages to cut into (K), at least 1.

    Returns:
        The number of layers of each stage, at least 1; their sum is `len(costs)`.

    Raises:
        PlanError: There are fewer layers than stages.
        TypeError: A cost is no real number, or `num_stages` no whole one.
        ValueError: There is no cost, one is negative, infinite or NaN, or `num_stages` is below 1.
    """
    num_stages = require_count("num_stages", num_stages)
    weights = _whole([_exact(layer, cost) for layer, cost in enumerate(costs)])
    if not weights:
        raise ValueError("`costs` is empty. Pass one cost per layer.")
    if len(weights) < num_stages:
        raise PlanError(
            f"{len(weights)} layer{'s' * (len(weights) > 1)} cannot fill {num_stages} stages. "
            "Lower `stages` or split a layer."
        )
    return [end - start for start, end in pairwise(_cuts(weights, num_stages))]


def _exact(layer: int, cost: object) -> Fraction:
    if not isinstance(cost, Real):
        found = type(cost).__name__
        raise TypeError(f"`costs[{layer}]` is {cost!r}, of type {found}. Pass a real number.")
    is_finite = isinstance(cost, Rational) or isfinite(cost)  # integers can exceed every float
    if not is_finite or cost < 0:
        raise ValueError(f"`costs[{layer}]` is {cost}. Pass a finite number of at least 0.")
    if isinstance(cost, Rational):
        # Without int(), NumPy's integers would stay NumPy's inside the fraction and overflow.
        return Fraction(int(cost.numerator), int(cost.denominator))
    return Fraction(float(cost))


def _whole(costs: list[Fraction]) -> list[int]:
    """Brings the costs to one denominator, which is then left out."""
    denominator = lcm(*(cost.denominator for cost in costs))
    return [cost.numerator * (denominator // cost.denominator) for cost in costs]


def _cuts(weights: list[int], num_stages: int) -> list[int]:
    """The first layer of each stage, and the number of layers behind them."""
    num_layers = len(weights)
    # The stage sums have a fixed total, so their variance is smallest where the sum of their
    # squares is. Scaled by num_layers, two such sums differ by at least num_layers² or not at
    # all: the squares of the layer counts, which are added, only decide between equals.
    marks = [num_layers * mark for mark in accumulate(weights, initial=0)]
    sums = [mark * mark + num_before**2 for num_before, mark in enumerate(marks)]
    starts = [[0] * (num_layers + 1)]
    for stage in range(1, num_stages):
        sums, start = _add_stage(stage, num_layers - num_stages, marks, sums, starts[-1])
        starts.append(start)
    cuts = [num_layers]
    for start in reversed(starts):
        cuts.append(start[cuts[-1]])
    return cuts[::-1]


def _add_stage(
    stage: int, num_spare: int, marks: list[int], sums: list[int], previous: list[int]
) -> tuple[list[int], list[int]]:
    """Extends the optimum over `stage` stages to one stage more, for every end it can have.

    The best start of a stage grows with its end and with the number of stages before it, because
    costs are not negative (the quadrangle inequality). That leaves few starts to try: all stages
    together take a time of O(layers²) instead of O(stages x layers²).

    Args:
        stage: Index of the new stage.
        num_spare: Layers beyond one per stage: how far a cut can move.
        marks: Scaled cost of all layers before each layer.
        sums: Smallest sum of squares of the stages before, by their end.
        previous: Start of the stage before, by its end.

    Returns:
        The new `sums`, and the start of the new stage, both by its end.
    """
    new_sums, starts = [0] * len(marks), [0] * len(marks)
    last_start = highest = stage + num_spare
    for end in range(last_start + 1, stage, -1):
        lowest = max(stage, previous[min(end, last_start)])
        tried = range(min(highest, end - 1), lowest - 1, -1)  # ties: the shortest stage is first
        mark = marks[end]
        values = [
            sums[start] + (cost := mark - marks[start]) * cost + (end - start) ** 2
            for start in tried
        ]
        new_sums[end] = min(values)
        highest = starts[end] = tried[values.index(new_sums[end])]
    return new_sums, starts
