"""Why nothing fits into memory, and what would."""

from dataclasses import replace
from itertools import pairwise

from gpipe.errors import PlanError
from gpipe.partition.bottleneck import furthest_ends, least_limit, packed
from gpipe.partition.limits import earliest_starts, reached
from gpipe.partition.problem import Memory, Problem

__all__ = ["misfit"]


def misfit(problem: Problem) -> PlanError:
    """The error for a problem that has no path, with bytes needed and available."""
    memory = problem.memory
    assert memory is not None  # nothing else is left that could be the reason
    needs = [end - start for start, end in pairwise(memory.marks)]
    largest = max(memory.limits)
    if max(needs) > largest:
        layer = needs.index(max(needs))
        return PlanError(
            f"Layer {layer} alone needs {_bytes(memory, needs[layer])}; a stage has "
            f"{_bytes(memory, largest)} at most. Split the layer or raise `memory_limit_bytes`."
        )
    if len({*memory.limits}) == 1:
        return _too_few_stages(problem, memory)
    return _too_small_limits(problem, memory)


def _too_few_stages(problem: Problem, memory: Memory) -> PlanError:
    num_layers, num_stages = problem.num_layers, problem.num_stages
    unlimited = furthest_ends(replace(problem, memory=None))
    needed = least_limit(memory.marks, unlimited, num_stages)
    path = packed(memory.marks, furthest_ends(problem), num_layers, memory.limits[0])
    return PlanError(
        f"{num_layers} layers in {num_stages} stage{'s' * (num_stages > 1)} need at least "
        f"{_bytes(memory, needed)} in one of them; each has {_bytes(memory, memory.limits[0])}. "
        f"Raise `stages` to at least {len(path) - 1}, or `memory_limit_bytes`."
    )


def _too_small_limits(problem: Problem, memory: Memory) -> PlanError:
    smallest, largest = min(memory.limits), max(memory.limits)
    return PlanError(
        f"{problem.num_layers} layers need {_bytes(memory, memory.marks[-1])} in all; "
        f"{problem.num_stages} stages have {_bytes(memory, sum(memory.limits))}, from "
        f"{_bytes(memory, smallest)} to {_bytes(memory, largest)} each. Raise each of "
        f"`memory_limit_bytes` by {_bytes(memory, _least_raise(problem, memory))}, or `stages`."
    )


def _least_raise(problem: Problem, memory: Memory) -> int:
    """How much more every stage would have to hold, for a path to exist: at most 0.1 % too much."""
    total = memory.marks[-1]
    low, high = max(1, (total - sum(memory.limits)) // problem.num_stages), total
    while high - low > high >> 10:
        more = (low + high) // 2
        limits = [limit + more for limit in memory.limits]
        raised = replace(problem, memory=replace(memory, limits=limits))
        has_path = reached(earliest_starts(raised))[-1, -1]
        low, high = (low, more) if has_path else (more + 1, high)
    return high


def _bytes(memory: Memory, number: int) -> str:
    num_bytes = number * memory.unit_bytes
    shown = num_bytes.numerator if num_bytes.denominator == 1 else float(num_bytes)
    return f"{shown} byte{'s' * (num_bytes != 1)}"
