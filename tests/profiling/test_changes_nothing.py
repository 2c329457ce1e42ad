"""Law 14: profiling changes nothing."""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe.profiling import profile_memory
from gpipe.profiling.subject import Subject
from tests.profiling.members import (
    Fails,
    Restless,
    over_all_ways,
    quick_profile,
    quiet_profile_meta,
    restless_model,
)

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
        (quiet_profile_meta, False),
        (quiet_profile_meta, True),
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


class RestlessLoss(nn.Module):
    """A loss with a norm, weights and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.restless = nn.BatchNorm1d(6), Restless(6)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.restless(self.norm(output)) - target).square().mean()


LOSSES = {
    "module": lambda loss: loss,
    "partial": lambda loss: partial(loss),
    "method": lambda loss: loss.forward,
    "closure": lambda loss: lambda output, target: loss(output, target),
    "default": lambda loss: lambda output, target, *, own=loss: own(output, target),
    "nested": lambda loss: partial(
        lambda output, target, nested: nested(output, target), nested=loss
    ),
}


@over_all_ways
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_does_not_change(measure, name):
    loss, module, sample = RestlessLoss(), nn.Sequential(nn.Linear(6, 6)), torch.rand(8, 6)
    with_gradients(loss)
    before = State(loss)
    measure(module, sample, target=sample, loss_fn=LOSSES[name](loss))
    before.require_same(State(loss))


class Task(nn.Module):
    """Holds the model and its loss, as frameworks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.own = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), RestlessLoss()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.own(output, target)


@over_all_ways
def test_a_module_that_holds_model_and_loss_does_not_change(measure):
    task, sample = Task(), torch.rand(8, 6)
    before = State(task)
    subject = Subject(task.model, sample, sample, task.loss)
    assert subject.modules(0) == [task.model[0]]
    assert subject.modules(1) == [task.model[1], task.own]
    measure(task.model, sample, target=sample, loss_fn=task.loss)
    before.require_same(State(task))


class Draws(nn.Module):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(1)
        self.listed = [torch.Generator().manual_seed(2)]
        self.of_numpy, self.of_python = np.random.default_rng(3), random.Random(4)
        self.of_old_numpy = np.random.RandomState(5)

    def forward(self, input: Tensor) -> Tensor:
        for generator in (self.own, *self.listed):
            input = input * torch.rand(input.shape, generator=generator)
        more = self.of_numpy.random() + self.of_python.random() + self.of_old_numpy.rand()
        return input * more

    def states(self) -> list:
        return [
            *(generator.get_state().tolist() for generator in (self.own, *self.listed)),
            self.of_numpy.bit_generator.state,
            self.of_python.getstate(),
            list(map(str, self.of_old_numpy.get_state())),
        ]


@over_all_ways
def test_generators_of_a_layer_stay(measure):
    module = nn.Sequential(nn.Linear(6, 6), Draws(), nn.Sequential(Draws()))
    before = [module[1].states(), module[2][0].states()]
    measure(module, torch.rand(8, 6))
    assert [module[1].states(), module[2][0].states()] == before


class Reentrant(nn.Module):
    """Recomputes its inside by itself, in the older of torch's two ways."""

    def __init__(self, more: nn.Parameter | None = None) -> None:
        super().__init__()
        self.inside, self.more = nn.Linear(6, 6), (more,)

    def forward(self, input: Tensor) -> Tensor:
        return checkpoint(self.through, input, use_reentrant=True)

    def through(self, input: Tensor) -> Tensor:
        output = self.inside(input).tanh()
        return output if self.more[0] is None else output * self.more[0]


@over_all_ways
def test_a_reentrant_checkpoint_is_differentiated(measure):
    module = nn.Sequential(nn.Linear(6, 6), Reentrant(), nn.Linear(6, 6))
    sample = torch.rand(8, 6)
    with_gradients(module)
    before = State(module)
    costs = measure(module, sample)
    before.require_same(State(module))
    if measure is quick_profile:
        assert costs.backward_s[1] > 0
    if measure is quiet_profile_meta:
        # Its forward is there twice in its backward.
        assert costs.backward_flops_per_row[1] == 3 * costs.forward_flops_per_row[1]


@over_all_ways
def test_gradients_do_not_reach_what_a_layer_keeps_somewhere_else(measure):
    first = nn.Linear(6, 6)
    module = nn.Sequential(first, Reentrant(first.bias))
    gradient = first.bias.grad = torch.ones(6)
    measure(module, torch.rand(8, 6))
    assert first.bias.grad is gradient
    assert torch.equal(gradient, torch.ones(6))
