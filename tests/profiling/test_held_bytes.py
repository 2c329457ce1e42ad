"""What a profile predicts that stages hold is what they hold."""

import gc
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gpipe import GPipe
from gpipe.models import mlp, next_token_loss, transformer
from gpipe.profiling import profile_memory, profile_meta
from gpipe.schedule import one_f_one_b
from gpipe.schedule.passes import add_recompute
from gpipe.simulate import simulate
from tests.members import intra_op_threads
from tests.profiling.held_bytes import peak_bytes
from tests.profiling.members import Flat, Nested, Pops, Stashes

NUM_MICROBATCHES = 6
ROWS = 5  # of a micro-batch
PROFILED_ROWS = 12


@pytest.fixture(autouse=True)
def no_search_for_cycles() -> Iterator[None]:
    """What is only freed by Python's search for cycles lives for nobody knows how long."""
    gc.disable()
    with intra_op_threads(1):
        yield
    gc.enable()


def convolutions() -> nn.Sequential:
    def block(num_inputs: int, num_outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(num_inputs, num_outputs, 3, padding=1)
        return [convolution, nn.BatchNorm2d(num_outputs), nn.ReLU(inplace=True)]

    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(*block(3, 8), nn.MaxPool2d(2), *block(8, 16), nn.Dropout(0.2), *ends)


def digits(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(10, (NUM_MICROBATCHES * ROWS, *shape))


def numbers(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(NUM_MICROBATCHES * ROWS, *shape)


MODELS = {
    "mlp": (
        lambda: mlp([64, 128, 128, 128, 10], dropout=0.1),
        numbers(64),
        digits(),
        functional.cross_entropy,
    ),
    "convolutions": (convolutions, numbers(3, 16, 16), digits(), functional.cross_entropy),
    "transformer": (
        lambda: transformer(4, 32, 4, 50),
        digits(24),
        digits(24),
        next_token_loss,
    ),
    "transformer with dropout": (
        lambda: transformer(4, 32, 4, 50, dropout=0.1),
        digits(24),
        digits(24),
        next_token_loss,
    ),
}


def predicted(costs, balance: list[int], mode: str) -> list[float]:
    schedule = add_recompute(one_f_one_b(len(balance), NUM_MICROBATCHES), mode)
    return list(simulate(schedule, costs.stage_costs(balance, ROWS)).peak_bytes)


def measured(module, balance: list[int], mode: str, x, y, loss_fn) -> list[int]:
    model = GPipe(module, balance, NUM_MICROBATCHES, checkpoint=mode)
    return peak_bytes(model, partial(model.step, x, y, loss_fn), [y])


def even(num_layers: int, num_stages: int) -> list[int]:
    size, more = divmod(num_layers, num_stages)
    return [size + (stage < more) for stage in range(num_stages)]


@pytest.mark.parametrize("name", MODELS)
def test_whole_models(name):
    build, x, y, loss_fn = MODELS[name]
    module = build()
    costs = profile_memory(module, x[:PROFILED_ROWS], target=y[:PROFILED_ROWS], loss_fn=loss_fn)
    for num_stages, mode in [(2, "never"), (3, "except_last"), (4, "never"), (4, "always")]:
        balance = even(len(module), num_stages)
        found = measured(module, balance, mode, x, y, loss_fn)
        assert predicted(costs, balance, mode) == pytest.approx(found, rel=0.005)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_alone_tell_the_same(name):
    build, x, y, loss_fn = MODELS[name]
    module, options = build(), {"target": y[:PROFILED_ROWS], "loss_fn": loss_fn}
    from_run = profile_memory(module, x[:PROFILED_ROWS], **options)
    from_shapes = profile_meta(module, x[:PROFILED_ROWS], device="cpu", **options)
    assert from_shapes.memory == from_run.memory


class Sliced(nn.Module):
    """Gives a part of a larger storage."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([input, input * 2], 1)[:, 8:24]


class Checkpointed(nn.Module):
    """Recomputes its inside by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, input: Tensor) -> Tensor:
        return checkpoint(self.inside, input, use_reentrant=False)


class GivesItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return input, self.weight


class Product(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


class Expands(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input[:, :1].expand(-1, 16)


class Reshapes(nn.Module):
    """Copies an input that is expanded, and no other."""

    def forward(self, input: Tensor) -> Tensor:
        return input.reshape(-1).sin().reshape(-1, 16)


def linear() -> nn.Linear:
    return nn.Linear(16, 16)


LAYERS = {
    "skips": lambda: [linear(), Stashes(16), linear(), nn.Tanh(), Pops(), linear()],
    "skips at the start": lambda: [Stashes(16), nn.Tanh(), linear(), Pops(), linear(), linear()],
    "nested": lambda: [linear(), Nested(), Flat(), linear(), nn.Tanh(), linear()],
    "views": lambda: [
        linear(),
        nn.Unflatten(1, (4, 4)),
        nn.Flatten(),
        nn.Identity(),
        nn.Tanh(),
        nn.Identity(),
    ],
    "slices": lambda: [linear(), Sliced(), nn.Tanh(), Sliced(), nn.Tanh(), linear()],
    "in place": lambda: [
        linear(),
        nn.ReLU(inplace=True),
        linear(),
        nn.Identity(),
        nn.ReLU(inplace=True),
        linear(),
    ],
    "checkpoints": lambda: [linear(), *(Checkpointed() for _ in range(4)), linear()],
    "parameters at the boundary": lambda: [
        linear(),
        linear(),
        GivesItsWeight(),
        Product(),
        linear(),
        linear(),
    ],
    "frozen": lambda: [
        linear().requires_grad_(False),
        nn.Tanh(),
        linear().requires_grad_(False),
        linear(),
        nn.Tanh(),
        linear().requires_grad_(False),
    ],
    "expanded": lambda: [linear(), Expands(), Reshapes(), linear(), Expands(), Reshapes()],
    "parametrized": lambda: [
        nn.utils.parametrizations.weight_norm(linear()),
        nn.Tanh(),
        nn.utils.parametrizations.weight_norm(linear()),
        linear(),
        nn.Softmax(1),
        linear(),
    ],
}


@pytest.mark.parametrize("name", LAYERS)
def test_awkward_layers(name):
    x, y = numbers(16), numbers(16)
    module = nn.Sequential(*LAYERS[name]())
    options = {"target": y[:8], "loss_fn": functional.l1_loss}
    costs = profile_memory(module, x[:8], **options)
    for balance in ([3, 3], [2, 2, 2], [1, 1, 2, 1, 1]):
        for mode in ("never", "always"):
            found = measured(module, balance, mode, x, y, functional.l1_loss)
            assert predicted(costs, balance, mode) == pytest.approx(found, rel=0.005)


@pytest.mark.parametrize("name", LAYERS)
def test_shapes_alone_tell_the_same_of_awkward_layers(name):
    module = nn.Sequential(*LAYERS[name]())
    sample = torch.randn(8, 16)
    assert (
        profile_meta(module, sample, device="cpu").memory == profile_memory(module, sample).memory
    )
