"""Tells layers apart that may do something else."""

from collections import OrderedDict
from collections.abc import Hashable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from gpipe.profiling.walk import Place
from gpipe.stage.boundary import Boundary
from gpipe.stage.joint import part_skips

__all__ = ["likeness"]

# What a forward of theirs does follows from the module's attributes and its input. That of a user's
# class may follow from anything: a counter, a file, Python's random numbers.
_TRUSTED = ("torch.nn.", "gpipe.models.")

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)


def likeness(place: Place) -> Hashable | None:
    """What is equal for two places only where the same happens; None where nobody can know.

    Args:
        place: A layer, and what comes to it.
    """
    has_hooks = _has_any_global_hook()  # type: ignore[no-untyped-call]
    if has_hooks or any(call is not place.layer for call in place.calls):
        return None
    try:
        layer = _Description().of(place.layer)
        inputs = tuple(map(_of_inputs, place.inputs))
    except _UnknownError:
        return None
    return layer, inputs, tuple(place.same)


class _UnknownError(Exception):
    """Something is there of which nobody knows what it does."""


def _of_inputs(joint: Boundary) -> Hashable:
    boundary, skips = part_skips(joint)
    if skips or boundary.structure is not None:
        raise _UnknownError
    return tuple((*_of_tensor(tensor), str(tensor.device)) for tensor in boundary.tensors)


def _of_tensor(tensor: Tensor) -> tuple[Hashable, ...]:
    layout = tensor.shape, tensor.stride(), tensor.storage_offset()
    return type(tensor), layout, tensor.dtype, tensor.requires_grad


class _Description:
    """Describes a module by all that hangs on it; what is met again is named, not described."""

    def __init__(self) -> None:
        self._names: dict[int, int] = {}

    def of(self, value: Any) -> Hashable:
        """A description that two values share only if they do the same."""
        kind = type(value)
        if value is None or kind in _PLAIN:
            return kind, value
        if isinstance(value, Tensor | nn.Module) and id(value) in self._names:
            return self._names[id(value)]
        if isinstance(value, Tensor):
            self._name(value)
            return _of_tensor(value)
        if isinstance(value, nn.Module):
            return self._of_module(value)
        return self._of_container(value)

    def _of_module(self, module: nn.Module) -> Hashable:
        kind = type(module)
        if not kind.__module__.startswith(_TRUSTED):
            raise _UnknownError
        self._name(module)
        return kind, self._of_container(vars(module))

    def _of_container(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in (dict, OrderedDict):
            return kind, tuple((self.of(key), self.of(item)) for key, item in value.items())
        if kind in (tuple, list, torch.Size):
            return kind, tuple(map(self.of, value))
        if kind is set and all(type(item) is str for item in value):
            return kind, frozenset(value)
        if kind in (FunctionType, BuiltinFunctionType) and _is_of_torch(value):
            return kind, value
        raise _UnknownError

    def _name(self, value: object) -> None:
        self._names[id(value)] = len(self._names)


def _is_of_torch(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] == "torch"
