"""The arguments of `balance_costs`, as one problem."""

from fractions import Fraction
from itertools import accumulate

from gpipe.arguments import require_count
from gpipe.errors import PlanError
from gpipe.partition.problem import Memory, Problem
from gpipe.partition.reading import read_cuts, read_limits, read_numbers, require_one_per, whole

__all__ = ["read_problem"]


def read_problem(
    costs: object,
    num_stages: object,
    memory_bytes: object,
    memory_limit_bytes: object,
    cuts: object,
    speeds: object,
    boundary_costs: object,
) -> Problem:
    """Checks the arguments, and makes whole numbers of them.

    Raises:
        PlanError: There are too few layers, or too few stages for `cuts`.
        TypeError: A number is no real one; `num_stages` or a cut is no whole one.
        ValueError: Any other mistake.
    """
    num_stages = require_count("num_stages", num_stages)
    layers = read_numbers("costs", costs, "layer")
    _require_enough_layers(len(layers), num_stages)
    whole_speeds, unit = _speeds(speeds, num_stages)
    marks, boundaries = _marks_and_boundaries(layers, boundary_costs, unit)
    memory = _memory(memory_bytes, memory_limit_bytes, len(layers), num_stages)
    places = _cuts(cuts, len(layers), num_stages)
    return Problem(marks, whole_speeds, boundaries, memory, places)


def _require_enough_layers(num_layers: int, num_stages: int) -> None:
    if not num_layers:
        raise ValueError("`costs` is empty. Pass one cost per layer.")
    if num_layers < num_stages:
        raise PlanError(
            f"{num_layers} layer{'s' * (num_layers > 1)} cannot fill {num_stages} stages. "
            "Lower `stages` or split a layer."
        )


def _marks_and_boundaries(
    costs: list[Fraction], boundary_costs: object, speed: Fraction
) -> tuple[list[int], list[int] | None]:
    """Costs before each place, and what a cut there adds, in the time of a speed of 1."""
    added: list[Fraction] = []
    if boundary_costs is not None:
        added = read_numbers("boundary_costs", boundary_costs, "layer")
        require_one_per("layer", "boundary_costs", added, len(costs))
    behind = [cost * speed for cost in added[:-1]]  # behind the last layer nothing is cut
    numbers, _ = whole([*costs, *behind])
    marks = list(accumulate(numbers[: len(costs)], initial=0))
    return marks, [0, *numbers[len(costs) :], 0] if any(behind) else None


def _speeds(speeds: object, num_stages: int) -> tuple[list[int], Fraction]:
    """The speeds as multiples of a unit, and the unit."""
    if speeds is None:
        return [1] * num_stages, Fraction(1)
    numbers = read_numbers("speeds", speeds, "stage")
    require_one_per("stage", "speeds", numbers, num_stages)
    for stage, speed in enumerate(numbers):
        if not speed:
            raise ValueError(f"`speeds[{stage}]` is 0. Pass a number above 0.")
    return whole(numbers)


def _memory(needs: object, limits: object, num_layers: int, num_stages: int) -> Memory | None:
    if needs is None and limits is None:
        return None
    if needs is None or limits is None:
        missing = "memory_bytes" if needs is None else "memory_limit_bytes"
        given = "memory_limit_bytes" if needs is None else "memory_bytes"
        raise ValueError(f"`{given}` is given, `{missing}` is not. Pass both or neither.")
    layers = read_numbers("memory_bytes", needs, "layer")
    require_one_per("layer", "memory_bytes", layers, num_layers)
    stages = read_limits("memory_limit_bytes", limits, num_stages)
    numbers, unit_bytes = whole([*layers, *stages])
    marks = list(accumulate(numbers[:num_layers], initial=0))
    return Memory(marks, numbers[num_layers:], unit_bytes)


def _cuts(cuts: object, num_layers: int, num_stages: int) -> list[int]:
    places = read_cuts(cuts, num_layers)
    needed = len(places) + 1
    if needed > num_stages:
        raise PlanError(
            f"{len(places)} cut{'s need' if len(places) > 1 else ' needs'} at least {needed} "
            f"stages; there {'are' if num_stages > 1 else 'is'} {num_stages}. Raise `stages` to at "
            f"least {needed}, or leave cuts out."
        )
    return places
