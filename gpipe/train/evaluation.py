"""How good a model is on rows that it was not trained on."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.train.batches import Rows, in_order
from gpipe.train.loss import Loss

__all__ = ["Evaluation", "evaluate"]


@dataclass
class Evaluation:
    """What an evaluation found.

    Attributes:
        loss: Over all rows.
        accuracy: Share of the targets that were hit, 0…1; None for targets that are no classes.
    """

    loss: float
    accuracy: float | None

    def __str__(self) -> str:
        if self.accuracy is None:
            return f"test loss {self.loss:.4f}"
        return f"test accuracy {self.accuracy:.2%}"


@dataclass
class _Sums:
    loss: float = 0.0
    weight: float = 0.0
    num_hits: int = 0
    num_targets: int = 0

    def evaluation(self) -> Evaluation:
        accuracy = self.num_hits / self.num_targets if self.num_targets else None
        return Evaluation(self.loss / self.weight if self.weight else 0.0, accuracy)


def evaluate(model: nn.Module, loss: Loss, rows: Rows, batch_size: int) -> Evaluation:
    """Looks at every row once, in eval mode and without gradients; the mode is put back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _evaluate(model, loss, rows, batch_size)
    finally:
        model.train(was_training)


def _evaluate(model: nn.Module, loss: Loss, rows: Rows, batch_size: int) -> Evaluation:
    sums = _Sums()
    for input, target, num_rows in in_order(rows, batch_size):
        output = model(input)
        target = _beside(target, output)
        batch_loss, weight = loss.total(output, target, num_rows)
        sums.loss += batch_loss
        sums.weight += weight
        _count_hits(sums, output, target, loss.ignored_class)
    return sums.evaluation()


def _beside(target: Any, output: Any) -> Any:
    if isinstance(target, Tensor) and isinstance(output, Tensor):
        return target.to(output.device)
    return target


def _count_hits(sums: _Sums, output: Any, target: Any, ignored_class: int | None) -> None:
    if ignored_class is None or not isinstance(target, Tensor) or target.is_floating_point():
        return  # these targets are no classes
    counts = target != ignored_class
    class_dim = min(1, output.dim() - 1)  # as in torch's losses: (rows, classes, …) or (classes,)
    sums.num_hits += int(((output.argmax(class_dim) == target) & counts).sum())
    sums.num_targets += int(counts.sum())
