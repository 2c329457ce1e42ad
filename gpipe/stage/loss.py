"""The loss of a mini-batch from the losses of its micro-batches."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe.stage.device import from_host

__all__ = ["REDUCTIONS", "LossFunction", "Parts", "Reduction", "reduction_of"]

LossFunction = Callable[[Any, Any], Any]

Scalars = tuple[Tensor, ...]
"""What a loss gives for one micro-batch; the first is differentiated."""


class Parts(NamedTuple):
    """What makes up the loss of a mini-batch; those of several replicas add up, part by part."""

    loss: Tensor
    """The sum of what is differentiated."""
    weight: Tensor | None = None
    """What that is divided by, where only the targets tell."""


class Reduction(ABC):
    """How the losses of micro-batches make up that of the mini-batch."""

    def __init__(self, loss_fn: LossFunction) -> None:
        self.loss_fn = loss_fn

    def scalars(self, output: Any, target: Any) -> Scalars:
        """The loss of one micro-batch."""
        return (_scalar(self.loss_fn(output, target), "loss_fn"),)

    @abstractmethod
    def seed(self, num_rows: int, total_rows: int) -> float:
        """The gradient that enters a micro-batch's loss, as far as it is known before the run."""

    @abstractmethod
    def parts(self, scalars: Sequence[Scalars], num_rows: Sequence[int], total_rows: int) -> Parts:
        """What the micro-batches give, of a mini-batch with so many rows in all replicas."""

    def total(self, parts: Parts) -> Tensor:
        """The loss of the mini-batch."""
        return parts.loss

    def correction(self, parts: Parts, total_rows: int) -> Tensor | None:
        """The factor that all gradients still need at the end; None for one."""
        return None


class _Mean(Reduction):
    """loss_fn averages over its rows: a slice counts by its share of the rows."""

    def seed(self, num_rows: int, total_rows: int) -> float:
        return num_rows / total_rows

    def parts(self, scalars: Sequence[Scalars], num_rows: Sequence[int], total_rows: int) -> Parts:
        losses = _stacked([loss for (loss,) in scalars])
        shares = [self.seed(rows, total_rows) for rows in num_rows]
        return Parts((losses * from_host(shares, losses)).sum())


class _Sum(Reduction):
    """loss_fn adds up over its rows."""

    def seed(self, num_rows: int, total_rows: int) -> float:
        return 1.0

    def parts(self, scalars: Sequence[Scalars], num_rows: Sequence[int], total_rows: int) -> Parts:
        return Parts(_stacked([loss for (loss,) in scalars]).sum())


class _Weighted(Reduction):
    """loss_fn gives (sum, weight): the loss is the sum of the sums by the sum of the weights."""

    def scalars(self, output: Any, target: Any) -> Scalars:
        result = self.loss_fn(output, target)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"loss_fn returned {type(result).__name__}, but with loss_reduction='weighted' it "
                "returns the pair (sum, weight). Return both, or choose another loss_reduction."
            )
        loss = _scalar(result[0], "the sum that loss_fn returned")
        return loss, _weight_on(loss, result[1])

    def seed(self, num_rows: int, total_rows: int) -> float:
        # The weight is known only at the end. Until then the rows stand for it, so that gradients
        # in half precision keep the size that they will have.
        return 1 / total_rows

    def parts(self, scalars: Sequence[Scalars], num_rows: Sequence[int], total_rows: int) -> Parts:
        weight = _stacked([weight for _, weight in scalars]).sum()
        return Parts(_stacked([loss for loss, _ in scalars]).sum(), weight)

    def total(self, parts: Parts) -> Tensor:
        assert parts.weight is not None
        return parts.loss / parts.weight

    def correction(self, parts: Parts, total_rows: int) -> Tensor | None:
        assert parts.weight is not None
        # At least single precision: half cannot hold the number of rows.
        weight = parts.weight.to(torch.promote_types(parts.loss.dtype, torch.float32))
        # Without any valid target torch's own mean is NaN, and its gradients are 0.
        return torch.where(weight == 0, 0.0, total_rows / weight)


