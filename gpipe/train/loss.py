"""The loss that a run file names."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from gpipe.stage.loss import reduction_of
from gpipe.train.config import RunConfig
from gpipe.train.factory import resolve
from gpipe.train.mistake import Mistake, RunFileError
from gpipe.train.signature import check_arguments

__all__ = ["Loss", "build_loss"]

LossReduction = Literal["mean", "sum", "weighted"]

_LOSSES: dict[str, Callable[..., nn.Module]] = {
    "cross_entropy": nn.CrossEntropyLoss,
    "nll": nn.NLLLoss,
    "mse": nn.MSELoss,
    "l1": nn.L1Loss,
    "smooth_l1": nn.SmoothL1Loss,
    "bce_with_logits": nn.BCEWithLogitsLoss,
}


@dataclass(frozen=True)
class Loss:
    """A loss and how its values over rows become one number.

    Attributes:
        function: Called as function(output, target).
        reduction: "mean", "sum" or "weighted": what it does over the rows.
    """

    function: Callable[[Any, Any], Any]
    reduction: LossReduction

    @property
    def ignored_class(self) -> int | None:
        """The target that does not count, for a loss over classes; None for other losses."""
        if isinstance(self.function, nn.CrossEntropyLoss | nn.NLLLoss):
            return self.function.ignore_index
        return None

    def total(self, output: Any, target: Any, num_rows: int) -> tuple[float, float]:
        """The loss as (sum, weight), so that several mini-batches can be put together.

        The sum over all mini-batches divided by the sum of their weights is the loss over all
        rows; for the reduction "sum" it is the mean of the mini-batches' sums per row.
        """
        value = self.function(output, target)
        if self.reduction == "weighted":
            return float(value[0]), float(value[1])
        if self.reduction == "sum":
            return float(value), float(num_rows)
        weight = self._weight(target, num_rows)
        return (float(value) * weight if weight else 0.0), weight

    def _weight(self, target: Any, num_rows: int) -> float:
        """What torch divides the sum by when it takes the mean."""
        if not isinstance(self.function, nn.CrossEntropyLoss | nn.NLLLoss):
            return num_rows
        if not isinstance(target, Tensor) or target.is_floating_point():
            return num_rows
        counted = target[target != self.function.ignore_index]
        weight = self.function.weight
        return float(counted.numel() if weight is None else weight[counted].sum())


def build_loss(config: RunConfig) -> Loss:
    """The loss of a run file: one of torch's by name, or one of the user's.

    Raises:
        RunFileError: It cannot be found, or it cannot be reduced as asked.
    """
    reduction: LossReduction = config.loss_reduction or "mean"
    if config.loss in _LOSSES:
        return Loss(_named_loss(config.loss, reduction), reduction)
    function = _own_loss(config.loss)
    try:
        reduction_of(function, reduction)
    except (TypeError, ValueError) as error:
        raise RunFileError([Mistake("loss_reduction", str(error))]) from error
    return Loss(function, reduction)


def _named_loss(name: str, reduction: LossReduction) -> nn.Module:
    if reduction == "weighted":
        text = f'"weighted" is for a loss of your own that returns (sum, weight), not {name}'
        raise RunFileError([Mistake("loss_reduction", f"{text}. Give mean or sum.")])
    return _LOSSES[name](reduction=reduction)


def _own_loss(name: str) -> Callable[..., object]:
    found = resolve("loss", name)
    if not inspect.isclass(found):
        return found
    check_arguments("loss", found, {})
    made: object = found()
    if not callable(made):
        text = f'"{name}" makes a {found.__name__}, which cannot be called with (output, target).'
        raise RunFileError([Mistake("loss", text)])
    return made
