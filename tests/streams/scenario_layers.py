"""What the layers of scenarios do that layers may do."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.streams.caller import follow, on
from tests.streams.fakes import FakeStream

__all__ = ["Doubling", "Failing", "First", "Masks", "Moves"]

WIDTH = 4


class Doubling(torch.autograd.Function):
    """Twice its input; its backward runs on the streams of its forward, as on accelerators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, current: list[FakeStream]) -> Tensor:
        """Under these streams."""
        ctx.streams = current
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Under the same."""
        follow(ctx.streams, [stream.device.current_stream() for stream in ctx.streams])
        with on(ctx.streams):
            return gradient * 2, None


class Masks(nn.Module):
    """Passes a mask on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A product, and the mask."""
        x, mask = both
        return self.linear(x) * mask, mask


class First(nn.Module):
    """The first of two."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        """Without the mask."""
        return both[0]


class Moving(torch.autograd.Function):
    """A copy on another device; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: str) -> Tensor:
        """There."""
        ctx.device = x.device
        return x.detach().to(device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Back."""
        return gradient.to(ctx.device), None


class Moves(nn.Module):
    """Puts what it computes on another device by itself."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        """A product, elsewhere."""
        return Moving.apply(self.linear(x), self.device)


class Failing(nn.Module):
    """Raises when it is told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        """The same, or an error."""
        if self.fails:
            raise ValueError("told to")
        return x.clone()
