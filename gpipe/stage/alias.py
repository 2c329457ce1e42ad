"""A layer's own leaves on the storages of its parameters."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gpipe.stage.device import Device
from gpipe.stage.sharded import sharded_parameters

__all__ = ["Aliases"]


class Aliases:
    """The leaves with which one layer computes while a mini-batch runs.

    FSDP2 puts parameters of its own in place and takes their gradients away: those are left alone.

    Each micro-batch adds its gradient to an alias, so that the parameter itself gets one gradient a
    mini-batch and its hooks fire once. A layer has aliases of its own even for a parameter that it
    shares with another: the order of additions then does not depend on where the model is cut.

    A parameter that lives elsewhere, since a layer of another stage shares it, has a copy on this
    layer's device for an alias, made anew when the parameter has changed.

    Args:
        layer: The layer.
        device: Where it computes; None where all its parameters are.
    """

    def __init__(self, layer: nn.Module, device: Device | None = None) -> None:
        self._layer = layer
        self._device = device
        self._left_alone = sharded_parameters(layer)
        self._aliases: dict[Parameter, Parameter] = {}
        self._copied: dict[Parameter, tuple[int, int, bool]] = {}

    def trained(self) -> list[Parameter]:
        """The parameters that get gradients, each once, while no alias is in their place."""
        parameters = self._layer.parameters()
        return [each for each in parameters if each.requires_grad and each not in self._left_alone]

    @property
    def left_alone(self) -> Collection[Parameter]:
        """The parameters that get their gradients themselves."""
        return self._left_alone

    def has_copies(self) -> bool:
        """Whether the layer has a parameter that lives on another device."""
        return any(self._is_elsewhere(parameter) for _, _, parameter in _places(self._layer))

    def swap_in(self) -> None:
        """Let the layer compute with aliases of what it trains, and of what lives elsewhere."""
        # A parameter that is gone must not be kept alive here, so only what is met again stays.
        known, self._aliases = self._aliases, {}
        # Ctrl-C at the wrong moment may have left an alias in its place.
        originals = {alias: parameter for parameter, alias in known.items()}
        for container, key, found in list(_places(self._layer)):
            parameter = originals.get(found, found)
            if parameter in self._left_alone:
                continue
            if not (parameter.requires_grad or self._is_elsewhere(parameter)):
                continue
            if parameter not in self._aliases:
                self._aliases[parameter] = self._alias(parameter, known.get(parameter))
            container[key] = self._aliases[parameter]

    def swap_out(self) -> None:
        """Give the layer its parameters back, wherever an alias is now.

        That need not be where it was put: an RNN makes its list of weights anew in its forward.
        """
        parameters = {alias: parameter for parameter, alias in self._aliases.items()}
        for container, key, alias in list(_places(self._layer)):
            if alias in parameters:
                container[key] = parameters[alias]

    def _is_elsewhere(self, parameter: Parameter) -> bool:
        return self._device is not None and not self._device.has(parameter)

    def _alias(self, parameter: Parameter, known: Parameter | None) -> Parameter:
        if not self._is_elsewhere(parameter):
            return _renewed(parameter, known)
        assert self._device is not None
        state = parameter._version, parameter.data_ptr(), parameter.requires_grad
        if known is None or self._copied.get(parameter) != state:
            copy = parameter.detach().to(self._device.torch_device)
            self._device.retain(copy, self._device.compute)
            known = Parameter(copy, requires_grad=parameter.requires_grad)
            self._copied[parameter] = state
        return known

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

    def take_left_alone(self) -> list[tuple[Parameter, Tensor]]:
        """The gradients of those parameters that have no alias, and forget them."""
        taken = [(each, each.grad) for each in self._left_alone if each.grad is not None]
        for parameter, _ in taken:
            parameter.grad = None
        return taken


def _places(layer: nn.Module) -> Iterator[tuple[Any, Any, Parameter]]:
    """Each place of a parameter: `_parameters`, and lists such as an LSTM's weights."""
    for module in layer.modules():
        for container in list(vars(module).values()):
            if type(container) is dict:
                entries: Any = container.items()
            elif type(container) is list:
                entries = enumerate(container)
            else:
                continue
            for key, item in entries:
                if isinstance(item, Parameter):
                    yield container, key, item


def _renewed(parameter: Parameter, alias: Parameter | None) -> Parameter:
    """The alias that there was, while it still stands for the parameter; otherwise a new one."""
    if alias is not None and _stands_for(alias, parameter):
        return alias
    if is_traceable_wrapper_subclass(parameter):
        new = Parameter(parameter.detach())
    else:  # a subclass of Parameter keeps its methods
        new = torch.Tensor._make_subclass(type(parameter), parameter.detach(), True)
    vars(new).update(
        {name: each for name, each in vars(parameter).items() if name not in vars(new)}
    )
    return new


def _stands_for(alias: Tensor, parameter: Tensor) -> bool:
    return (
        alias.dtype == parameter.dtype
        and alias.device == parameter.device
        and torch.is_same_size(alias, parameter)
        and all(map(Tensor.is_set_to, _plain(alias), _plain(parameter)))
    )


def _plain(tensor: Tensor) -> list[Tensor]:
    """What a tensor keeps its numbers in: itself, unless it is a shell around others."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    return [plain for each in inner if isinstance(each, Tensor) for plain in _plain(each)]
