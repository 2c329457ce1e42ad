"""Copies that lie in memory as the original does."""

import torch
from torch import Tensor

__all__ = ["copied_to", "own_copy"]


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, without a graph; what is expanded stays so."""
    tensor = tensor.detach()
    copy = tensor.to(device, copy=True)
    if _lies_like(copy, tensor):
        return copy
    part = tensor
    for dim in _expanded(tensor):
        part = part.narrow(dim, 0, 1)
    return _strided_copy(part, device).expand(tensor.shape)


def own_copy(tensor: Tensor) -> Tensor:
    """A copy that may be written into, for gradients to flow through.

    What is expanded is given back itself, as the engine does: nothing can write into it in place.
    """
    copy = tensor.clone()
    if _lies_like(copy, tensor):
        return copy
    return tensor if _expanded(tensor) else _strided_copy(tensor, tensor.device)


def _lies_like(copy: Tensor, tensor: Tensor) -> bool:
    # A copy has no gaps, and what a layer saves that reshapes its input depends on them.
    has_strides = tensor.layout == torch.strided and not tensor.is_nested
    return not has_strides or copy.stride() == tensor.stride()


def _strided_copy(tensor: Tensor, device: torch.device) -> Tensor:
    memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return memory.copy_(tensor)


def _expanded(tensor: Tensor) -> list[int]:
    """The dimensions along which all elements are one."""
    steps = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return [dim for dim, (size, stride) in steps if size > 1 and stride == 0]
