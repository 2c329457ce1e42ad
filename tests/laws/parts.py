"""Parts that a model may be made of."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gpipe import Namespace, pop, skippable, stash

NUM_CHANNELS, WIDTH = 2, 4  # every layer maps (rows, channels, width) to the same


class Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class Across(nn.Linear):
    """Mixes channels; its output and the gradient of its input lie transposed in memory."""

    def __init__(self) -> None:
        super().__init__(NUM_CHANNELS, NUM_CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class Scale(nn.Module):
    """Has one number, whose gradient is a sum over all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Fork(nn.Linear):
    """Sends a nested value, with tensors that need no gradient and things that are no tensors."""

    def __init__(self, kind: type) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        values = (super().forward(x), x > 0, None, {"x": x, "power": 2})
        return dict(enumerate(values)) if self.kind is dict else values


class Join(nn.Module):
    def forward(self, values: Any) -> Tensor:
        y, mask, _, more = values[0], values[1], values[2], values[3]
        return torch.where(mask, y, more["x"]) - y.abs() ** more["power"] / 4


class Recurrent(nn.GRU):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class CountsRows(nn.Module):
    """Has a buffer whose end does not depend on how the rows were cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        return x


class NestedCheckpoint(nn.Module):
    """Recomputes by itself, with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


@skippable(stash=["skip"])
class Leave(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Any]:
        yield stash("skip", x * 2)
        return x


@skippable(pop=["skip"])
class Meet(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Any]:
        return x + torch.sin((yield pop("skip")))


def tied() -> list[nn.Module]:
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    return [first, nn.Tanh(), last]


def skipping() -> list[nn.Module]:
    namespace = Namespace()
    ends = Leave(), Meet()
    for layer in ends:
        layer.isolate(namespace)
    return [ends[0], nn.Linear(WIDTH, WIDTH), ends[1]]


PARTS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [nn.Linear(WIDTH, WIDTH)],
    "frozen": lambda: [nn.Linear(WIDTH, WIDTH).requires_grad_(False)],
    "across": lambda: [Across()],
    "scale": lambda: [Scale()],
    "conv": lambda: [nn.Conv1d(NUM_CHANNELS, NUM_CHANNELS, 3, padding=1)],
    "layer norm": lambda: [nn.LayerNorm(WIDTH)],
    "tanh": lambda: [nn.Tanh()],
    "in place": lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)],
    "residual": lambda: [Residual(WIDTH, WIDTH)],
    "tuple": lambda: [Fork(tuple), nn.Identity(), Join()],
    "dict": lambda: [Fork(dict), Join()],
    "tied": tied,
    "gru": lambda: [Recurrent()],
    "counter": lambda: [CountsRows()],
    "skip": skipping,
    "dropout": lambda: [nn.Dropout(0.3)],
    "dropout of nothing": lambda: [nn.Dropout(0.0)],
    "nested checkpoint": lambda: [NestedCheckpoint()],
    "batch norm": lambda: [nn.BatchNorm1d(NUM_CHANNELS)],
}
DRAWING = {"dropout", "nested checkpoint"}
