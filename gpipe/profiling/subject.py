"""What is profiled: a model and rows for it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gpipe.profiling.attempt import Call
from gpipe.profiling.reach import modules_in
from gpipe.stage.boundary import Boundary, unpack
from gpipe.stage.joint import join_skips, part_skips
from gpipe.stage.microbatch import Batch, Split, num_rows
from gpipe.stage.sequential import require_sequential
from gpipe.stage.skip import SkipKey
from gpipe.stage.skip_route import skip_routes

__all__ = ["Lane", "LossFunction", "Subject"]

LossFunction = Callable[[Any, Any], Any]

MIN_ROWS_TO_HALVE = 4  # batch normalisation takes no batch of one row


class Subject:
    """A model, a sample, and perhaps a loss behind it.

    Args:
        module: The model.
        sample: Its input, such as one micro-batch.
        target: What the loss takes besides the output.
        loss_fn: The loss, which then counts as a part of the last layer.
        split: Along which dimension tensors are cut, as `GPipe` takes it.

    Raises:
        TypeError: `module` is no Sequential.
        ValueError: It has no layer, a skip is not stashed once and then popped once, or tensors
            disagree on the number of rows.
    """

    def __init__(
        self,
        module: nn.Sequential,
        sample: Any,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        split: Split = None,
    ) -> None:
        require_sequential(module)
        split = 0 if split is None else split
        self._batch = Batch.of("sample", sample, split)
        self._target = Batch.of("target", target, split if isinstance(split, int) else 0)
        self._loss_fn = loss_fn
        own = set(module.modules())
        self._of_loss = [part for each in modules_in(loss_fn) for part in _apart(each, own)]
        self.names = [name for name, _ in module.named_children()]
        self.layers = list(module.children())
        self.pops: list[list[SkipKey]] = [[] for _ in self.layers]
        for route in skip_routes(self.layers):
            self.pops[route.pop_layer].append(route.key)
        rows = num_rows(self._batch) if loss_fn is None else num_rows(self._batch, self._target)
        if rows == 0:
            raise ValueError("The sample has 0 rows. Pass at least one.")
        self._num_lanes = 2 if rows >= MIN_ROWS_TO_HALVE else 1
        self.rows = rows, rows // self._num_lanes

    def lanes(self, moved: Callable[[Tensor], Tensor]) -> tuple["Lane", "Lane"]:
        """All rows, and half of them where there are enough; moved to where the layers are.

        Where there are not, the same rows twice: what both find is a constant.
        """
        samples = self._batch.slices(1)[0], self._batch.slices(self._num_lanes)[-1]
        targets = self._target.slices(1)[0], self._target.slices(self._num_lanes)[-1]
        full, fewer = map(partial(_moved, moved), samples)
        full_target, fewer_target = map(partial(_moved, moved), targets)
        return Lane(full, full_target), Lane(fewer, fewer_target)

    def calls(self, index: int, lanes: Sequence["Lane"]) -> list[Call]:
        """The layer, for each lane; the last one with the loss behind it."""
        layer, loss_fn = self.layers[index], self._loss_fn
        if loss_fn is None or index < len(self.layers) - 1:
            return [layer for _ in lanes]
        return [partial(_with_loss, layer, loss_fn, lane.target) for lane in lanes]

    def modules(self, index: int) -> list[nn.Module]:
        """What computes there: the layer, the last one with the modules of the loss."""
        is_last = index == len(self.layers) - 1
        return [self.layers[index], *(self._of_loss if is_last else ())]

    def describe(self, index: int) -> str:
        """A layer in words."""
        kind = type(self.layers[index]).__name__
        return f"layer {index} ('{self.names[index]}', {kind})"

    def require_values(self) -> None:
        """Refuse tensors without values.

        Raises:
            ValueError: A parameter, a buffer or a tensor of the sample is on the meta device.
        """
        held = [tensor for layer in self.layers for tensor in _tensors_of(layer)]
        given = [*self._batch.boundary.tensors, *self._target.boundary.tensors]
        for what, tensors in (("The model has", held), ("The sample has", given)):
            if any(tensor.is_meta for tensor in tensors):
                raise ValueError(
                    f"{what} tensors on the meta device, which have no values to compute with. "
                    "Use profile_meta, which needs none."
                )

    @property
    def parameters(self) -> list[Parameter]:
        """Those of the layers and of the loss."""
        owners = [*self.layers, *self._of_loss]
        return [parameter for owner in owners for parameter in owner.parameters()]

    @property
    def dtype(self) -> torch.dtype:
        """That of the parameters, or of the sample if there are none."""
        held = [tensor for layer in self.layers for tensor in _tensors_of(layer)]
        tensors = [*held, *self._batch.boundary.tensors]
        floating = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        return floating[0] if floating else tensors[0].dtype


class Lane:
    """Some rows on their way through the layers, with the skips that jump over them.

    Args:
        value: What the next layer takes.
        target: What the loss will take.
    """

    def __init__(self, value: Boundary, target: Boundary) -> None:
        self.value = value
        self.target = target
        self._skips: dict[SkipKey, Boundary] = {}

    def inputs(self, pops: Sequence[SkipKey]) -> Boundary:
        """What the next layer takes, with the skips that it pops."""
        return join_skips(self.value, {key: self._skips[key] for key in pops})

    def advance(self, outputs: Boundary, pops: Sequence[SkipKey]) -> None:
        """Go on to the layer behind it, with what it gave."""
        for key in pops:
            del self._skips[key]
        self.value, stashed = part_skips(outputs)
        self._skips.update(stashed)


def _moved(moved: Callable[[Tensor], Tensor], boundary: Boundary) -> Boundary:
    tensors = [moved(tensor).requires_grad_(tensor.requires_grad) for tensor in boundary.tensors]
    return Boundary(tensors, boundary.structure)


def _apart(module: nn.Module, own: set[nn.Module]) -> list[nn.Module]:
    """The module, or those parts of it that have nothing of the model."""
    if own.isdisjoint(module.modules()):
        return [module]
    parts = (child for child in module.children() if child not in own)
    return [part for child in parts for part in _apart(child, own)]


def _tensors_of(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(), *layer.buffers()]


def _with_loss(layer: nn.Module, loss_fn: LossFunction, target: Boundary, value: Any) -> Any:
    return loss_fn(layer(value), unpack(target))
