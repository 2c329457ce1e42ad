"""Law 10: the partition is the optimum of its objective, equal to brute force."""

from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from math import inf, lcm
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe.errors import PlanError
from gpipe.partition import balance_costs

OBJECTIVES = ("variance", "bottleneck")
EXTRAS = ("memory", "limits", "cuts", "speeds", "boundaries")


class Case:
    """One call of `balance_costs`, and what decides about its result, written down plainly."""

    def __init__(self, costs, num_stages, extras):
        self.costs, self.num_stages, self.extras = costs, num_stages, extras
        speeds = [Fraction(speed) for speed in extras.get("speeds", [1] * num_stages)]
        added = extras.get("boundary_costs", [0] * len(costs))
        added = [Fraction(0), *map(Fraction, added[:-1]), Fraction(0)]
        # Fractions are slow: everything is scaled up to whole numbers.
        unit = lcm(*(speed.denominator for speed in speeds))
        self.speeds = [int(speed * unit) for speed in speeds]
        factor = lcm(*self.speeds) * lcm(*(Fraction(each).denominator for each in (*costs, *added)))
        self.sums = [int(each * factor * unit) for each in running_sums(costs)]
        self.added = [int(each * factor) for each in added]
        self.memory = running_sums(extras.get("memory_bytes", [0] * len(costs)))
        limits = extras.get("memory_limit_bytes", 0)
        self.limits = limits if isinstance(limits, list) else [limits] * num_stages

    def stage_cost(self, stage, start, end):
        cost = (self.sums[end] - self.sums[start]) // self.speeds[stage]  # without a rest
        return cost + self.added[start] + self.added[end]

    def is_allowed(self, stage, start, end):
        fits = self.memory[end] - self.memory[start] <= self.limits[stage]
        return fits and not any(start < cut < end for cut in self.extras.get("cuts", ()))

    def rank(self, objective, path):
        """What decides, in the order that the docstring promises; None where it is forbidden."""
        stages = [(stage, start, end) for stage, (start, end) in enumerate(pairwise(path))]
        if not all(self.is_allowed(*stage) for stage in stages):
            return None
        costs = [self.stage_cost(*stage) for stage in stages]
        squares = sum(speed * cost**2 for speed, cost in zip(self.speeds, costs, strict=True))
        sizes = [end - start for _, start, end in stages]
        slowest = max(costs) if objective == "bottleneck" else 0
        return slowest, squares, sum(size**2 for size in sizes), sizes[::-1]

    def by_brute_force(self, objective):
        """The best rank of all balances; None where all are forbidden."""
        cuts = combinations(range(1, len(self.costs)), self.num_stages - 1)
        ranks = (self.rank(objective, (0, *cut, len(self.costs))) for cut in cuts)
        return min((rank for rank in ranks if rank), default=None)

    def by_table(self, objective):
        """The same for more layers, by the plainest dynamic programming."""
        limit = inf
        if objective == "bottleneck":
            limit = self.least(0, lambda before, cost, *_: max(before, cost), inf)
        least = None if limit is None else self.least((0, 0, []), added_up, limit)
        return None if least is None else (0 if limit == inf else limit, *least)

    def least(self, nothing, extend, limit):
        """The least value of all paths through stages of at most a cost; None without a path."""
        values = {0: nothing}
        for stage, speed in enumerate(self.speeds):
            longer = {}
            for start, before in values.items():
                for end in range(start + 1, len(self.costs) + 1):
                    cost = self.stage_cost(stage, start, end)
                    if cost <= limit and self.is_allowed(stage, start, end):
                        value = extend(before, cost, speed, end - start)
                        longer[end] = min(longer.get(end, value), value)
            values = longer
        return values.get(len(self.costs))

    def found(self, objective):
        """The rank of the balance that is found; None where none is."""
        try:
            balance = balance_costs(self.costs, self.num_stages, objective, **self.extras)
        except PlanError:
            return None
        return self.rank(objective, list(accumulate(balance, initial=0)))


def running_sums(numbers):
    return list(accumulate(map(Fraction, numbers), initial=Fraction(0)))


def added_up(before, cost, speed, size):
    squares, sizes, balance = before
    return squares + speed * cost**2, sizes + size**2, [size, *balance]


# The ways that large problems take, forced upon small ones.
WAYS = {
    "as it is": {},
    "by halves": {"search.FEW": 0},
    "in small blocks": {"search.MOST_AT_ONCE": 3},
    "floats first, by halves": {"variance.MANY_EXACT": 0, "search.FEW": 0},
}
FLOATS_ONLY = {"variance.MANY_EXACT": 0, "variance.MOST_EXACT": 0, "bottleneck.MOST_EXACT": 0}


def patched(constants):
    patches = [patch(f"gpipe.partition.{name}", value) for name, value in constants.items()]
    for each in patches:
        each.start()
    yield
    for each in patches:
        each.stop()


@pytest.fixture(params=WAYS.values(), ids=WAYS, scope="module")
def _way(request):
    yield from patched(request.param)


