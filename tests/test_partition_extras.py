"""Memory limits, forced cuts, speeds and boundary costs: examples and refusals."""

import re

import numpy as np
import pytest

from gpipe.errors import PlanError
from gpipe.partition import balance_costs

OBJECTIVES = ("variance", "bottleneck")


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("costs", "num_stages", "extras", "balance"),
    [
        # Without the limits it were [2, 2, 2].
        ([1] * 6, 3, {"memory_bytes": [5, 5, 1, 1, 1, 1], "memory_limit_bytes": 8}, [1, 3, 2]),
        ([1] * 6, 3, {"memory_bytes": [1] * 6, "memory_limit_bytes": [1, 3, 3]}, [1, 3, 2]),
        ([1] * 6, 2, {"memory_bytes": [1] * 6, "memory_limit_bytes": [4.5, 2]}, [4, 2]),
        ([1] * 6, 3, {"cuts": {1}}, [1, 3, 2]),
        ([1] * 6, 3, {"cuts": [5, 1]}, [1, 4, 1]),
        ([1] * 6, 3, {"cuts": np.array([2])}, [2, 2, 2]),
        ([1] * 6, 2, {"speeds": [2, 1]}, [4, 2]),
        ([1] * 6, 2, {"speeds": [0.5, 2.5]}, [1, 5]),
        ([1] * 7, 3, {"speeds": np.array([7, 7, 7])}, [3, 2, 2]),
        ([0] * 7, 3, {"speeds": [0.1, 0.3, 0.7]}, [3, 2, 2]),  # their common unit is beyond int64
        ([1] * 6, 2, {"boundary_costs": [0, 0, 9, 0, 0, 0]}, [4, 2]),
        ([1] * 6, 2, {"boundary_costs": [2, 2, 2, 2, 2, 1e9]}, [3, 3]),  # the last is never cut
        ([1] * 6, 2, {"boundary_costs": [0] * 6, "cuts": (), "speeds": [1, 1]}, [3, 3]),
    ],
)
def test_known_balances(objective, costs, num_stages, extras, balance):
    assert balance_costs(costs, num_stages, objective, **extras) == balance


def test_a_boundary_costs_the_stage_before_and_the_stage_behind():
    # 4 + 2 and 2 + 3 + 2, or 6 and 3. Were it the stage before alone: 6 and 5, or 6 and 3.
    assert balance_costs([4, 2, 3], 2, "bottleneck", boundary_costs=[2, 0, 0]) == [2, 1]
    # 3 and 6, or 5 + 2 and 4 + 2. Were it the stage behind alone: 3 and 6, or 5 and 6.
    assert balance_costs([3, 2, 4], 2, "bottleneck", boundary_costs=[0, 2, 0]) == [1, 2]


def test_speed_divides_the_cost_of_layers_and_not_that_of_boundaries():
    # 1/4 and 8/4, or 5/4 + 1 and 4/4 + 1. Were all divided: 8/4, or 6/4.
    extras = {"speeds": [4, 4], "boundary_costs": [0, 1, 0]}
    assert balance_costs([1, 4, 4], 2, "bottleneck", **extras) == [1, 2]


def test_a_slow_stage_can_be_the_only_one_with_enough_memory():
    extras = {"memory_bytes": [9, 1, 1, 1], "memory_limit_bytes": [9, 4], "speeds": [1, 100]}
    assert balance_costs([5, 5, 5, 5], 2, "bottleneck", **extras) == [1, 3]


def test_a_stage_with_little_memory_leaves_holes_in_where_the_next_can_begin():
    # The second stage holds one layer of 1; what is behind the one of 5 then has to fit the third.
    extras = {"memory_bytes": [1, 1, 5, 1, 1, 1], "memory_limit_bytes": [10, 1, 7]}
    assert balance_costs([1] * 6, 3, **extras) == [3, 1, 2]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_thousand_layers_with_everything(objective):
    random = np.random.default_rng(0)
    balance = balance_costs(
        random.random(1000),
        128,
        objective,
        memory_bytes=np.ones(1000),
        memory_limit_bytes=random.integers(9, 20, 128),
        cuts=[100, 700],
        speeds=random.random(128) + 0.5,
        boundary_costs=random.random(1000),
    )
    assert sum(balance) == 1000
    assert {100, 700} <= set(np.cumsum(balance).tolist())


def refused(message, costs, num_stages, **extras):
    for objective in OBJECTIVES:
        with pytest.raises(PlanError, match=re.escape(message)):
            balance_costs(costs, num_stages, objective, **extras)


def test_too_little_memory_says_what_is_needed_and_how_many_stages_would_do():
    message = (
        "6 layers in 2 stages need at least 9 bytes in one of them; each has 7 bytes. "
        "Raise `stages` to at least 3, or `memory_limit_bytes`."
    )
    refused(message, [1] * 6, 2, memory_bytes=[3] * 6, memory_limit_bytes=7)
    refused(message, [1] * 6, 2, memory_bytes=[3] * 6, memory_limit_bytes=[7, 7])
    balance_costs([1] * 6, 3, memory_bytes=[3] * 6, memory_limit_bytes=7)
    balance_costs([1] * 6, 2, memory_bytes=[3] * 6, memory_limit_bytes=9)


