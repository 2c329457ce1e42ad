"""One stage during one mini-batch: its three actions."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from gpipe.stage.batchnorm import Collector
from gpipe.stage.boundary import NO_SKIPS, Boundary, Crossing, Gradients, pack, unpack
from gpipe.stage.passage import Head, Passage
from gpipe.stage.randomness import Randomness, generator_lock
from gpipe.stage.recompute import Recording
from gpipe.stage.skip import SkipStore, using
from gpipe.stage.stage import Stage

__all__ = ["MiniBatchContext", "SkipPorts", "StageRun"]


_NOTHING = nullcontext()


class SkipPorts(Protocol):
    """Where a stage's skips come from and go to, by their keys."""

    def receive(self, microbatch: int) -> Mapping[Any, Boundary]:
        """What earlier stages have stashed and this one pops."""

    def send(self, microbatch: int, skips: Mapping[Any, Boundary]) -> None:
        """What this stage has stashed and later ones pop."""

    def receive_gradients(self, microbatch: int, keys: Collection[Any]) -> list[Gradients]:
        """The gradients of what was sent."""

    def send_gradients(self, microbatch: int, gradients: Mapping[Any, Gradients]) -> None:
        """The gradients of what was received."""


class MiniBatchContext(NamedTuple):
    """What the runs of all stages have in common in one mini-batch.

    Attributes:
        keeps_graph: Whether a backward will come; without one nothing is held.
        randomness: What gives each layer its random numbers.
        collector: What gathers the moments of deferred batch normalisation, if there is any.
        looks_closely: Whether recomputes are compared with their forwards layer by layer.
    """

    keeps_graph: bool
    randomness: Randomness
    collector: Collector | None = None
    looks_closely: bool = False


class _Held(NamedTuple):
    """What a micro-batch leaves in a stage from its forward to its backward."""

    inputs: Crossing
    outputs: Crossing | None
    """With their graph; None between a forward that drops it and the recompute."""
    recording: Recording | None = None


