"""The norm of all gradients together."""

from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn

from gpipe.execution.local_parts import local_part
from gpipe.execution.total_norm import norm_here
from gpipe.pipeline.model import GPipe

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their norm, over all stages together, is at most `max_norm`.

    A parameter that several layers share counts once. On a mesh all ranks call it, and the norm is
    that of all of them.

    Args:
        model: A `GPipe`, or any module; its parameters may live on several devices.
        max_norm: The largest norm that is left as it is.
        norm_type: The p of the p-norm; infinity for the largest absolute value.

    Returns:
        The norm before, a tensor with one number, on the device of the first gradient.

    Raises:
        ValueError: `max_norm` is negative or not a number.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}. Pass a number of at least 0.")
    if isinstance(model, GPipe):
        norm = model.total_norm(norm_type)
    else:
        norm = norm_here((each.grad for each in model.parameters()), norm_type)
    # Of a DTensor the part here: torch does not scale the two kinds together.
    every = (each.grad for each in model.parameters() if each.grad is not None)
    parts = [SimpleNamespace(grad=local_part(gradient)) for gradient in every]
    torch.nn.utils.clip_grads_with_norm_(cast("list[Tensor]", parts), max_norm, norm)
    return norm