def test_too_little_memory_between_forced_cuts():
    extras = {"memory_bytes": [1.5] * 6, "memory_limit_bytes": 4}
    message = (
        "6 layers in 3 stages need at least 4.5 bytes in one of them; each has 4 bytes. "
        "Raise `stages` to at least 4"
    )
    refused(message, [1] * 6, 3, cuts=[1], **extras)
    assert balance_costs([1] * 6, 3, **extras) == [2, 2, 2]
    assert balance_costs([1] * 6, 4, cuts=[1], **extras) == [1, 2, 2, 1]


def test_a_layer_that_does_not_fit_alone_is_named():
    message = (
        "Layer 2 alone needs 50 bytes; a stage has 20 bytes at most. "
        "Split the layer or raise `memory_limit_bytes`."
    )
    refused(message, [1] * 4, 2, memory_bytes=[1, 1, 50, 1], memory_limit_bytes=[10, 20])


def test_too_little_memory_on_unequal_stages():
    message = (
        "6 layers need 18 bytes in all; 2 stages have 16 bytes, from 6 bytes to 10 bytes each. "
        "Raise each of `memory_limit_bytes` by 2 bytes, or `stages`."
    )
    refused(message, [1] * 6, 2, memory_bytes=[3] * 6, memory_limit_bytes=[6, 10])
    balance_costs([1] * 6, 2, memory_bytes=[3] * 6, memory_limit_bytes=[8, 12])


def test_enough_memory_in_all_but_none_that_fits():
    extras = {"memory_bytes": [4, 4, 4], "memory_limit_bytes": [6, 7]}
    refused("by 1 byte, or `stages`", [1] * 3, 2, **extras)
    assert balance_costs([1] * 3, 2, memory_bytes=[4, 4, 4], memory_limit_bytes=[7, 8]) == [1, 2]


def test_a_stage_that_can_hold_nothing():
    extras = {"memory_bytes": [3, 3], "memory_limit_bytes": [9, 0]}
    refused(
        "6 bytes in all; 2 stages have 9 bytes, from 0 bytes to 9 bytes each", [1] * 2, 2, **extras
    )


def test_more_cuts_than_stages_allow():
    message = (
        "2 cuts need at least 3 stages; there are 2. "
        "Raise `stages` to at least 3, or leave cuts out."
    )
    refused(message, [1] * 6, 2, cuts=[2, 4])
    refused("1 cut needs at least 2 stages; there is 1.", [1] * 6, 1, cuts=[2])
    assert balance_costs([1] * 6, 2, cuts=[4, 4]) == [4, 2]


@pytest.mark.parametrize(
    ("error", "message", "extras"),
    [
        (
            ValueError,
            "`speeds` has 3 numbers for 2 stages. Pass one number per stage.",
            {"speeds": [1] * 3},
        ),
        (ValueError, "`speeds[1]` is 0. Pass a number above 0.", {"speeds": [1, 0]}),
        (ValueError, "`speeds[0]` is -1. Pass a finite", {"speeds": [-1, 0]}),
        (TypeError, "`speeds` is 2, of type int. Pass one number per stage.", {"speeds": 2}),
        (TypeError, "`speeds[1]` is '1', of type str. Pass a real number.", {"speeds": [1, "1"]}),
        (ValueError, "`boundary_costs` has 1 number for 4 layers.", {"boundary_costs": [1]}),
        (ValueError, "`boundary_costs[3]` is nan.", {"boundary_costs": [1, 1, 1, float("nan")]}),
        (
            ValueError,
            "`cuts` has 4, for 4 layers. Pass indices of layers behind the first, up to 3.",
            {"cuts": [4]},
        ),
        (ValueError, "`cuts` has 0, for 4 layers.", {"cuts": [0]}),
        (TypeError, "`cuts` has 1.0, of type float. Pass indices of layers.", {"cuts": [1.0]}),
        (TypeError, "`cuts` is 1, of type int. Pass indices of layers.", {"cuts": 1}),
        (
            ValueError,
            "`memory_bytes` is given, `memory_limit_bytes` is not. Pass both or neither.",
            {"memory_bytes": [1] * 4},
        ),
        (
            ValueError,
            "`memory_limit_bytes` is given, `memory_bytes` is not.",
            {"memory_limit_bytes": 1},
        ),
        (
            ValueError,
            "`memory_bytes` has 3 numbers for 4 layers.",
            {"memory_bytes": [1] * 3, "memory_limit_bytes": 5},
        ),
        (
            ValueError,
            "`memory_limit_bytes` has 3 numbers for 2 stages.",
            {"memory_bytes": [1] * 4, "memory_limit_bytes": [5] * 3},
        ),
        (
            ValueError,
            "`memory_limit_bytes` is -5. Pass a finite",
            {"memory_bytes": [1] * 4, "memory_limit_bytes": -5},
        ),
        (
            ValueError,
            "`memory_limit_bytes[1]` is inf.",
            {"memory_bytes": [1] * 4, "memory_limit_bytes": [5, float("inf")]},
        ),
        (
            TypeError,
            "`memory_limit_bytes` is '5', of type str.",
            {"memory_bytes": [1] * 4, "memory_limit_bytes": "5"},
        ),
    ],
)
def test_wrong_arguments_are_named_with_the_remedy(error, message, extras):
    with pytest.raises(error, match=re.escape(message)):
        balance_costs([1] * 4, 2, **extras)
