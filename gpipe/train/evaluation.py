"""How good a model is on rows that it was not trained on."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.pipeline import GPipe
from gpipe.train.batches import Batch, Rows, in_order
from gpipe.train.loss import Loss
from gpipe.train.team import Team

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

    def plus(self, other: "_Sums") -> "_Sums":
        return _Sums(
            self.loss + other.loss,
            self.weight + other.weight,
            self.num_hits + other.num_hits,
            self.num_targets + other.num_targets,
        )

    def evaluation(self) -> Evaluation:
        accuracy = self.num_hits / self.num_targets if self.num_targets else None
        return Evaluation(self.loss / self.weight if self.weight else 0.0, accuracy)


def evaluate(
    model: nn.Module, loss: Loss, rows: Rows, batch_size: int, team: Team | None = None
) -> Evaluation:
    """Looks at every row once, in eval mode and without gradients; the mode is put back.

    Of several processes all call it, and each replica looks at its part of every mini-batch.
    """
    was_training = model.training
    model.eval()
    team = team or Team()
    try:
        with torch.no_grad():
            every = team.every(_summed(model, loss, in_order(rows, batch_size), team))
    finally:
        model.train(was_training)
    return reduce(_Sums.plus, every).evaluation()


def _summed(model: nn.Module, loss: Loss, batches: Iterable[Batch], team: Team) -> _Sums:
    """What this process sees: all of its replica where the output is, and nothing elsewhere."""
    sums = _Sums()
    for input, target, num_rows in map(team.part, batches):
        output = model(input)
        if isinstance(model, GPipe) and not model.has_last_stage:
            continue
        target = _beside(target, output)
        batch_loss, weight = loss.total(output, target, num_rows)
        sums.loss += batch_loss
        sums.weight += weight
        _count_hits(sums, output, target, loss.ignored_class)
    return sums


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
