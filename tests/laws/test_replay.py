"""Law 4: a recompute that does not repeat its forward is an error that names the layer."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.errors import GpipeError
from tests.laws.drawing import Call, Scale, over_faces, train


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)


class Cache(nn.Module):
    """Gives what it has computed before, once it has."""

    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.cached: Tensor | None = None
        self.grows = grows

    def forward(self, x: Tensor) -> Tensor:
        if self.cached is None:
            self.cached = x.detach()[:1]
            return x
        if self.grows:
            self.cached = torch.cat([self.cached, x.detach()[:1]])
            return torch.cat([x, self.cached])
        return x + self.cached


def own_generator() -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda x: x * torch.rand(8, generator=generator)


def numpy_generator() -> Callable[[Tensor], Tensor]:
    generator = np.random.default_rng(0)
    return lambda x: x * generator.random()


UNREPLAYABLE: dict[str, Callable[[], nn.Module]] = {
    "NumPy": lambda: Call(lambda x: x * np.random.rand()),
    "a generator of NumPy": lambda: Call(numpy_generator()),
    "random": lambda: Call(lambda x: x * random.random()),
    "a generator of its own": lambda: Call(own_generator()),
    "a cache": lambda: Cache(grows=False),
    "a cache that grows": lambda: Cache(grows=True),
}


# Peers compute the gradients of another forward than the one whose loss they show. It is the layer
# that is named, not the next one that cannot cope with what it is given.
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("name", UNREPLAYABLE)
@over_faces
def test_what_cannot_be_replayed_is_named(face, schedule, name, num_stages):
    layers = [Scale(), UNREPLAYABLE[name](), Scale(), nn.Tanh()]
    module = nn.Sequential(*layers)
    model = GPipe(module, num_stages, 2, schedule=schedule, checkpoint="always")
    for parameter in model.parameters():
        parameter.grad = torch.tensor(7.0)
    kind = type(layers[1]).__name__
    with pytest.raises((RuntimeError, GpipeError), match=rf"layer 1 \('1', {kind}\)"):
        train(model, face, torch.ones(4, 8))
    assert [parameter.grad.item() for parameter in model.parameters()] == [7.0, 7.0]


# The mistake is the layer's: when it is mended, the same model goes on.
@over_faces
def test_the_next_mini_batch_works(face, schedule):
    layers = [Scale(), Call(own_generator()), Scale()]
    model = GPipe(nn.Sequential(*layers), 3, 2, schedule=schedule, checkpoint="always")
    with pytest.raises((RuntimeError, GpipeError), match=r"layer 1 \('1', Call\)"):
        train(model, face, torch.ones(4, 8))
    layers[1].function = torch.tanh
    output, *gradients = train(model, face, torch.ones(4, 8))
    plain = nn.Sequential(*layers)(torch.ones(4, 8))
    plain.square().sum().backward()
    torch.testing.assert_close(output, plain.detach())
    for gradient, layer in zip(gradients[1:], (layers[0], layers[2]), strict=True):
        torch.testing.assert_close(gradient, layer.weight.grad)


# NaN is not equal to itself, and yet the same layer gives it twice.
@over_faces
def test_what_is_replayed_is_no_mistake_whatever_it_is(face, schedule):
    def odd(x: Tensor) -> Tensor:
        return torch.cat([x * torch.nan, x * torch.inf, -0.0 * x, x[:, :0], x], dim=1)

    module = nn.Sequential(Scale(), Call(odd), Call(lambda x: x[:, -8:]), Scale())
    model = GPipe(module, 3, 2, schedule=schedule, checkpoint="always")
    for _ in range(3):
        output, *_ = train(model, face, torch.ones(4, 8))
        assert torch.equal(output, torch.full((4, 8), 2.25))