REDUCTIONS: dict[str, type[Reduction]] = {"mean": _Mean, "sum": _Sum, "weighted": _Weighted}


def reduction_of(loss_fn: LossFunction, loss_reduction: str) -> Reduction:
    """The reduction by name; torch's own mean of a cross-entropy is a weighted one.

    Raises:
        ValueError: The name is unknown, or contradicts the `reduction` of a torch loss.
        TypeError: `loss_fn` cannot be called.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is {loss_fn!r}, which cannot be called. Pass a function.")
    if loss_reduction not in REDUCTIONS:
        raise ValueError(
            f"loss_reduction is {loss_reduction!r}. Choose one of {', '.join(REDUCTIONS)}."
        )
    declared = getattr(loss_fn, "reduction", loss_reduction) if _is_torch_loss(loss_fn) else None
    means = ("mean", "batchmean")
    agrees = declared == loss_reduction or (declared in means and loss_reduction == "mean")
    if declared is not None and not agrees and loss_reduction != "weighted":
        raise ValueError(
            f"loss_fn.reduction is {declared!r} and loss_reduction is {loss_reduction!r}. "
            "Let both be 'mean', or both 'sum'."
        )
    if loss_reduction == "mean" and _divides_by_weight(loss_fn):
        return _Weighted(_weighted_cross_entropy(loss_fn))
    return REDUCTIONS[loss_reduction](loss_fn)


def _is_torch_loss(loss_fn: LossFunction) -> bool:
    return isinstance(loss_fn, nn.modules.loss._Loss)


def _divides_by_weight(loss_fn: LossFunction) -> bool:
    # A subclass may define its mean differently, so only torch's own are taken.
    torch_losses = (nn.CrossEntropyLoss, nn.NLLLoss)
    return type(loss_fn) in torch_losses or loss_fn in (
        functional.cross_entropy,
        functional.nll_loss,
    )


def _weighted_cross_entropy(loss_fn: Any) -> LossFunction:
    """The same loss as (sum, weight), the weight being what torch divides its mean by."""
    summed: Any
    if isinstance(loss_fn, nn.Module):
        summed = copy.copy(loss_fn)
        summed.reduction = "sum"
        class_weights, ignored = summed.weight, summed.ignore_index
    else:
        summed = partial(loss_fn, reduction="sum")
        class_weights, ignored = None, -100

    def sum_and_weight(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return summed(output, target), _target_weight(output, target, class_weights, ignored)

    return sum_and_weight


def _target_weight(
    output: Tensor, target: Tensor, class_weights: Tensor | None, ignored: int
) -> Tensor:
    if target.is_floating_point():  # probabilities of classes: each row counts as one
        class_dim = 1 if output.dim() > 1 else 0
        return target.new_full((), output.numel() / max(1, output.shape[class_dim]))
    valid = target != ignored
    if class_weights is None:
        return valid.sum()
    # Not `target[valid]`, whose size the host would have to wait for.
    return class_weights[target.where(valid, 0)].where(valid, 0).sum()


def _scalar(loss: Any, what: str) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{what} is of type {type(loss).__name__}. Return a tensor with one number."
        )
    if loss.numel() != 1:
        raise ValueError(f"{what} has shape {tuple(loss.shape)}. Return a tensor with one number.")
    return loss


def _stacked(scalars: Sequence[Tensor]) -> Tensor:
    return torch.stack([scalar if scalar.dim() == 0 else scalar.reshape(()) for scalar in scalars])


def _weight_on(loss: Tensor, weight: Any) -> Tensor:
    """The weight as a tensor beside the loss; the host waits for nothing."""
    if isinstance(weight, Tensor):
        return weight.detach().to(loss.device, non_blocking=True).reshape(())
    return torch.full((), weight, device=loss.device)
