"""Gradients of a stage's inputs, in the memory layout in which they come."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe.stage.boundary import Boundary, Gradients
from gpipe.stage.habits import Habits

__all__ = ["Capture"]


class Capture(NamedTuple):
    """Catches the gradients of a boundary's tensors on their way to `.grad`.

    Between two layers of one stage a gradient keeps whatever strides it has. A leaf would change
    them to its own, and sums over it would have other bits than where the model is not cut.
    """

    caught: dict[int, Tensor]

    @classmethod
    def of(cls, inputs: Boundary) -> "Capture | None":
        """Begin to catch, before the inputs are used; None where no gradient can come."""
        if not any(tensor.requires_grad for tensor in inputs.tensors):
            return None
        capture = cls({})
        for position, tensor in enumerate(inputs.tensors):
            if tensor.requires_grad:
                catch = partial(capture.caught.__setitem__, position)
                tensor.register_hook(catch)  # type: ignore[no-untyped-call]
        return capture

    def gradients(self, inputs: Boundary, habits: Habits) -> Gradients:
        """What was caught for each tensor, and a note of whether it had to be."""
        layouts = [
            _same_layout(gradient, inputs.tensors[position])
            for position, gradient in self.caught.items()
        ]
        if False in layouts:
            habits.keeps_layout = False
        elif layouts and None not in layouts and habits.keeps_layout is None:
            habits.keeps_layout = True
        return [self.caught.get(position) for position in range(len(inputs.tensors))]


def _same_layout(gradient: Tensor, tensor: Tensor) -> bool | None:
    """Whether both have the same strides; None where that says nothing of other batches."""
    if gradient.layout != torch.strided or tensor.layout != torch.strided:
        return False
    strides = zip(tensor.shape, gradient.stride(), tensor.stride(), strict=True)
    if any(mine != other for size, mine, other in strides if size > 1):
        return False
    # Along a dimension of one element any stride will do, and a larger batch may show another.
    return None if 1 in tensor.shape else True
