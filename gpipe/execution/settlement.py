"""What all processes have to know of a mini-batch when it has gone through."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe.execution.exchange import Exchange
from gpipe.execution.facts import Totals
from gpipe.execution.loss_head import LossHead
from gpipe.execution.pipe import Pipe, gathered
from gpipe.stage.loss import Parts

__all__ = ["Settlement"]

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


class Settlement:
    """Lets all processes know the loss, and what is done with gradients and generators.

    Args:
        pipe: The processes.
        exchange: Between the workers.
        head: The loss, where the last stage is.
        device: Where its numbers are to live.
    """

    def __init__(
        self, pipe: Pipe, exchange: Exchange, head: LossHead | None, device: torch.device
    ) -> None:
        self._replicas = pipe.replicas_control
        self._exchange = exchange
        self._head = head
        self._device = device
        self._loss: Tensor | None = None
        self._factor: Tensor | None = None

    def tell(self, *, drew: bool, has_gradients: bool) -> None:
        """Begin it, when this worker is done.

        Args:
            drew: Whether a layer here drew random numbers.
            has_gradients: Whether a stage here has gradients.
        """
        parts = self._head.parts() if self._head is not None else None
        if self._replicas is not None:
            drew, has_gradients, parts = _of_replicas(self._replicas, drew, has_gradients, parts)
        if self._head is not None and parts is not None:
            self._loss, self._factor = self._head.total(parts), self._head.correction(parts)
        numbers = [*_Number.of(self._loss), *_Number.of(self._factor)]
        self._exchange.tell([drew, has_gradients, *numbers])

    def hear(self) -> tuple[Totals, bool]:
        """End it, when all workers are done: the totals, and whether any layer drew."""
        rows = self._exchange.hear()
        drew, has_gradients = (any(column) for column in list(zip(*rows, strict=True))[:2])
        loss, factor = self._loss, self._factor
        if loss is None:
            told = next((row for row in rows if row[2] >= 0), rows[0])
            loss = _Number(*told[2:4]).tensor(self._device)
            factor = _Number(*told[4:6]).tensor(self._device)
        return Totals(loss, factor, has_gradients), drew


def _of_replicas(
    group: dist.ProcessGroup, drew: bool, has_gradients: bool, parts: Parts | None
) -> tuple[bool, bool, Parts | None]:
    """The same of all replicas together."""
    mine: list[float] = [drew, has_gradients]
    for part in parts or (None, None):
        mine += _Number.of(part)
    every = gathered(mine, group)
    drew, has_gradients = (any(column) for column in list(zip(*every, strict=True))[:2])
    if parts is not None:
        losses, weights = ([_Number(*row[at : at + 2]) for row in every] for at in (2, 4))
        weight = None if parts.weight is None else _sum(weights, parts.weight)
        parts = Parts(_sum(losses, parts.loss), weight)
    return drew, has_gradients, parts


def _sum(numbers: list[_Number], like: Tensor) -> Tensor:
    """In the order of the replicas, so that all have the same bits."""
    return torch.tensor(sum(number.value for number in numbers), dtype=like.dtype).to(like.device)