@pytest.fixture
def _floats_only():
    yield from patched(FLOATS_ONLY)


def mostly_ties(random, count):
    return random.integers(0, 4, count).tolist()


def ties_that_rounding_hides(random, count):
    return random.choice([0.0, 0.1, 0.2, 0.3], count).tolist()


def uniform(random, count):
    return random.random(count).tolist()


def heavy_tails(random, count):
    return random.lognormal(0, 3, count).tolist()


def huge(random, count):
    return [2**60 * large + small for large, small in random.integers(0, 3, (count, 2)).tolist()]


def of_any_scale(random, count):
    return (10.0 ** random.integers(-200, 200, count)).tolist()


KINDS = (mostly_ties, ties_that_rounding_hides, uniform, heavy_tails, huge, of_any_scale)
SOBER = (mostly_ties, ties_that_rounding_hides, uniform, heavy_tails, huge)


def some_case(random, names, most_layers=10, most_stages=10, kinds=KINDS):
    """A case of random size and kind with these extras."""
    num_layers = int(random.integers(1, most_layers + 1))
    num_stages = int(random.integers(1, min(num_layers, most_stages) + 1))
    mean = -(-num_layers // num_stages)
    extras = {}
    if "memory" in names or "limits" in names:
        extras["memory_bytes"] = random.integers(0, 6, num_layers).tolist()
        limits = (mean * random.integers(2, 9, num_stages)).tolist()
        extras["memory_limit_bytes"] = limits if "limits" in names else limits[0]
    if "cuts" in names:
        num_cuts = int(random.integers(0, min(num_stages, 4)))
        extras["cuts"] = (1 + random.permutation(num_layers - 1)[:num_cuts]).tolist()
    if "speeds" in names:
        kind = random.integers(3)
        whole, real = random.integers(1, 4, num_stages), random.random(num_stages) + 0.1
        extras["speeds"] = (whole if kind == 0 else real if kind == 1 else 3 * whole).tolist()
    if "boundaries" in names:
        extras["boundary_costs"] = kinds[random.integers(len(kinds))](random, num_layers)
    costs = kinds[random.integers(len(kinds))](random, num_layers)
    return Case(costs, num_stages, extras)


def some_cases(number, *names, **sizes):
    random = np.random.default_rng(0)
    return [some_case(random, names, **sizes) for _ in range(number)]


SIZES = [
    (num_layers, num_stages)
    for num_layers in range(1, 11)
    for num_stages in range(1, num_layers + 1)
]


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_law_equals_brute_force_at_every_size(objective, kind):
    random = np.random.default_rng(0)
    for num_layers, num_stages in SIZES:
        case = Case(kind(random, num_layers), num_stages, {})
        assert case.found(objective) == case.by_brute_force(objective), vars(case)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_law_equals_brute_force_with_each_extra(objective, extra):
    for case in some_cases(80, extra):
        assert case.found(objective) == case.by_brute_force(objective), vars(case)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("pair", list(combinations(EXTRAS, 2)), ids="+".join)
def test_law_equals_brute_force_with_two_extras(objective, pair):
    for case in some_cases(16, *pair):
        assert case.found(objective) == case.by_brute_force(objective), vars(case)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_law_equals_brute_force_with_all_extras(objective):
    for case in some_cases(100, *EXTRAS):
        assert case.found(objective) == case.by_brute_force(objective), vars(case)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.one_of(st.integers(0, 6), st.floats(0, 1e300)), min_size=1, max_size=9), st.data()
)
def test_law_equals_brute_force_whatever_hypothesis_thinks_of(costs, data):
    case = Case(costs, data.draw(st.integers(1, len(costs))), {})
    for objective in OBJECTIVES:
        assert case.found(objective) == case.by_brute_force(objective)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("names", [(), EXTRAS[1:4], EXTRAS], ids="+".join)
def test_law_equals_the_plain_table_for_more_layers(objective, names):
    for case in some_cases(6, *names, most_layers=40, most_stages=8):
        assert case.found(objective) == case.by_table(objective), vars(case)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", [uniform, heavy_tails, huge])
def test_law_equals_the_plain_table_where_floats_have_to_help(objective, kind):
    costs = kind(np.random.default_rng(1), 120)
    costs[40] = 2 * sum(costs)  # the bounds, which suppose even stages, say nothing now
    case = Case(costs, 20, {})
    assert case.found(objective) == case.by_table(objective)


@pytest.mark.usefixtures("_floats_only")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("names", [(), *((extra,) for extra in EXTRAS), EXTRAS], ids="+".join)
def test_floats_alone_are_right_up_to_rounding(objective, names):
    """What is left where exact numbers would take too long, here forced."""
    for case in some_cases(60, *names, kinds=SOBER):
        found, best = case.found(objective), case.by_brute_force(objective)
        assert (found is None) == (best is None)
        if best and objective == "bottleneck":
            assert found[0] <= best[0] * (1 + Fraction(1, 10**12))
        elif best:
            assert found[1] <= best[1] * (1 + Fraction(1, 10**12))
