"""The part of a tensor that this process holds."""

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["local_gradient", "local_part", "whole", "whole_gradient"]


def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's own part; any other tensor as it is."""
    return tensor.to_local() if _is_distributed(tensor) else tensor


def local_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The part of a gradient that belongs to this process's part of the parameter.

    Autograd may give a DTensor a gradient that is placed otherwise than the parameter, such as one
    that is still to be summed. Then all ranks of the parameter's mesh must call this.
    """
    if not (_is_distributed(gradient) and _is_distributed(parameter)):
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements).to_local()


def whole(tensor: Tensor) -> Tensor:
    """A DTensor with its parts put together, for which all ranks call this; others as they are."""
    return tensor.full_tensor() if _is_distributed(tensor) else tensor


def whole_gradient(part: Tensor, parameter: Tensor) -> Tensor:
    """The gradient of which this is the part here, placed as the parameter is."""
    if not _is_distributed(parameter):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()  # parts of uneven size do not tell
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _is_distributed(tensor: Tensor) -> "TypeGuard[DTensor]":
    if not is_traceable_wrapper_subclass(tensor):
        return False
    from torch.distributed.tensor import DTensor  # takes half a second, once somebody uses it

    return isinstance(tensor, DTensor)
