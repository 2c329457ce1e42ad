"""Lets layers compute with copies, and puts everything back."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from gpipe.profiling.generators import restorers

__all__ = ["Copier", "attributes_of", "standing_in"]

Copier = Callable[[Tensor], Tensor]
"""Makes a tensor that can be used in place of another: without a graph, where it is measured."""

_CONTAINERS = (dict, OrderedDict, list)


@contextmanager
def standing_in(layers: Sequence[nn.Module], copied: Copier) -> Iterator[list[Parameter]]:
    """Let layers compute with copies of their parameters and buffers.

    What they do to them, to training flags, to other attributes and to generators of their own is
    forgotten afterwards: the user's own tensors are not even there meanwhile. They need not be
    moved to be measured.

    Args:
        layers: A layer, and whatever is behind it.
        copied: Makes the copies.

    Yields:
        The copies of parameters, each once.
    """
    modules = _modules(layers)
    containers = _containers(modules)
    attributes = [vars(module) for module in modules]
    before = [(container, copy.copy(container)) for container in (*containers, *attributes)]
    rewinds = restorers(attributes_of(layers))
    try:
        stand_ins = _StandIns(copied)
        for container in containers:
            stand_ins.replace(container)
        for module in modules:
            stand_ins.replace_buffers(module)
        yield stand_ins.parameters()
    finally:
        for container, content in before:
            _restore(container, content)
        for rewind in rewinds:
            rewind()


def attributes_of(layers: Sequence[nn.Module]) -> list[Any]:
    """All that hangs on modules, in lists and dicts, too."""
    modules = _modules(layers)
    attributes = [value for module in modules for value in vars(module).values()]
    items = [list(_entries(container)) for container in _containers(modules)]
    return [*attributes, *(item for each in items for _, item in each)]


def _modules(layers: Sequence[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(module for layer in layers for module in layer.modules()))


def _containers(modules: Sequence[nn.Module]) -> list[Any]:
    attributes = [value for module in modules for value in vars(module).values()]
    return [value for value in attributes if type(value) in _CONTAINERS]


def _entries(container: Any) -> Iterator[tuple[Any, Any]]:
    yield from container.items() if isinstance(container, dict) else enumerate(container)


class _StandIns:
    """The copies; what is at several places has one."""

    def __init__(self, copied: Copier) -> None:
        self._copied = copied
        self._of: dict[Tensor, Tensor] = {}

    def replace(self, container: Any) -> None:
        """Put copies in the places of parameters, as in an LSTM's list of weights."""
        for key, item in list(_entries(container)):
            if isinstance(item, Parameter):
                container[key] = self._copy(item)

    def replace_buffers(self, module: nn.Module) -> None:
        """Put copies in the places of buffers."""
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = self._copy(buffer)

    def parameters(self) -> list[Parameter]:
        """The copies of parameters."""
        return [stand_in for stand_in in self._of.values() if isinstance(stand_in, Parameter)]

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor not in self._of:
            self._of[tensor] = _alike(tensor, self._copied(tensor))
        return self._of[tensor]


def _alike(original: Tensor, tensor: Tensor) -> Tensor:
    if not isinstance(original, Parameter):
        return tensor
    parameter = Parameter(tensor, requires_grad=original.requires_grad)
    if type(parameter) is Parameter:
        parameter.__class__ = type(original)  # a subclass keeps its methods, and its attributes
    vars(parameter).update(vars(original))
    return parameter


def _restore(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
        return
    if list(container) != list(content):  # in order: the order of parameters is one of names
        container.clear()
    container.update(content)
