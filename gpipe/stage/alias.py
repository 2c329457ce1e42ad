"""A layer's own leaves on the storages of its parameters."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

__all__ = ["Aliases"]


class Aliases:
    """The leaves with which one layer computes while a mini-batch runs.

    Each micro-batch adds its gradient to an alias, so that the parameter itself gets one gradient a
    mini-batch and its hooks fire once. A layer has aliases of its own even for a parameter that it
    shares with another: the order of additions then does not depend on where the model is cut.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._aliases: dict[Parameter, Parameter] = {}

    def swap_in(self) -> None:
        """Let the layer compute with the aliases; only parameters that require grad have one."""
        # A parameter that is gone must not be kept alive here, so only what is met again stays.
        known, self._aliases = self._aliases, {}
        # Ctrl-C at the wrong moment may have left an alias in its place.
        originals = {alias: parameter for parameter, alias in known.items()}
        for container, key, found in list(_places(self._layer)):
            parameter = originals.get(found, found)
            if parameter not in self._aliases:
                self._aliases[parameter] = _renewed(parameter, known.get(parameter))
            container[key] = self._aliases[parameter]

    def swap_out(self) -> None:
        """Give the layer its parameters back, wherever an alias is now.

        That need not be where it was put: an RNN makes its list of weights anew in its forward.
        """
        parameters = {alias: parameter for parameter, alias in self._aliases.items()}
        for container, key, alias in list(_places(self._layer)):
            if alias in parameters:
                container[key] = parameters[alias]

    def clear(self) -> None:
        """Forget all gradients."""
        for alias in self._aliases.values():
            alias.grad = None

    def take_gradients(self) -> list[tuple[Parameter, Tensor]]:
        """The gradients that have come together since the last time, and forget them."""
        taken = []
        for parameter, alias in self._aliases.items():
            # The alias lets go first: a gradient with a second owner would be copied on its way.
            gradient, alias.grad = alias.grad, None
            if gradient is not None:
                taken.append((parameter, gradient))
        return taken


def _places(layer: nn.Module) -> Iterator[tuple[Any, Any, Parameter]]:
    """Each place of a trained parameter: `_parameters`, and lists such as an LSTM's weights."""
    for module in layer.modules():
        for container in list(vars(module).values()):
            if type(container) is dict:
                entries: Any = container.items()
            elif type(container) is list:
                entries = enumerate(container)
            else:
                continue
            for key, item in entries:
                if isinstance(item, Parameter) and item.requires_grad:
                    yield container, key, item


def _renewed(parameter: Parameter, alias: Parameter | None) -> Parameter:
    """The alias that there was, while it still stands for the parameter; otherwise a new one."""
    if alias is not None and _stands_for(alias, parameter):
        return alias
    # A subclass of Parameter keeps its methods, and an object its attributes.
    new: Parameter = torch.Tensor._make_subclass(type(parameter), parameter.detach(), True)
    vars(new).update(vars(parameter))
    return new


def _stands_for(alias: Tensor, parameter: Tensor) -> bool:
    return (
        alias.dtype == parameter.dtype
        and alias.device == parameter.device
        and torch.is_same_size(alias, parameter)
        and alias.is_set_to(parameter)
    )
