"""Consecutive layers that live together on one device."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import Parameter

from gpipe.stage.alias import Aliases
from gpipe.stage.device import device_of
from gpipe.stage.habits import Habits
from gpipe.stage.placement import settle
from gpipe.stage.sharded import fully_sharded, reduce_next, sum_gradients
from gpipe.stage.skip_route import uses_skips

__all__ = ["Stage"]


class Stage:
    """Consecutive layers of the user's Sequential and the device that they live on.

    Args:
        index: Which stage of the pipeline this is, from 0.
        names: The names of the layers in the user's Sequential.
        layers: The layers themselves.
        first_layer: The index of the first of them in the user's Sequential.
        device: Where they compute; their parameters and buffers are moved there.
        settled: What has become of the parameters of earlier stages, which stay there.
    """

    def __init__(
        self,
        index: int,
        names: Sequence[str],
        layers: Sequence[nn.Module],
        first_layer: int,
        device: torch.device,
        settled: dict[Parameter, Parameter] | None = None,
    ) -> None:
        self.index = index
        self.names = tuple(names)
        self.layers = tuple(layers)
        self.first_layer = first_layer
        self.device = device
        self.runs_on = device_of(device)
        self.aliases = [Aliases(layer, self.runs_on) for layer in layers]
        self.uses_skips = uses_skips(layers)
        self._habits: dict[tuple[bool, ...], Habits] = {}
        settled = {} if settled is None else settled
        for layer in layers:
            settle(layer, device, settled)
        self._sharded = fully_sharded(layers)
        sum_gradients(layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.layers)

    def __repr__(self) -> str:
        return f"Stage({self.index}, {self.layer_range}, device='{self.device}')"

    def habits(self) -> Habits:
        """What is known of the layers in the mode, training or not, that they are in now."""
        mode = tuple([module.training for layer in self.layers for module in layer.modules()])
        return self._habits.setdefault(mode, Habits())

    def state_hash(self) -> int:
        """A number that changes when layers are frozen, cast, or put into another mode.

        Within this process only. Boundaries may look otherwise then.
        """
        modules = [module for layer in self.layers for module in layer.modules()]
        parameters = [each for layer in self.layers for each in layer.parameters()]
        modes = tuple([module.training for module in modules])
        return hash((modes, tuple([(each.requires_grad, each.dtype) for each in parameters])))

    def forget_habits(self) -> None:
        """Learn everything again."""
        self._habits.clear()

    @property
    def is_sharded(self) -> bool:
        """Whether the layers keep parameters in parts, and reduce gradients themselves."""
        return bool(self._sharded)

    def announce_backward(self, *, is_last: bool) -> None:
        """Let gradients be reduced once, in the last backward of a mini-batch."""
        reduce_next(self._sharded, reduces=is_last)

    @property
    def layer_range(self) -> str:
        """The layers in words: "layer 3" or "layers 3 to 5"."""
        last_layer = self.first_layer + len(self.layers) - 1
        if last_layer == self.first_layer:
            return self.layer_name(0)
        return f"layers {self.first_layer} to {last_layer}"

    def place(self, layers: str, microbatch: int, action: str) -> str:
        """Where something happened, for the note on an exception."""
        return f"gpipe: in stage {self.index}, {layers}, micro-batch {microbatch}, {action}"

    def layer_name(self, position: int) -> str:
        """One layer in words, by its position in the stage: "layer 3 ('3', Linear)"."""
        kind = type(self.layers[position]).__name__
        return f"layer {self.first_layer + position} ('{self.names[position]}', {kind})"
