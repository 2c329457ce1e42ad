"""The value that passes from one stage to the next."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Boundary", "Gradients", "pack", "unpack"]

Gradients = list[Tensor | None]
"""The gradient of each tensor of a boundary, in its order; None where there is none."""


class _Slot(NamedTuple):
    """Stands in a template for the tensor at this position."""

    position: int


class Structure(NamedTuple):
    """What is left of a nested value when its tensors are taken out."""

    spec: pytree.TreeSpec
    template: list[Any]


class Boundary(NamedTuple):
    """The tensors of a value, each once, and the structure that they came in.

    A bare tensor, by far the most frequent value, has no structure.
    """

    tensors: list[Tensor]
    structure: Structure | None

    def detached(self) -> "Boundary":
        """The same values as leaves: each asks for a gradient where the original had one."""
        return Boundary([_leaf(tensor) for tensor in self.tensors], self.structure)

    def copied(self) -> "Boundary":
        """Copies that are no leaves, with the same strides; gradients flow back through them."""
        return Boundary([_copy(tensor) for tensor in self.tensors], self.structure)

    def to(self, device: torch.device) -> "Boundary":
        """The same values on `device`; what is there already is not copied."""
        if all(tensor.device == device for tensor in self.tensors):
            return self
        return Boundary([_moved(tensor, device) for tensor in self.tensors], self.structure)


def pack(value: Any) -> Boundary:
    """Take the tensors out of any nesting of tuples, lists, dicts and the like."""
    if isinstance(value, Tensor):
        return Boundary([value], None)
    leaves, spec = pytree.tree_flatten(value)
    tensors: dict[int, Tensor] = {}
    template: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            # One tensor at two places stays one tensor: its gradients meet in one leaf.
            tensors.setdefault(id(leaf), leaf)
            template.append(_Slot(list(tensors).index(id(leaf))))
        else:
            template.append(leaf)
    return Boundary(list(tensors.values()), Structure(spec, template))


def unpack(boundary: Boundary) -> Any:
    """The value that `pack` was given, with the boundary's tensors in it."""
    tensors, structure = boundary
    if structure is None:
        return tensors[0]
    leaves = [
        tensors[item.position] if type(item) is _Slot else item for item in structure.template
    ]
    return pytree.tree_unflatten(leaves, structure.spec)


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if tensor.requires_grad else leaf


def _copy(tensor: Tensor) -> Tensor:
    # clone() keeps the strides of dense tensors only, and the bits of a kernel may depend on them.
    # Elements that share memory cannot be written to in place anyway.
    if tensor.is_sparse or tensor.layout != torch.strided or _overlaps(tensor):
        return tensor
    same = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return same.copy_(tensor)


def _overlaps(tensor: Tensor) -> bool:
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in strides)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, non_blocking=True).requires_grad_(tensor.requires_grad)
