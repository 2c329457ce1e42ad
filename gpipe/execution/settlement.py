"""What all processes have to know of a mini-batch when it has gone through."""

from typing import NamedTuple

import torch
from torch import Tensor

from gpipe.execution.exchange import Exchange
from gpipe.execution.facts import Totals
from gpipe.execution.loss_head import LossHead
from gpipe.execution.pipe import Pipe, gathered
from gpipe.stage.loss import Parts

__all__ = ["settle_totals"]

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
)


class _Number(NamedTuple):
    """A tensor with one number, or none, as numbers that any process can carry."""

    dtype: float = -1
    value: float = 0.0

    @classmethod
    def of(cls, tensor: Tensor | None) -> "_Number":
        return cls() if tensor is None else cls(_DTYPES.index(tensor.dtype), float(tensor))

    def tensor(self, device: torch.device) -> Tensor | None:
        if self.dtype < 0:
            return None
        return torch.tensor(self.value, dtype=_DTYPES[int(self.dtype)], device=device)


def settle_totals(
    pipe: Pipe,
    exchange: Exchange,
    head: LossHead | None,
    device: torch.device,
    *,
    drew: bool,
    has_gradients: bool,
) -> tuple[Totals, bool]:
    """Let all processes know the loss, and what is done with gradients and generators.

    Args:
        pipe: The processes.
        exchange: Between the workers.
        head: The loss, where the last stage is.
        device: Where its numbers are to live.
        drew: Whether a layer here drew random numbers.
        has_gradients: Whether a stage here has gradients.

    Returns:
        The totals, and whether any layer drew.
    """
    parts = head.parts() if head is not None else None
    if pipe.replicas_control is not None:
        mine: list[float] = [drew, has_gradients]
        for part in parts or (None, None):
            mine += _Number.of(part)
        every = gathered(mine, pipe.replicas_control)
        drew, has_gradients = (any(column) for column in list(zip(*every, strict=True))[:2])
        if parts is not None:
            losses, weights = ([_Number(*row[at : at + 2]) for row in every] for at in (2, 4))
            weight = None if parts.weight is None else _sum(weights, parts.weight)
            parts = Parts(_sum(losses, parts.loss), weight)
    loss = factor = None
    if head is not None and parts is not None:
        loss, factor = head.total(parts), head.correction(parts)
    mine = [drew, has_gradients, *_Number.of(loss), *_Number.of(factor)]
    every = exchange.round(mine, torch.float64)
    drew, has_gradients = (any(column) for column in list(zip(*every, strict=True))[:2])
    told = next((row for row in every if row[2] >= 0), every[0])
    if loss is None:
        loss = _Number(*told[2:4]).tensor(device)
        factor = _Number(*told[4:6]).tensor(device)
    return Totals(loss, factor, has_gradients), drew


def _sum(numbers: list[_Number], like: Tensor) -> Tensor:
    """In the order of the replicas, so that all have the same bits."""
    return torch.tensor(sum(number.value for number in numbers), dtype=like.dtype).to(like.device)
