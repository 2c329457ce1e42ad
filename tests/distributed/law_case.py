"""What a law is tested with."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import nn

__all__ = ["Case"]


class Case(NamedTuple):
    """What is trained.

    Attributes:
        module: Makes the model from a fixed start.
        batches: Makes the input and the target of each step.
        loss: Makes the loss.
        options: Those of GPipe.
        arguments: Those of step().
        around: What the steps run under.
        accumulates: Whether gradients add up, and weights stay.
    """

    module: Callable[[], nn.Sequential]
    batches: Callable[[], list[tuple[Any, Any]]]
    loss: Callable[[], Any] = nn.MSELoss
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody writes into it
    arguments: dict[str, Any] = {}  # noqa: RUF012
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    accumulates: bool = False
