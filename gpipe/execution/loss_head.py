"""What follows the last stage in a step: the loss, and the gradient that starts from it."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gpipe.execution.inlet import Inlet
from gpipe.stage.boundary import Boundary, Gradients, pack, unpack
from gpipe.stage.loss import Parts, Reduction
from gpipe.stage.microbatch import join

__all__ = ["LossHead"]


class LossHead:
    """Takes the loss of each micro-batch and lets its gradient enter the last stage.

    Args:
        reduction: The loss, and how it adds up.
        targets: The target of each micro-batch.
        num_rows: The rows of each micro-batch.
        inlet: What brings the targets to the last stage, where they are not there.
        loss_scale: A factor of the gradients, not of the loss that is shown.
        output_dim: Along which dimension outputs are joined; None: they are not wanted.
        total_rows: The rows of all replicas; None where this is the only one.
    """

    def __init__(
        self,
        reduction: Reduction,
        targets: Sequence[Boundary],
        num_rows: Sequence[int],
        inlet: Inlet | None = None,
        *,
        loss_scale: float = 1.0,
        output_dim: int | None = None,
        total_rows: int | None = None,
    ) -> None:
        self._reduction = reduction
        self._targets = targets
        self._num_rows = num_rows
        self._total_rows = sum(num_rows) if total_rows is None else total_rows
        self.inlet = inlet
        self._loss_scale = loss_scale
        self._output_dim = output_dim
        self._outputs: dict[int, Boundary] = {}
        self._scalars: dict[int, tuple[Tensor, ...]] = {}
        self._seeds: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, microbatch: int, output: Any) -> Boundary:
        """The loss of one micro-batch, for the last stage to hold with its graph."""
        if self._output_dim is not None:
            self._outputs[microbatch] = pack(output).detached()
        target = self._targets[microbatch]
        if self.inlet is not None:
            target = self.inlet(target)
        scalars = self._reduction.scalars(output, unpack(target))
        self._scalars[microbatch] = tuple([scalar.detach() for scalar in scalars])
        return Boundary(list(scalars), None)

    def gradients(self, microbatch: int) -> Gradients:
        """What enters the last stage's backward of one micro-batch: the loss's own gradient."""
        loss, *others = self._scalars[microbatch]
        return [self._seed(self._num_rows[microbatch], loss), *[None] * len(others)]

    def tensors(self) -> list[Tensor]:
        """What the caller is given, or that which it is made of."""
        scalars = chain.from_iterable(self._scalars.values())
        return [*scalars, *(each for out in self._outputs.values() for each in out.tensors)]

    def parts(self) -> Parts:
        """What the mini-batch gives to the loss."""
        scalars = self._in_order(self._scalars)
        return self._reduction.parts(scalars, self._num_rows, self._total_rows)

    def total(self, parts: Parts) -> Tensor:
        """The loss of the mini-batch, without a graph, from the parts of all replicas."""
        return self._reduction.total(parts)

    def correction(self, parts: Parts) -> Tensor | None:
        """The factor that all gradients still need, such as by a total weight; None for one."""
        return self._reduction.correction(parts, self._total_rows)

    def output(self) -> Any:
        """The output of the mini-batch, without a graph; None where it was not to be kept."""
        if self._output_dim is None:
            return None
        whole = join(self._in_order(self._outputs), self._output_dim)
        return unpack(Boundary([tensor.detach() for tensor in whole.tensors], whole.structure))

    def _seed(self, num_rows: int, loss: Tensor) -> Tensor:
        # Even slices have at most two sizes: the tensors are made once, not once a micro-batch.
        if (num_rows, loss.dtype) not in self._seeds:
            factor = self._loss_scale * self._reduction.seed(num_rows, self._total_rows)
            self._seeds[num_rows, loss.dtype] = torch.full_like(loss, factor)
        return self._seeds[num_rows, loss.dtype]

    def _in_order(self, by_microbatch: dict[int, Any]) -> list[Any]:
        return [by_microbatch[microbatch] for microbatch in range(len(self._num_rows))]
