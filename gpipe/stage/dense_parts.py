"""Where tensors of any layout have their memory."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["dense_parts"]


def dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The dense tensors in which a tensor has its memory."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from dense_parts(getattr(tensor, name))
    elif tensor.is_nested:
        yield from tensor.detach().unbind()[:1]  # all of them are in one memory
    elif tensor.layout == torch.strided:
        yield tensor
    else:
        yield from _sparse_parts(tensor.detach())


def _sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