class StageRun:
    """Carries out the actions of one stage for one mini-batch, and holds what lies between them.

    Args:
        stage: The layers.
        context: What holds for all stages.
        recomputed: The micro-batches whose graph is dropped and built again by a recompute.
        head: Called with the stage's output in the action that builds the graph of the backward.
        ports: The ways of the skips; None where the stage neither stashes nor pops.
    """

    def __init__(
        self,
        stage: Stage,
        context: MiniBatchContext,
        recomputed: Collection[int] = frozenset(),
        head: Head | None = None,
        ports: SkipPorts | None = None,
    ) -> None:
        self.stage = stage
        self._context = context
        self._habits = stage.habits()
        self._passage = Passage(stage, self._habits, context.randomness, head)
        self._recomputed = frozenset(recomputed)
        self._has_head = head is not None
        self._ports = ports
        self._collector = context.collector
        self._held: dict[int, _Held] = {}

    def forward(self, microbatch: int, received: Boundary) -> Boundary | None:
        """Run the layers; what the next stage gets, None where the head takes it."""
        skips = NO_SKIPS if self._ports is None else self._ports.receive(microbatch)
        inputs = Crossing(received.to(self.stage.device), skips)
        if microbatch in self._recomputed:
            outputs = self._forward_dropping(microbatch, inputs)
        else:
            with self._observing(microbatch):
                outputs = self._compute(microbatch, inputs, "forward", None, self._has_head)
            if self._context.keeps_graph:
                self._held[microbatch] = _Held(inputs, outputs)
        if self._ports is not None:
            sent = {key: skip.detached() for key, skip in outputs.skips.items()}
            self._ports.send(microbatch, sent)
        return None if self._has_head else outputs.boundary.detached()

    def recompute(self, microbatch: int, _: None = None) -> None:
        """Run the layers again on the same inputs, this time keeping the graph.

        Raises:
            RuntimeError: They gave something else than in the forward.
        """
        held = self._held[microbatch]
        inputs, recording = held.inputs, held.recording
        assert recording is not None, "a recompute without a forward that dropped its graph"
        witness = recording if recording.looks_closely else None
        with recording.replaying(), self._replaying():
            outputs = self._compute(microbatch, inputs, "recompute", witness, self._has_head)
        if not self._has_head:
            recording.require_same_shapes(outputs.tensors)
        self._held[microbatch] = _Held(inputs, outputs)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        """Differentiate; the gradients of the inputs, for the stage before.

        The parameters' gradients are added to those of the layers' aliases.
        """
        inputs, outputs, _ = self._held.pop(microbatch)
        assert outputs is not None, "a backward came before its recompute"
        if self._ports is not None:
            for skip in self._ports.receive_gradients(microbatch, outputs.skips):
                gradients = [*gradients, *skip]
        try:
            self._differentiate(outputs, gradients)
        except BaseException as error:
            error.add_note(self.stage.place(self.stage.layer_range, microbatch, "backward"))
            raise
        if self._ports is not None:
            skips = {key: _gradients_of(skip) for key, skip in inputs.skips.items()}
            self._ports.send_gradients(microbatch, skips)
        return _gradients_of(inputs.boundary)

    def _forward_dropping(self, microbatch: int, inputs: Crossing) -> Crossing:
        recording = Recording(self.stage, self._habits, self._context.looks_closely)
        witness = recording if recording.looks_closely else None
        with self._observing(microbatch):
            outputs = self._compute(microbatch, inputs, "forward", witness, with_head=False)
        recording.finish(outputs.tensors)
        self._held[microbatch] = _Held(inputs, None, recording)
        return outputs

    def _observing(self, microbatch: int) -> AbstractContextManager[None]:
        return _NOTHING if self._collector is None else self._collector.observing(microbatch)

    def _replaying(self) -> AbstractContextManager[None]:
        return _NOTHING if self._collector is None else self._collector.replaying()

    def _compute(
        self,
        microbatch: int,
        inputs: Crossing,
        action: str,
        witness: Recording | None,
        with_head: bool,
    ) -> Crossing:
        habits = self._habits
        if not self._context.keeps_graph or habits.modifies_input is False:
            return self._through(microbatch, inputs, action, witness, with_head)
        # What a layer writes into must be neither a leaf nor what a recompute starts from.
        copies = inputs.copied()
        versions = [tensor._version for tensor in copies.tensors]
        outputs = self._through(microbatch, copies, action, witness, with_head)
        modified = versions != [tensor._version for tensor in copies.tensors]
        habits.modifies_input = modified or bool(habits.modifies_input)
        return outputs

    def _through(self, microbatch: int, inputs: Crossing, *how: Any) -> Crossing:
        value = unpack(inputs.boundary)
        if self._ports is None:
            return Crossing(self._passage.through(microbatch, value, *how), NO_SKIPS)
        store = SkipStore({key: unpack(skip) for key, skip in inputs.skips.items()})
        with using(store):
            boundary = self._passage.through(microbatch, value, *how)
        return Crossing(boundary, {key: pack(skip) for key, skip in store.left().items()})

    def _differentiate(self, outputs: Crossing, gradients: Gradients) -> None:
        if not self._habits.drawing:
            _differentiate(outputs.tensors, gradients)
            return
        # A layer that draws may hold a checkpoint, which sets the generator in its backward.
        with generator_lock:
            _differentiate(outputs.tensors, gradients)


def _differentiate(outputs: list[Tensor], gradients: Gradients) -> None:
    roots, seeds = [], []
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is not None and output.requires_grad:
            roots.append(output)
            is_here = gradient.device == output.device
            seeds.append(gradient if is_here else gradient.to(output.device))
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


def _gradients_of(boundary: Boundary) -> Gradients:
    return [tensor.grad for tensor in boundary.tensors]
