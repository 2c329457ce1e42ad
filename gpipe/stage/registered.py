"""The tensors of a layer, by the places where they are registered."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["RESETS", "Place", "loose", "obstacles", "places", "reset_name"]

RESETS = ("reset_parameters", "_reset_parameters")
"""The methods by which torch's modules give their tensors first values."""


class Place(NamedTuple):
    """Where a parameter or a buffer is registered.

    Attributes:
        label: What the name is looked up in, for messages; "" for the whole model.
        module: The module that it belongs to.
        kind: "parameter" or "buffer".
        name: Its full name.
        tensor: What is there.
    """

    label: str
    module: nn.Module
    kind: str
    name: str
    tensor: Tensor

    @property
    def key(self) -> str:
        """Its name in the module."""
        return self.name.rpartition(".")[2]

    @property
    def container(self) -> dict[str, Any]:
        """The module's own record of its parameters, or of its buffers."""
        return self.module._parameters if self.kind == "parameter" else self.module._buffers

    def __str__(self) -> str:
        return f"{self.label}{self.kind} {self.name!r}"


def places(layer: nn.Module, label: str = "") -> Iterator[Place]:
    """Each place where the layer has a tensor, also where it is one that was met before."""
    for path, module in layer.named_modules():
        for kind, container in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in list(container.items()):
                if tensor is not None:
                    yield Place(label, module, kind, f"{path}.{key}" if path else key, tensor)


def loose(layer: nn.Module, label: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors on meta that are attributes, or in a list or dictionary that is one."""
    for path, module in layer.named_modules():
        for key, value in list(vars(module).items()):
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            for each in _items(value):
                if isinstance(each, Tensor) and each.is_meta:
                    yield f"{label}attribute {f'{path}.{key}' if path else key!r}", each


def obstacles(found: Iterable[Place]) -> Iterator[tuple[Place, str]]:
    """The places on meta where no reset could put values, each with what is in the way."""
    first_with: dict[int, Place] = {}
    for place in found:
        if not place.tensor.is_meta:
            continue
        if is_lazy(place.tensor):
            yield place, "it has no shape before the first forward"
            continue
        memory = place.tensor.untyped_storage()._cdata
        first = first_with.setdefault(memory, place)
        if first.tensor is not place.tensor:
            # On meta there is no memory to share, so two tensors would come of it.
            yield place, f"it is a view of {first}, and would not stay one (share the object)"


def reset_name(module: nn.Module) -> str | None:
    """The method by which the module gives its tensors first values; None without one."""
    return next((name for name in RESETS if callable(getattr(module, name, None))), None)


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | set) else (value,)
