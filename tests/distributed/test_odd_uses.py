"""Uses of a mesh that went wrong once, each without a word."""

import pytest
import torch
from torch import nn

from tests.distributed import odd_calls
from tests.distributed.four_ranks import four_ranks
from tests.distributed.odd_calls import Beside, rows_of, three_layers
from tests.distributed.team import Team

pytestmark = pytest.mark.distributed


@pytest.fixture
def team(request) -> Team:
    return four_ranks(request)


def assert_same(every, module):
    for found in every:
        for name, gradient in found.items():
            expected = module.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_a_replica_without_valid_targets_has_the_loss_and_the_gradients_of_all(team):
    module = three_layers()
    target = torch.tensor([0, 1, 2, 1, *[-100] * 4])
    loss = nn.functional.cross_entropy(module(torch.cat([rows_of(0), rows_of(1)])), target)
    loss.backward()
    every = team.call(odd_calls.without_valid_targets)
    assert [found for found, _ in every] == pytest.approx([loss.item()] * 4, rel=1e-12)
    assert_same((gradients for _, gradients in every), module)


@pytest.mark.parametrize("tied", [False, True], ids=["replicas", "tied"])
def test_copies_that_begin_unlike_are_refused(team, tied):
    every = team.call(odd_calls.made_unlike, tied)
    assert all("Call torch.manual_seed with one seed on all ranks" in told for told in every), every


@pytest.mark.parametrize("tied", [False, True], ids=["its own", "tied"])
def test_a_loss_may_use_a_weight_of_the_last_stage(team, tied):
    module = three_layers()
    if tied:  # once only what layers gave was summed over workers, and the loss's part was lost
        module[3].weight = module[0].weight
    loss_fn = Beside(module[3].weight)
    loss_fn(module(rows_of()), rows_of(1)).backward()
    expected = {name: each.grad for name, each in module.named_parameters(remove_duplicate=False)}
    for found in team.call(odd_calls.beside_the_loss, tied):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


def test_the_first_forward_does_not_wait_for_the_other_workers(team):
    loss = nn.functional.mse_loss(three_layers()(rows_of()), rows_of(1)).item()
    assert team.call(odd_calls.begun_before_the_others) == pytest.approx([loss] * 4, rel=1e-12)


def test_a_dimension_over_which_nothing_is_spread_is_refused(team):
    for told in team.call(odd_calls.on_a_dimension_without_use):
        assert told.startswith("The mesh has the dimension 'dp', over which nothing is spread.")


def test_a_loss_needs_no_target(team):
    expected = three_layers()(rows_of()).square().mean().item()
    assert team.call(odd_calls.without_a_target) == pytest.approx([expected] * 4)


def test_the_default_device_does_not_matter(team):
    expected = nn.functional.mse_loss(three_layers()(rows_of()), rows_of()).item()
    assert team.call(odd_calls.under_another_default_device) == pytest.approx([expected] * 4)


def test_parallelize_may_put_another_layer_in_the_place_of_one(team):
    expected = nn.functional.mse_loss(three_layers()(rows_of()), rows_of(1)).item()
    assert team.call(odd_calls.with_wrapped_layers) == pytest.approx([expected] * 4)


def test_a_shared_parameter_lives_only_where_it_is_used(team):
    assert team.call(odd_calls.kept_alive) == [True, False, False, True]


def test_a_model_made_in_inference_mode_can_be_used_outside(team):
    # The memory in which workers hear each other was made there, and written into outside.
    (first, *others), *every = team.call(odd_calls.made_in_inference_mode)
    assert others == [first, first]
    assert every == [[first] * 3] * 3


@pytest.mark.parametrize(
    ("beside", "num_kept"),
    [("short", 2), ("long " * 10_000, 0), (float("nan"), 0)],
    ids=["short", "long", "unlike itself"],
)
def test_what_is_long_or_cannot_be_compared_is_told_anew_each_time(team, beside, num_kept):
    # It was kept 128 times, and a NaN was another one in the next mini-batch.
    every = team.call(odd_calls.told_beside, beside)
    assert len({loss for losses, _ in every for loss in losses}) == 1
    # Of two micro-batches the other ways keep theirs: a gradient, and two to the next stage.
    assert [kept for _, kept in every[:2]] == [2 + num_kept, 6 + num_kept]
