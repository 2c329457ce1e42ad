from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe.errors import PlanError
from gpipe.partition import balance_costs

few_examples = settings(max_examples=150, deadline=None, derandomize=True)


def by_brute_force(costs, num_stages):
    """The best of all balances, by the order that the docstring promises, in fractions."""
    cuts = combinations(range(1, len(costs)), num_stages - 1)
    balances = [[end - start for start, end in pairwise((0, *cut, len(costs)))] for cut in cuts]
    return min(balances, key=lambda balance: rank(costs, balance))


def rank(costs, balance):
    layers = iter(Fraction(float(cost)) for cost in costs)
    sums = [sum(next(layers) for _ in range(num_layers)) for num_layers in balance]
    return sum(cost**2 for cost in sums), sum(size**2 for size in balance), balance[::-1]


@pytest.mark.parametrize(
    ("costs", "num_stages", "balance"),
    [
        ([7, 2, 2, 2, 7], 3, [1, 3, 1]),
        ([1.0] * 30, 4, [8, 8, 7, 7]),
        ([0.1] * 30, 4, [8, 8, 7, 7]),  # no two sums of 0.1 differ by rounding
        ([1] * 15, 8, [2, 2, 2, 2, 2, 2, 2, 1]),
        ([5, 1], 1, [2]),
        ([3, 1, 4], 3, [1, 1, 1]),
        ([0, 0, 0, 0, 9, 0], 3, [2, 2, 2]),  # equals: even numbers of layers
        ([0] * 7, 3, [3, 2, 2]),
        ([1, 2, 3, 4, 100], 2, [4, 1]),  # one heavy layer bounds the result
    ],
)
def test_known_balances(costs, num_stages, balance):
    assert balance_costs(costs, num_stages) == balance


@few_examples
@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.data())
def test_law_equals_brute_force_with_many_ties(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    assert balance_costs(costs, num_stages) == by_brute_force(costs, num_stages)


@few_examples
@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=8), st.data())
def test_law_equals_brute_force_at_any_scale(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    assert balance_costs(costs, num_stages) == by_brute_force(costs, num_stages)


@pytest.mark.parametrize("seed", range(4))
def test_law_equals_brute_force_for_more_layers(seed):
    costs = np.random.default_rng(seed).choice([0, 1, 2, 3, 50], size=13)
    for num_stages in range(1, 14):
        assert balance_costs(costs, num_stages) == by_brute_force(costs, num_stages)


@few_examples
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60), st.data())
def test_law_every_layer_is_in_one_stage_and_no_stage_is_empty(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    balance = balance_costs(costs, num_stages)
    assert len(balance) == num_stages
    assert sum(balance) == len(costs)
    assert min(balance) >= 1


@few_examples
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.data())
def test_law_the_unit_does_not_matter(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    scaled = [cost * 2.0**-60 for cost in costs]
    assert balance_costs(scaled, num_stages) == balance_costs(costs, num_stages)


def test_a_difference_that_floats_cannot_square_still_decides():
    # As floats the sums of both cuts are equal, and a tie would end the first stage late.
    large = 2**60
    assert balance_costs([large, 1, large + 2], 2) == [2, 1]
    assert balance_costs([large + 2, 1, large], 2) == [1, 2]


def test_numbers_of_all_kinds():
    assert balance_costs(np.array([2**62] * 6), 4) == [2, 2, 1, 1]  # would overflow as int64
    assert balance_costs(np.array([0.1] * 8, np.float32), 3) == [3, 3, 2]
    assert balance_costs([10**400] * 5, 2) == [3, 2]  # larger than any float
    assert balance_costs([Fraction(1, 3)] * 4, 2) == [2, 2]
    assert balance_costs((cost for cost in (1, 2, 3)), 2) == [2, 1]


def test_one_thousand_layers():
    costs = np.random.default_rng(0).random(1000)
    balance = balance_costs(costs, 128)
    assert sum(balance) == 1000
    assert balance_costs(costs.tolist(), 128) == balance


def test_too_few_layers_are_named_with_the_remedy():
    with pytest.raises(
        PlanError, match=r"12 layers cannot fill 16 stages\. Lower `stages` or split a layer\."
    ):
        balance_costs([1] * 12, 16)
    with pytest.raises(PlanError, match="1 layer cannot fill 2 stages"):
        balance_costs([1], 2)


@pytest.mark.parametrize("cost", [-1, -0.5, float("nan"), float("inf"), float("-inf"), -(10**400)])
def test_refuses_impossible_costs(cost):
    with pytest.raises(ValueError, match=r"`costs\[1\]` is .* Pass a finite number of at least 0"):
        balance_costs([1, cost, 2], 2)


@pytest.mark.parametrize("cost", ["1", None, 1j, [1]])
def test_refuses_what_is_no_number(cost):
    with pytest.raises(TypeError, match=r"`costs\[1\]` is .*, of type \w+. Pass a real number"):
        balance_costs([1, cost], 2)


def test_refuses_no_costs_and_impossible_numbers_of_stages():
    with pytest.raises(ValueError, match=r"`costs` is empty. Pass one cost per layer"):
        balance_costs([], 1)
    with pytest.raises(ValueError, match=r"`num_stages` is 0. Pass a whole number of at least 1"):
        balance_costs([1], 0)
    with pytest.raises(TypeError, match=r"`num_stages` is 2.0, of type float"):
        balance_costs([1, 2], 2.0)
