"""What a stage holds as long as a model is trained."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.nn import functional

from gpipe import GPipe
from gpipe.costs import SharedParameter
from gpipe.plan import plan
from gpipe.profiling import profile_memory
from gpipe.stage.alias import Aliases
from tests.plan.members import layer_costs
from tests.profiling.test_ties import tied


def planned(costs, balance, **options):
    made = plan(costs, balance, rows=8, chunks=4, optimizer_bytes_per_gradient_byte=2.0, **options)
    return made.memory


def shared(*layers: int):
    """Layers of 100 bytes, of which 30 are one parameter."""
    costs = layer_costs(parameter_bytes=[100.0] * 4)
    return replace(costs, shared=[SharedParameter(layers, 30, 30)])


def test_cast_copies_are_counted_among_the_weights():
    costs = replace(layer_costs(parameter_bytes=[100.0] * 4), cast_bytes=(50, 0, 20, 5))
    assert [each.weights_bytes for each in planned(costs, [2, 2])] == [250, 225]


def test_a_stage_has_a_shared_parameter_and_its_state_once():
    first, second = planned(shared(0, 1), [2, 2])
    assert (first.weights_bytes, first.optimizer_bytes) == (170, 340)
    assert (second.weights_bytes, second.optimizer_bytes) == (200, 400)


def test_each_layer_gathers_a_gradient_of_its_own():
    first, _ = planned(shared(0, 1), [2, 2])
    assert first.gradients_bytes == 200
    first, _ = planned(shared(0, 1), [2, 2], accumulates=True)
    assert first.gradients_bytes == 200 + 170


def test_another_device_has_a_copy_and_no_state_of_the_optimizer():
    memory = planned(shared(0, 2, 3), [2, 2], accumulates=True)
    assert [each.weights_bytes for each in memory] == [200, 170]
    assert [each.optimizer_bytes for each in memory] == [400, 2 * 140]
    assert [each.gradients_bytes for each in memory] == [400, 200 + 140]


def test_two_stages_on_one_device_have_one_between_them():
    costs = shared(0, 2)
    memory = planned(costs, [1, 1, 1, 1], schedule="interleaved_1f1b", num_workers=2)
    assert [each.weights_bytes for each in memory] == [100, 100, 70, 100]
    memory = planned(shared(1, 2, 3), [1, 1, 1, 1], schedule="interleaved_1f1b", num_workers=2)
    assert [each.weights_bytes for each in memory] == [100, 100, 100, 70]
    assert [each.optimizer_bytes for each in memory] == [200, 200, 140, 140]


@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 3]])
def test_gradients_are_those_that_the_engine_gathers(balance):
    module, x = tied(), torch.rand(8, 4)
    expected = planned(profile_memory(module, x[:2]), balance)
    pipe = GPipe(module, balance, 4)
    found = []
    take = Aliases.take_gradients

    def seen(self: Aliases):
        if not found:  # all have gathered theirs when the first is taken
            found.extend(sum(map(gathered_bytes, stage.aliases)) for stage in pipe.stages)
        return take(self)

    with mock.patch.object(Aliases, "take_gradients", seen):
        pipe.step(x, x, functional.mse_loss)
    assert found == [each.gradients_bytes for each in expected]


def gathered_bytes(aliases: Aliases) -> int:
    gradients = [alias.grad for alias in aliases._aliases.values()]
    return sum(each.nbytes for each in gradients if each is not None)


def test_weights_are_those_that_a_stage_alone_would_have():
    module = tied()
    (memory,) = planned(profile_memory(module, torch.rand(4, 4)), [4])
    assert memory.weights_bytes == sum(each.nbytes for each in module.parameters())
