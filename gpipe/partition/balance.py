"""The balance that is best for given costs."""

from collections.abc import Iterable
from itertools import pairwise

from gpipe.arguments import require_choice
from gpipe.partition.arguments import read_problem
from gpipe.partition.bottleneck import least_slowest
from gpipe.partition.limits import choices
from gpipe.partition.misfit import misfit
from gpipe.partition.problem import Problem
from gpipe.partition.variance import least_squares

__all__ = ["balance_costs"]


def balance_costs(
    costs: Iterable[float],
    num_stages: int,
    objective: str = "variance",
    *,
    memory_bytes: Iterable[float] | None = None,
    memory_limit_bytes: float | Iterable[float] | None = None,
    cuts: Iterable[int] = (),
    speeds: Iterable[float] | None = None,
    boundary_costs: Iterable[float] | None = None,
) -> list[int]:
    """Cuts layers into consecutive stages of the most even cost.

    The result is the optimum. Among equals the numbers of layers vary least; among those the last
    stage is shortest, then the one before it, and so on:

        balance_costs([1.0] * 30, 4)                 # [8, 8, 7, 7]
        balance_costs([7, 2, 2, 2, 7], 3)            # [1, 3, 1]
        balance_costs([1] * 9, 2, speeds=[2, 1])     # [6, 3]

    `gpipe.partition` says what exactly a stage costs, and where rounding comes in.

    Args:
        costs: One cost per layer, of any unit: finite, at least 0.
        num_stages: Stages to cut into (K), at least 1.
        objective: "variance": the least variance of what the stages cost; or "bottleneck": the
            smallest possible slowest stage, then the least variance.
        memory_bytes: What each layer needs.
        memory_limit_bytes: What a stage may hold: one number for all, or one per stage.
        cuts: Indices of layers before which a stage must begin.
        speeds: One per stage, above 0: the costs of its layers are divided by it.
        boundary_costs: One per layer: what a cut behind it adds to the stages on both sides.

    Returns:
        The number of layers of each stage, at least 1; their sum is `len(costs)`.

    Raises:
        PlanError: There are too few layers, too few stages for `cuts`, or too little memory.
        TypeError: A number is no real one; `num_stages` or a cut is no whole one.
        ValueError: A number is negative, infinite or NaN, a speed 0, a cut or an objective
            unknown, or there is not one number per layer or stage.
    """
    require_choice("objective", objective, ("variance", "bottleneck"))
    memory = memory_bytes, memory_limit_bytes
    problem = read_problem(costs, num_stages, *memory, cuts, speeds, boundary_costs)
    return [end - start for start, end in pairwise(_best_path(problem, objective))]


def _best_path(problem: Problem, objective: str) -> list[int]:
    everything = choices(problem)
    if everything is None:
        raise misfit(problem)
    if objective == "variance":
        return least_squares(problem, everything)
    limit = least_slowest(problem, everything)
    left = choices(problem, limit)
    assert left is not None  # the path that the limit comes from is in it
    return least_squares(problem, left, None if problem.is_monotone else limit)
