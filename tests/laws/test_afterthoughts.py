"""What users do between and around the parts of a mini-batch."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gpipe import GPipe, pop, skippable, stash
from tests.members import CHECKPOINT_MODES, mlp, over_all_ways, take_gradients, train_once


# A parameter without gradient in one use of the pipeline may have one in another.
@pytest.mark.parametrize("uses", ["two outputs", "outside"])
def test_hooks_fire_where_another_use_brings_a_gradient(uses):
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight if x[0, 0] > 0 else x * 1

    def fired(model: nn.Module, weight: Parameter) -> list[str]:
        seen: list[str] = []
        weight.register_hook(lambda gradient: seen.append(f"hook {gradient.item():g}"))
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"after {p.grad:g}"))
        unused = model(-torch.ones(2, 1, requires_grad=True)).sum()
        other = model(torch.ones(2, 1)).sum() if uses == "two outputs" else weight * 3
        (unused + other).backward()
        return seen

    layer, plain = Sometimes(), Sometimes()
    model = GPipe(nn.Sequential(layer), [1], chunks=2)
    assert fired(model, layer.weight) == fired(nn.Sequential(plain), plain.weight)


@pytest.mark.parametrize("num_before", [0, 1, 2, 5])
def test_an_input_that_was_overwritten_meanwhile_is_refused(num_before):
    model = GPipe(mlp().double(), 2, chunks=2, checkpoint="always")
    x = torch.randn(4, 6, dtype=torch.float64)
    for _ in range(num_before):
        model(x).sum().backward()
    model.zero_grad()
    output = model(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="written to in place between the forward and its"):
        output.sum().backward()


def test_data_that_was_replaced_meanwhile_is_refused():
    model = GPipe(mlp(), 2, chunks=2, checkpoint="never")
    output = model(torch.randn(4, 6))
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(RuntimeError, match=r"data of 0\.weight was replaced between"):
        output.sum().backward()


@over_all_ways
def test_targets_that_are_all_ignored_give_no_gradient(face, schedule, checkpoint):
    model = GPipe(mlp(), 2, chunks=2, schedule=schedule, checkpoint=checkpoint)
    loss = train_once(model, face, torch.randn(4, 6), torch.full((4,), -100), nn.CrossEntropyLoss())
    assert loss.isnan()
    assert all(gradient.eq(0).all() for gradient in take_gradients(model).values())


class Add(nn.Module):
    """Both inputs get the very same gradient tensor."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_gradient_with_two_owners_is_scaled_once(chunks):
    model = GPipe(nn.Sequential(Add(), nn.Linear(6, 3)), [1, 1], chunks=chunks)
    y = torch.tensor([0, 1, -100, 2])
    for _ in range(3):
        pair = (torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True))
        model.step(pair, y, nn.CrossEntropyLoss())
        mine = [tensor.grad for tensor in pair]
        plain = torch.autograd.grad(nn.CrossEntropyLoss()(model[1](pair[0] + pair[1]), y), pair)
        torch.testing.assert_close(mine, list(plain))


class LearntLoss(nn.Module):
    """A loss that trains a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (self.weight * (output - target).square()).sum(), 3 * len(output)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_loss_may_have_parameters_of_its_own(checkpoint):
    loss_fn, x, y = LearntLoss(), torch.randn(5, 6), torch.randn(5, 6)
    module = mlp()
    total, weight = loss_fn(module(x), y)
    (total / weight).backward()
    plain, of_loss = take_gradients(module), take_gradients(loss_fn)
    fired: list[str] = []
    loss_fn.weight.register_hook(lambda _: fired.append("hook"))

    model = GPipe(module, 3, chunks=3, checkpoint=checkpoint)
    model.step(x, y, loss_fn, loss_reduction="weighted")
    assert fired == ["hook"]
    torch.testing.assert_close(take_gradients(model), plain)
    torch.testing.assert_close(take_gradients(loss_fn), of_loss)


def test_a_layer_may_be_exchanged():
    model = GPipe(mlp(), 3, chunks=2)
    model(torch.randn(4, 6)).sum().backward()
    model.zero_grad()
    model._modules["2"] = nn.Linear(6, 6, bias=False)
    model(torch.randn(4, 6)).sum().backward()
    assert model[2].weight.grad is not None


def test_create_graph_is_refused_and_a_plain_backward_still_works():
    model = GPipe(mlp(), 2, chunks=2)
    loss = model(torch.randn(4, 6)).sum()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss.backward(create_graph=True)
    model(torch.randn(4, 6)).sum().backward()


@skippable(stash=["a", "b"])
class Stashes(nn.Module):
    def forward(self, x: Tensor):
        yield stash("a", x)
        yield stash("b", x)
        return x


@skippable(pop=["a", "b"])
class Pops(nn.Module):
    def forward(self, x: Tensor):
        a = yield pop("a")
        b = yield pop("b")
        return x * 0.1 + a * 0.7 + b * 0.3


def test_one_tensor_stashed_twice_has_the_same_bits_for_every_cut():
    def gradient(balance: list[int]) -> Tensor:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 6), Stashes(), nn.Tanh(), Pops())
        model = GPipe(layers, balance, chunks=2)
        model.step(torch.ones(4, 6), torch.zeros(4, 6), nn.MSELoss())
        return model[0].weight.grad

    first, *others = [gradient(balance) for balance in ([4], [1, 3], [2, 2], [3, 1], [2, 1, 1])]
    assert all(torch.equal(first, other) for other in others)


class Special(Parameter):
    """A parameter with a method."""

    def doubled(self) -> Tensor:
        return self * 2


def test_a_parameter_of_a_class_of_its_own_keeps_its_methods():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Special(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.doubled()

    layer = Layer()
    GPipe(nn.Sequential(layer), [1], chunks=2)(torch.ones(2, 1)).sum().backward()
    assert layer.weight.grad == 4


def test_small_kindnesses():
    x = torch.randn(4, 6)
    assert GPipe(mlp(), np.int64(2), chunks=np.int64(2), split=None)(x).shape == (4, 6)
    assert GPipe(mlp(), list(np.array([3, 4])), chunks=2).balance == [3, 4]
    loss_fn = nn.KLDivLoss(reduction="batchmean")
    module, target = nn.Sequential(nn.Linear(6, 6), nn.LogSoftmax(1)), torch.rand(4, 6)
    loss = GPipe(module, 2, chunks=3).step(x, target, loss_fn).loss
    torch.testing.assert_close(loss, loss_fn(module(x), target).detach())

    class Named(nn.Sequential):
        chunks = 7

        def __init__(self, *layers: nn.Module) -> None:
            super().__init__(*layers)
            self.checkpoint = "mine"

    model = GPipe(Named(*mlp(3)), 2, chunks=2)
    assert (model.chunks, model.checkpoint) == (2, "except_last")
