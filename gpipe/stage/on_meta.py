"""Builds a model on meta, where its resets can replace its constructor."""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpipe.stage.device import HOST
from gpipe.stage.first_values import generators_kept
from gpipe.stage.registered import RESETS, loose, obstacles, places, reset_name

__all__ = ["MetaModel", "built_on_meta"]

_TORCH = str(Path(torch.__file__).parent)
_INIT = str(nn.init.__file__)
_IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]


class MetaModel(NamedTuple):
    """A model on meta, or why there is none.

    Attributes:
        module: The model; None where there are reasons.
        reasons: Why its resets alone would not give it the values that its constructor gives.
    """

    module: nn.Module | None
    reasons: tuple[str, ...]


def built_on_meta(factory: Callable[[], nn.Module]) -> MetaModel:
    """Calls the factory under `torch.device("meta")`, and sees whether `materialise` will do.

    It will where the last that each parameter and buffer was written by is a `reset_parameters()`
    or `_reset_parameters()`, without arguments, of a module inside the model's layers. Values
    that the constructor gives otherwise would be lost: where there are reasons, call the factory
    again, for real. The host's generators are left as they were.

    Args:
        factory: Makes the model; its children are the layers.
    """
    watch = _Watch()
    with generators_kept(HOST), torch.device("meta"), _AskedForMeta(watch), watch:
        try:
            module = factory()
        except Exception as error:  # noqa: BLE001 - whatever is no matter of meta will come again
            return MetaModel(None, (f"it cannot be built there: {type(error).__name__}: {error}",))
    reasons = tuple(_reasons(module, watch))
    return MetaModel(None if reasons else module, reasons)


class _Write(NamedTuple):
    """What gave a tensor values: an operation, where the user's code is, and in whose resets."""

    operation: str
    place: str
    resetting: tuple[nn.Module, ...]


class _Watch(TorchDispatchMode):
    """Sees which operation was the last to write to the memory of each tensor on meta."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._last: dict[int, _Write | None] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        arguments = _on_meta([args, kwargs])
        written = _on_meta(_written(function, args, kwargs))
        old = {_memory(each) for each in arguments}
        new = [each for each in _on_meta(result) if _memory(each) not in old]
        name = function.overloadpacket.__name__
        if name == "_to_copy" and arguments:  # another dtype of the same values
            for each in new:
                self._last[_memory(each)] = self.last(arguments[0])
        elif "empty" in name:
            self._last |= {_memory(each): None for each in new}
        else:
            self.note(name, [*written, *new])
        return result

    def note(self, operation: str, tensors: Sequence[Tensor]) -> None:
        """Something writes to these now."""
        if tensors:
            write = _Write(operation, _place(), tuple(_resetting()))
            self._last |= {_memory(each): write for each in tensors}

    def last(self, tensor: Tensor) -> _Write | None:
        """What wrote to it last; None if nothing was seen to."""
        return self._last.get(_memory(tensor))


class _AskedForMeta(TorchFunctionMode):
    """Sees the functions of `torch.nn.init` that do nothing where a tensor is on meta."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function == _IS_META:
            asking = next((each for each in _frames() if each.f_code.co_filename == _INIT), None)
            if asking is not None:
                self._watch.note(asking.f_code.co_name, _on_meta(args))
        return function(*args, **(kwargs or {}))


def _reasons(module: nn.Module, watch: _Watch) -> Iterator[str]:
    found = list(places(module))
    registered = {place.tensor for place in found}
    in_the_way = {place.tensor: cause for place, cause in obstacles(found)}
    inside = set(chain.from_iterable(layer.modules() for layer in module.children()))
    for place in found:
        if place.tensor in in_the_way:
            yield f"{place}: {in_the_way[place.tensor]}"
        elif place.tensor.is_meta and place.tensor.numel():
            cause = _cause(watch.last(place.tensor), inside)
            if cause:
                yield f"{place} {cause}"
    for where, tensor in loose(module):
        if tensor not in registered:
            yield f"{where} is registered neither as parameter nor as buffer"


def _cause(write: _Write | None, inside: set[nn.Module]) -> str | None:
    """Why a tensor would not get its values again; None if it would."""
    if write is None:
        return "is given no value by the constructor"
    if inside.isdisjoint(write.resetting):
        return (
            f"has its values from {write.operation} at {write.place}, outside of the "
            "reset_parameters() of a module in a layer"
        )
    return None


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that an operation writes to."""
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            by_position = args[position] if position < len(args) else None
            yield kwargs.get(argument.name, by_position)


def _on_meta(tree: Any) -> list[Tensor]:
    leaves = tree_leaves(list(tree) if isinstance(tree, Iterator) else tree)
    return [each for each in leaves if isinstance(each, Tensor) and each.device.type == "meta"]


def _memory(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place() -> str:
    """The user's line that runs now; torch's own only where there is no other."""
    for frame in _frames():
        path = frame.f_code.co_filename
        if not path.startswith(_TORCH) and path != __file__:
            return f"{Path(path).name}:{frame.f_lineno}"
    return "an unknown place"


def _resetting() -> Iterator[nn.Module]:
    """The modules in whose resets the code runs now, and would run again."""
    for frame in _frames():
        name = frame.f_code.co_name
        if name in RESETS and _takes_self_alone(frame.f_code):
            module = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(module, nn.Module) and reset_name(module) == name:
                yield module


def _takes_self_alone(code: CodeType) -> bool:
    takes_more = code.co_flags & 0x0C  # *args or **kwargs
    return code.co_argcount == 1 and not code.co_kwonlyargcount and not takes_more
