"""One layer, once forward and backward."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gpipe.profiling.copying import own_copy
from gpipe.profiling.graph import has_reentrant_checkpoint
from gpipe.stage.boundary import Boundary, pack, unpack
from gpipe.stage.joint import join_skips, part_skips
from gpipe.stage.skip import SkipStore, using

__all__ = ["Attempt", "Call"]

Call = Callable[[Any], Any]
"""A layer, or the last one and a loss behind it: input -> output."""


class Attempt:
    """A forward and a backward of one layer, both with what comes before them already done.

    Gradients go into `totals`, which several attempts may share, as those of micro-batches add up.
    Those of a reentrant checkpoint go into `.grad` instead, where such a one has to put them.

    Args:
        call: The layer.
        inputs: What it takes, with the skips that it pops.
        parameters: Those that it computes with.
        totals: The gradients so far, by the position of the parameter.
    """

    def __init__(
        self,
        call: Call,
        inputs: Boundary,
        parameters: Sequence[Parameter],
        totals: dict[int, Tensor] | None = None,
    ) -> None:
        leaves = inputs.detached()
        self._call = call
        self._leaves = [tensor for tensor in leaves.tensors if tensor.requires_grad]
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._totals = {} if totals is None else totals
        # Copies, since a layer may write into its input, and must not write into a leaf.
        self.inputs = [own_copy(tensor) for tensor in leaves.tensors]
        boundary, skips = part_skips(Boundary(self.inputs, leaves.structure))
        self._value = unpack(boundary)
        self._store = SkipStore({key: unpack(skip) for key, skip in skips.items()})
        self._roots: list[Tensor] = []
        self._seeds: list[Tensor] = []
        self._reaches_all = False

    def forward(self) -> None:
        """Run the layer."""
        with using(self._store):
            self._output = self._call(self._value)

    def outputs(self) -> Boundary:
        """What the layer returned, with the skips that it stashed."""
        left = {key: pack(tensor) for key, tensor in self._store.left().items()}
        return join_skips(pack(self._output), left)

    def prepare_backward(self) -> None:
        """Make the gradients that enter the backward, as the next layer would send them."""
        self._roots = [tensor for tensor in self.outputs().tensors if tensor.requires_grad]
        self._seeds = [_like(tensor) for tensor in self._roots]
        self._reaches_all = has_reentrant_checkpoint(self._roots)

    def backward(self) -> None:
        """Differentiate, where there is something to be differentiated."""
        if not (self._roots and (self._leaves or self._parameters)):
            return
        with _without_autocast(self._roots[0].device.type):
            if self._reaches_all:
                torch.autograd.backward(self._roots, self._seeds)
            else:
                self._differentiate()

    def _differentiate(self) -> None:
        wanted = [*self._leaves, *self._parameters]
        gradients = torch.autograd.grad(self._roots, wanted, self._seeds, allow_unused=True)
        for position, gradient in enumerate(gradients[len(self._leaves) :]):
            if gradient is not None and gradient.layout == torch.strided:
                self._add(position, gradient)

    def _add(self, position: int, gradient: Tensor) -> None:
        if position in self._totals:
            self._totals[position].add_(gradient)
        else:
            self._totals[position] = gradient.clone()  # it may be expanded


def _like(tensor: Tensor) -> Tensor:
    # There are no ones of a sparse layout, and any values do.
    is_dense = tensor.layout == torch.strided
    return torch.ones_like(tensor) if is_dense else tensor.detach().clone()


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Where a backward runs by custom: autocast has ended before."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
