"""Layers with a skip and with a tie, for models over several devices."""

from collections.abc import Iterator

from torch import Tensor, nn

from gpipe import pop, skippable, stash

__all__ = ["Head", "Pop", "Stash"]


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Doubles, and keeps three times what it was given."""

    def forward(self, x: Tensor) -> Iterator[object]:
        """Stashes, then returns."""
        yield stash("skip", x * 3)
        return x * 2


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Adds what was kept."""

    def forward(self, x: Tensor) -> Iterator[object]:
        """Pops, then returns."""
        skip = yield pop("skip")
        return x + skip


class Head(nn.Module):
    """Maps back by a weight that is another layer's, too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """A product."""
        return x @ self.weight
