"""Law 14: profiling changes nothing."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from gpipe.profiling import profile_memory, profile_meta
from tests.profiling.members import Fails, over_all_ways, quick_profile, restless_model

TOKENS = torch.arange(16) % 10


def with_gradients(module: nn.Sequential) -> nn.Sequential:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.rand_like(parameter)
    return module


class State:
    """All that a profile must leave alone, as it is now."""

    def __init__(self, module: nn.Sequential) -> None:
        self.tensors = [*module.parameters(), *module.buffers()]
        self.names = list(module.state_dict())
        self.bits = [tensor.detach().clone() for tensor in self.tensors]
        self.versions = [tensor._version for tensor in self.tensors]
        self.gradients = [parameter.grad for parameter in module.parameters()]
        self.gradient_bits = copy.deepcopy(self.gradients)
        self.attributes = [
            {name: copy.copy(value) for name, value in vars(each).items()}
            for each in module.modules()
        ]
        self.threads = torch.get_num_threads()
        self.generators = (torch.get_rng_state(), random.getstate(), np.random.get_state())

    def require_same(self, other: "State") -> None:
        assert self.names == other.names
        assert list(map(id, self.tensors)) == list(map(id, other.tensors))
        assert same_bits(self.bits, other.bits)
        assert self.versions == other.versions
        assert list(map(id, self.gradients)) == list(map(id, other.gradients))
        assert same_bits(self.gradient_bits, other.gradient_bits)
        for mine, theirs in zip(self.attributes, other.attributes, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(mine[name] is theirs[name] or mine[name] == theirs[name] for name in mine)
        assert self.threads == other.threads
        (mine, python, (_, *numpy)), (theirs, *others) = self.generators, other.generators
        assert torch.equal(mine, theirs)
        assert python == others[0]
        assert all(map(np.array_equal, numpy, others[1][1:]))


def same_bits(mine: list, theirs: list) -> bool:
    return all(
        a is b is None or (a.dtype == b.dtype and torch.equal(a, b))
        for a, b in zip(mine, theirs, strict=True)
    )


@over_all_ways
@pytest.mark.parametrize("trains", [True, False])
def test_nothing_changes(measure, trains):
    module = with_gradients(restless_model().train(trains))
    before = State(module)
    measure(module, TOKENS)
    before.require_same(State(module))


@pytest.mark.parametrize(
    ("measure", "in_backward"),
    [
        (quick_profile, False),
        (quick_profile, True),
        (profile_memory, False),
        (profile_meta, False),
        (profile_meta, True),
    ],
)
def test_nothing_changes_when_a_layer_raises(measure, in_backward):
    module = with_gradients(restless_model())
    module.append(Fails(in_backward)).append(nn.Linear(3, 2))
    before = State(module)
    with pytest.raises(KeyError, match="mine") as caught:
        measure(module, TOKENS)
    index = len(module) - 2
    note = f"gpipe: in layer {index} ('{index}', Fails), while it was profiled"
    assert note in caught.value.__notes__
    before.require_same(State(module))


def test_a_profile_is_one_of_the_weights_that_are_there():
    # The restless layer doubles as a check that it did run, on copies.
    module = restless_model()
    seen = []
    module[5].register_forward_hook(lambda layer, *_: seen.append(layer.weight))
    before = module[5].weight
    assert quick_profile(module, TOKENS).rows == 16
    assert len(seen) >= 4
    assert module[5].weight is before
    assert all(weight is not before for weight in seen)
    assert all(type(weight) is nn.Parameter for weight in seen)


@over_all_ways
def test_hooks_of_parameters_are_not_called_and_nothing_is_left_behind(measure):
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    called = []
    for parameter in module.parameters():
        parameter.register_hook(called.append)
        parameter.register_post_accumulate_grad_hook(called.append)
    sample = torch.rand(4, 6, requires_grad=True)
    measure(module, sample)
    assert not called
    assert sample.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())


@over_all_ways
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_grad_mode_does_not_matter(measure, mode):
    module, sample = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), torch.rand(4, 6)
    expected = measure(module, sample).memory
    with mode():
        assert measure(module, sample).memory == expected
        assert measure(module, sample * 1).memory == expected
    assert expected.saved_bytes_per_row == (24, 24)
