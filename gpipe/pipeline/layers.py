"""The layers of a model, as a Sequential shows them."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Self

import torch
from torch import Tensor, nn

__all__ = ["Layers"]


class Layers(nn.Module):
    """Children that are read like those of a Sequential, and stay on their devices.

    Attributes:
        devices: Those on which they are.
    """

    devices: list[torch.device]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._layers())

    def __getitem__(self, index: int | slice) -> nn.Module:
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self.named_children())[index]))
        return self._layers()[index]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to()`, `half()` and the like do to all tensors; where these live does not change.

        Raises:
            ValueError: It would move a stage away from its device.
        """
        for device in dict.fromkeys(self.devices):
            if fn(torch.empty(0, device=device)).device != device:
                raise ValueError(
                    f"The stages of this GPipe live on {', '.join(map(str, self.devices))}, and "
                    "its parameters cannot be moved away from there. Choose `devices` when you "
                    "make it; its state_dict() can be loaded anywhere."
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _layers(self) -> list[nn.Module]:
        return list(self.children())
