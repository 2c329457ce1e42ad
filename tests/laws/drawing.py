"""Layers that draw random numbers, and how they are trained."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipe import GPipe
from tests.members import SCHEDULES

# `model(x)` is fill-drain whatever the schedule.
FACES_AND_SCHEDULES = [("backward", "fill_drain"), *(("step", name) for name in SCHEDULES)]
over_faces = pytest.mark.parametrize(("face", "schedule"), FACES_AND_SCHEDULES)

NUM_ROWS, CHUNKS = 8, 3


class Scale(nn.Module):
    """Something to train in front of and behind what draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Call(nn.Module):
    """Calls a function, or a layer in a way of its own."""

    def __init__(self, function: Callable[..., Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) if self.layer is None else self.function(self.layer, x)


def inner_checkpoint(use_reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda layer, x: torch_checkpoint(layer, x, use_reentrant=use_reentrant)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))


def by_row(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.vmap(function, randomness="different")


def attend(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, x, x)[0]


FLAT, IMAGE, VOLUME, SEQUENCE = (8,), (2, 4, 4), (2, 4, 4, 4), (3, 8)

# Every layer of torch.nn that draws, and other ways to draw: what an input row looks like, and how
# the layer is made.
DRAWING: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "Dropout": (FLAT, lambda: nn.Dropout(0.5)),
    "Dropout in place": (FLAT, lambda: nn.Dropout(0.5, inplace=True)),
    "Dropout1d": (SEQUENCE, lambda: nn.Dropout1d(0.5)),
    "Dropout2d": (IMAGE, lambda: nn.Dropout2d(0.5)),
    "Dropout3d": (VOLUME, lambda: nn.Dropout3d(0.5)),
    "AlphaDropout": (FLAT, lambda: nn.AlphaDropout(0.5)),
    "FeatureAlphaDropout": (IMAGE, lambda: nn.FeatureAlphaDropout(0.5)),
    "RReLU": (FLAT, nn.RReLU),
    "FractionalMaxPool2d": (IMAGE, lambda: nn.FractionalMaxPool2d(2, output_size=3)),
    "FractionalMaxPool3d": (VOLUME, lambda: nn.FractionalMaxPool3d(2, output_size=2)),
    "MultiheadAttention": (
        SEQUENCE,
        lambda: Call(attend, nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)),
    ),
    "TransformerEncoderLayer": (
        SEQUENCE,
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True),
    ),
    "TransformerDecoderLayer": (
        SEQUENCE,
        lambda: Call(
            lambda layer, x: layer(x, x),
            nn.TransformerDecoderLayer(8, 2, 16, dropout=0.3, batch_first=True),
        ),
    ),
    "GRU": (
        SEQUENCE,
        lambda: Call(lambda layer, x: layer(x)[0], nn.GRU(8, 8, 2, dropout=0.5, batch_first=True)),
    ),
    "LSTM": (
        SEQUENCE,
        lambda: Call(lambda layer, x: layer(x)[0], nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)),
    ),
    "gumbel_softmax": (FLAT, lambda: Call(functional.gumbel_softmax)),
    "scaled_dot_product_attention": (
        SEQUENCE,
        lambda: Call(lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.4)),
    ),
    "rand_like": (FLAT, lambda: Call(lambda x: x * torch.rand_like(x))),
    "normal_": (FLAT, lambda: Call(lambda x: x + torch.empty_like(x).normal_())),
    "bernoulli": (FLAT, lambda: Call(lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)))),
    "randperm": (FLAT, lambda: Call(lambda x: x[:, torch.randperm(x.shape[1])])),
    "multinomial": (FLAT, lambda: Call(lambda x: x.gather(1, x.exp().multinomial(8)))),
    "distribution": (
        FLAT,
        lambda: Call(lambda x: torch.distributions.Normal(x, x.exp()).rsample()),
    ),
    "checkpoint inside": (FLAT, lambda: Call(inner_checkpoint(False), dropping())),
    "reentrant checkpoint inside": (FLAT, lambda: Call(inner_checkpoint(True), dropping())),
    "vmap": (FLAT, lambda: Call(by_row(lambda row: row * torch.rand_like(row)))),
    "vmap of dropout": (FLAT, lambda: Call(by_row(lambda row: functional.dropout(row, 0.5)))),
}

Result = list[Tensor]


def square_sum(output: Tensor, _: object) -> Tensor:
    return output.square().sum()


def build(name: str, num_stages: int, checkpoint: str, schedule: str) -> GPipe:
    """Two layers that draw; the cut in three leaves one of them last in its stage, one first."""
    torch.manual_seed(0)
    _, make = DRAWING[name]
    module = nn.Sequential(Scale(), nn.SiLU(), make(), nn.Dropout(0.5), Scale())
    balance = {1: [5], 2: [2, 3], 3: [1, 2, 2]}[num_stages]
    return GPipe(module, balance, CHUNKS, checkpoint=checkpoint, schedule=schedule)


def inputs(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_ROWS, *DRAWING[name][0], generator=generator)


def train(model: GPipe, face: str, x: Tensor, seed: int | None = None) -> Result:
    """Output and gradients of one mini-batch, whose random numbers follow from the seed."""
    if seed is not None:
        torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    if face == "step":
        result = model.step(x, x.detach(), square_sum, loss_reduction="sum", return_output=True)
        output = result.output
    else:
        output = model(x)
        square_sum(output, None).backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return [output.detach(), *gradients]


def same(mine: Result, other: Result) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
