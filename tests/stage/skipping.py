"""Layers with skips, right and wrong."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.stage.skip import Namespace, SkipKey, pop, skippable, stash

EARLY, LATE = SkipKey(None, "early"), SkipKey(None, "late")

__all__ = [
    "Down",
    "Fails",
    "PopTwo",
    "StashTwo",
    "Undecorated",
    "Up",
    "by_hand",
    "isolated",
    "layer",
    "rows",
]


@skippable(stash=["early"])
class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Any:
        yield stash("early", input * 2)
        return self.linear(input)


@skippable(pop=["early"])
class Up(nn.Module):
    def forward(self, input: Tensor) -> Any:
        early = yield pop("early")
        return input if early is None else input + early


@skippable(stash=["a", "b"])
class StashTwo(nn.Module):
    def forward(self, input: Tensor) -> Any:
        yield stash("a", input + 1)
        yield stash("b", input + 10)
        return input


@skippable(pop=["a", "b"])
class PopTwo(nn.Module):
    def forward(self, input: Tensor) -> Any:
        return (yield pop("b")) - (yield pop("a"))


class Undecorated(nn.Module):
    def forward(self, input: Tensor) -> Any:
        yield stash("early", input)
        return input


class Fails(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        raise ArithmeticError


def rows() -> Tensor:
    return torch.arange(8.0).reshape(2, 4)


def layer(forward: Callable[[Tensor], Any], **names: list[str]) -> nn.Module:
    """One layer of a new skippable class."""
    cls = type("Some", (nn.Module,), {"forward": lambda self, input: forward(input)})
    return skippable(**names)(cls)()


def isolated(*layers: Any) -> list[Any]:
    """The layers, in a namespace of their own."""
    namespace = Namespace()
    return [layer.isolate(namespace) for layer in layers]


def by_hand(down: Down, input: Tensor) -> Tensor:
    """What a Sequential of the layer, Tanh and Up computes."""
    return torch.tanh(down.linear(input)) + input * 2
