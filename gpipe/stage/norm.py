"""The norm of all gradients together."""

import torch
from torch import Tensor, nn

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their norm, over all stages together, is at most `max_norm`.

    A parameter that several layers share counts once.

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
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
