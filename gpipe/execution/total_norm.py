"""The norm of the gradients of all workers together."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe.execution.local_parts import whole
from gpipe.stage.device import HOST

__all__ = ["Counted", "norm_here", "total_norm"]


class Counted(NamedTuple):
    """A gradient that this worker counts.

    Attributes:
        layer: The first layer of the model that has its parameter.
        position: Of the parameter in that layer.
        gradient: The gradient.
    """

    layer: int
    position: int
    gradient: Tensor


def norm_here(gradients: Iterable[Tensor | None], norm_type: float) -> Tensor:
    """The norm over the gradients that there are, all in this process."""
    present = [each for each in gradients if each is not None]
    return torch.nn.utils.get_total_norm(present, norm_type)


def total_norm(
    counted: Sequence[Counted], norm_type: float, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """The norm over all gradients that the workers of a group count.

    The norms of the gradients are brought together in the order of the model, so that their norm
    has the bits that it has in one process.

    Args:
        counted: What this worker counts.
        norm_type: The p of the p-norm.
        group: The workers, on the host.
        device: Where the result is to live.
    """
    mine = [(*place, _norm(gradient, norm_type)) for *place, gradient in counted]
    every: list[list[tuple[int, int, Tensor]]] = [[] for _ in range(group.size())]
    dist.all_gather_object(every, mine, group)
    in_order = sorted((each for row in every for each in row), key=lambda each: each[:2])
    if not in_order:
        return torch.tensor(0.0, device=device)
    norms = torch.stack([norm for *_, norm in in_order])
    norm: Tensor = torch.linalg.vector_norm(norms, norm_type)
    return norm.to(device)


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    return whole(torch.linalg.vector_norm(gradient, norm_type)).to(HOST)
