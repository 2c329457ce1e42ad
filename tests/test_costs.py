from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from gpipe.costs import StageCosts


def test_uniform_costs_are_the_same_everywhere():
    costs = StageCosts.uniform(3)
    assert costs.num_stages == 3
    assert costs.forward_s == costs.recompute_s == (1.0, 1.0, 1.0)
    assert costs.backward_s == (2.0, 2.0, 2.0)
    assert costs.boundary_bytes == costs.held_bytes == costs.input_bytes == (0, 0, 0)
    assert costs.bandwidth_bytes_per_s == costs.latency_s == (0, 0)


def test_uniform_takes_every_attribute():
    costs = StageCosts.uniform(3, 0.1, 0.2, recompute_s=0.3, held_bytes=7, latency_s=0.5)
    assert costs.recompute_s == (0.3, 0.3, 0.3)
    assert costs.held_bytes == (7, 7, 7)
    assert costs.latency_s == (0.5, 0.5)


def test_lists_become_tuples_and_the_value_is_frozen():
    costs = StageCosts(forward_s=[1, 2], backward_s=np.array([2.0, 4.0]), latency_s=[0.1])
    assert (costs.forward_s, costs.backward_s, costs.recompute_s) == ((1, 2), (2.0, 4.0), (1, 2))
    assert hash(costs) == hash(StageCosts(forward_s=[1, 2], backward_s=[2, 4], latency_s=[0.1]))
    with pytest.raises(FrozenInstanceError):
        costs.forward_s = (1.0,)


def test_a_transfer_takes_latency_and_bytes_over_bandwidth():
    costs = StageCosts(
        forward_s=[1, 1, 1],
        backward_s=[1, 1, 1],
        boundary_bytes=[100, 50, 7],
        bandwidth_bytes_per_s=[10, 0],
        latency_s=[0.5, 0.25],
    )
    assert costs.transfer_s(0, 1) == costs.transfer_s(1, 0) == 10.5
    assert costs.transfer_s(1, 2) == costs.transfer_s(2, 1) == 0.25  # no limit


def test_a_skip_travels_directly_as_fast_as_the_slowest_edge_between():
    costs = StageCosts(
        forward_s=[1, 1, 1],
        backward_s=[1, 1, 1],
        boundary_bytes=[100, 100, 100],
        bandwidth_bytes_per_s=[10, 20],
        latency_s=[0.5, 0.75],
        skip_bytes={(0, 2): 40, (0, 1): 10},
    )
    assert costs.transfer_s(0, 2) == costs.transfer_s(2, 0) == 4.75
    assert costs.transfer_s(0, 1) == 11.5  # with the boundary


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        ({"backward_s": [1]}, ValueError, r"`backward_s` has 1 numbers for 2 stages. Give one for"),
        ({"latency_s": [0, 0]}, ValueError, r"`latency_s` has 2 numbers for 1 edges. Give one"),
        ({"forward_s": [1, -1]}, ValueError, r"`forward_s\[1\]` is -1. Pass a finite number of"),
        ({"held_bytes": [0, float("nan")]}, ValueError, r"`held_bytes\[1\]` is nan. Pass a finite"),
        ({"forward_s": [1, float("inf")]}, ValueError, r"`forward_s\[1\]` is inf"),
        ({"forward_s": [1, "2"]}, TypeError, r"`forward_s\[1\]` is '2', of type str. Pass a real"),
        ({"forward_s": [1, True]}, TypeError, r"`forward_s\[1\]` is True, of type bool"),
        ({"forward_s": []}, ValueError, r"`num_stages` is 0. Pass a whole number"),
        ({"skip_bytes": {(1, 0): 3}}, ValueError, r"a skip from stage 1 to stage 0 of 2. Name a"),
        ({"skip_bytes": {(0, 1): -3}}, ValueError, r"`skip_bytes\[0, 1\]` is -3. Pass a finite"),
    ],
)
def test_refuses_what_costs_cannot_be(wrong, error, told):
    with pytest.raises(error, match=told):
        StageCosts(**{"forward_s": [1, 1], "backward_s": [2, 2]} | wrong)


def test_refuses_an_impossible_number_of_stages():
    with pytest.raises(ValueError, match="`num_stages` is 0"):
        StageCosts.uniform(0)
