"""The value that passes from one stage to the next."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = [
    "Boundary",
    "Gradients",
    "Payload",
    "memory_like",
    "pack",
    "same_structure",
    "start_of",
    "unpack",
]

_ALIGNMENT_BYTES = 64  # every allocator of torch aligns at least so

Gradients = list[Tensor | None]
"""The gradient of each tensor of a boundary, in its order; None where there is none."""


class _Slot(NamedTuple):
    """Stands in a template for the tensor at this position."""

    position: int


class _Record(NamedTuple):
    """Stands in a template for a dataclass, which pytree takes for a leaf."""

    instance: Any
    fields: dict[str, "Structure"]


class Structure(NamedTuple):
    """What is left of a nested value when its tensors are taken out."""

    spec: pytree.TreeSpec
    template: list[Any]


class Boundary(NamedTuple):
    """The tensors of a value, each once, and the structure that they came in.

    A bare tensor, by far the most frequent value, has no structure.
    """

    tensors: list[Tensor]
    structure: Any

    def resembles(self, other: "Boundary") -> bool:
        """Whether the structures are the same, and all that is no tensor is equal."""
        return len(self.tensors) == len(other.tensors) and same_structure(
            self.structure, other.structure
        )

    def versions(self) -> list[int]:
        """A number for each tensor that grows with each write into it."""
        # Inference tensors have none, and outside inference mode nothing writes into them.
        return [-1 if tensor.is_inference() else tensor._version for tensor in self.tensors]

    def detached(self) -> "Boundary":
        """The same values as leaves: each asks for a gradient where the original had one."""
        return Boundary([_leaf(tensor) for tensor in self.tensors], self.structure)

    def copied(self) -> "Boundary":
        """Copies that are no leaves, with the same strides; gradients flow back through them."""
        return Boundary([_copy(tensor) for tensor in self.tensors], self.structure)


Payload = Boundary | Gradients
"""What passes between two stages: a boundary, or the gradients of its tensors."""


def pack(value: Any) -> Boundary:
    """Take the tensors out of any nesting of tuples, lists, dicts, dataclasses and the like.

    One tensor at two places stays one tensor: its gradients meet in one leaf.
    """
    if isinstance(value, Tensor):
        return Boundary([value], None)
    tensors: dict[int, Tensor] = {}
    structure = _take_out(value, tensors)
    return Boundary(list(tensors.values()), structure)


def unpack(boundary: Boundary) -> Any:
    """The value that `pack` was given, with the boundary's tensors in it."""
    tensors, structure = boundary
    return tensors[0] if structure is None else _put_in(structure, tensors)


def same_structure(mine: Structure | None, other: Structure | None) -> bool:
    """Whether the structures are the same, and all that is no tensor is equal."""
    if mine is None or other is None:
        return mine is other
    return mine.spec == other.spec and all(
        _same_item(a, b) for a, b in zip(mine.template, other.template, strict=True)
    )


def start_of(tensor: Tensor) -> int:
    """How many elements behind the alignment of every allocator a tensor starts."""
    return tensor.data_ptr() % _ALIGNMENT_BYTES // tensor.element_size()


@torch.no_grad()
def memory_like(
    shape: Sequence[int],
    strides: Sequence[int],
    start: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A new tensor with these strides and this start: the bits that kernels give depend on both.

    A layer's input is copied in its first mini-batch and perhaps not in its second, and a slice of
    a mini-batch rarely starts where an allocation would.
    """
    is_empty = 0 in shape
    steps = zip(shape, strides, strict=True)
    extent = 0 if is_empty else 1 + sum((size - 1) * stride for size, stride in steps)
    memory = torch.empty(start + extent, dtype=dtype, device=device)
    return memory.as_strided(shape, strides, start).detach()


def _take_out(value: Any, tensors: dict[int, Tensor]) -> Structure:
    leaves, spec = pytree.tree_flatten(value)
    return Structure(spec, [_stand_in(leaf, tensors) for leaf in leaves])


def _stand_in(leaf: Any, tensors: dict[int, Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        tensors.setdefault(id(leaf), leaf)
        return _Slot(list(tensors).index(id(leaf)))
    if is_dataclass(leaf) and not isinstance(leaf, type):
        values = {field.name: getattr(leaf, field.name) for field in fields(leaf)}
        hollow = _rebuilt(leaf, dict.fromkeys(values))  # it must not keep the tensors alive
        return _Record(hollow, {name: _take_out(value, tensors) for name, value in values.items()})
    return leaf


def _put_in(structure: Structure, tensors: list[Tensor]) -> Any:
    leaves = [_original(item, tensors) for item in structure.template]
    return pytree.tree_unflatten(leaves, structure.spec)


def _original(item: Any, tensors: list[Tensor]) -> Any:
    if type(item) is _Slot:
        return tensors[item.position]
    if type(item) is _Record:
        values = {name: _put_in(field, tensors) for name, field in item.fields.items()}
        return _rebuilt(item.instance, values)
    return item


def _rebuilt(instance: Any, values: Mapping[str, Any]) -> Any:
    # Past __init__ and a frozen __setattr__: the fields have their values, whatever made them.
    rebuilt = copy.copy(instance)
    for name, value in values.items():
        object.__setattr__(rebuilt, name, value)
    return rebuilt


def _same_item(mine: Any, other: Any) -> bool:
    if type(mine) is not type(other):
        return False
    if type(mine) is _Record:
        return mine.fields.keys() == other.fields.keys() and all(
            same_structure(field, other.fields[name]) for name, field in mine.fields.items()
        )
    try:
        return bool(mine == other)
    except (TypeError, ValueError, RuntimeError):  # an array compares element by element
        return False


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if tensor.requires_grad else leaf


def _copy(tensor: Tensor) -> Tensor:
    # Elements that share memory cannot be written to in place anyway.
    if tensor.layout != torch.strided or _overlaps(tensor):
        return tensor
    return _empty_like(tensor).copy_(tensor)


def _empty_like(tensor: Tensor) -> Tensor:
    return memory_like(tensor.shape, tensor.stride(), start_of(tensor), tensor.dtype, tensor.device)


def _overlaps(tensor: Tensor) -> bool:
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in strides)
