"""One stage during one mini-batch: its three actions."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from gpipe.stage.boundary import Boundary, Gradients, pack, unpack
from gpipe.stage.recompute import recomputing
from gpipe.stage.stage import Stage

__all__ = ["Head", "StageRun"]

Head = Callable[[int, Any], Boundary]
"""What follows the last stage, such as a loss: (micro-batch, output) -> what has a backward."""


class _Held(NamedTuple):
    """What a micro-batch leaves in a stage from its forward to its backward."""

    inputs: Boundary
    outputs: Boundary | None
    """With the graph; None between a forward that is to be recomputed and its recompute."""


class StageRun:
    """Carries out the actions of one stage for one mini-batch, and holds what lies between them.

    Args:
        stage: The layers.
        keeps_graph: Whether a backward will come; without one nothing is held.
        recomputed: The micro-batches whose graph is dropped and built again by a recompute.
        head: Called with the stage's output in the action that builds the graph of the backward.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        keeps_graph: bool,
        recomputed: Collection[int] = frozenset(),
        head: Head | None = None,
    ) -> None:
        self.stage = stage
        self._layers = stage.layers
        self._keeps_graph = keeps_graph
        self._recomputed = frozenset(recomputed)
        self._head = head
        self._held: dict[int, _Held] = {}

    def forward(self, microbatch: int, inputs: Boundary) -> Boundary | None:
        """Run the layers; what the next stage gets, None where the head takes it."""
        drops_graph = microbatch in self._recomputed
        head = None if drops_graph else self._head
        outputs = self._compute("forward", microbatch, inputs, head)
        if self._keeps_graph:
            self._held[microbatch] = _Held(inputs, None if drops_graph else outputs)
        return None if self._head else outputs.detached()

    def recompute(self, microbatch: int, _: None = None) -> None:
        """Run the layers again on the same inputs, this time keeping the graph."""
        inputs = self._held[microbatch].inputs
        with recomputing():
            outputs = self._compute("recompute", microbatch, inputs, self._head)
        self._held[microbatch] = _Held(inputs, outputs)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        """Differentiate; the gradients of the inputs, for the stage before.

        The parameters' gradients are added to those of the layers' aliases.
        """
        inputs, outputs = self._held.pop(microbatch)
        assert outputs is not None, "a backward came before its recompute"
        try:
            _differentiate(outputs.tensors, gradients)
        except BaseException as error:
            error.add_note(self._place("backward", microbatch, self.stage.layer_range))
            raise
        return [tensor.grad for tensor in inputs.tensors]

    def _compute(
        self, action: str, microbatch: int, inputs: Boundary, head: Head | None
    ) -> Boundary:
        stage = self.stage
        if not self._keeps_graph or stage.modifies_input is False:
            return self._through_layers(action, microbatch, inputs, head)
        # What a layer writes into must be neither a leaf nor what a recompute starts from.
        copies = inputs.copied()
        versions = [tensor._version for tensor in copies.tensors]
        outputs = self._through_layers(action, microbatch, copies, head)
        modified = versions != [tensor._version for tensor in copies.tensors]
        stage.modifies_input = modified or bool(stage.modifies_input)
        return outputs

    def _through_layers(
        self, action: str, microbatch: int, inputs: Boundary, head: Head | None
    ) -> Boundary:
        value = unpack(inputs)
        position = 0
        try:
            for layer in self._layers:
                value = layer(value)
                position += 1
            return pack(value) if head is None else head(microbatch, value)
        except BaseException as error:
            at_layer = position < len(self._layers)
            layer_name = self.stage.layer_name(position) if at_layer else "the loss"
            error.add_note(self._place(action, microbatch, layer_name))
            raise

    def _place(self, action: str, microbatch: int, layers: str) -> str:
        return f"gpipe: in stage {self.stage.index}, {layers}, micro-batch {microbatch}, {action}"


def _differentiate(outputs: list[Tensor], gradients: Gradients) -> None:
    roots, seeds = [], []
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is not None and output.requires_grad:
            roots.append(output)
            seeds.append(gradient)
    if roots:
        # `torch.autograd.backward` without its checks of what we made ourselves: they cost as much
        # as the backward of a small layer (15 of 43 microseconds).
        _engine_run_backward(
            tuple(roots),
            tuple(seeds),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
