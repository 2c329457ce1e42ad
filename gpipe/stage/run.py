"""One stage during one mini-batch: its three actions."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from gpipe.stage.batchnorm import Collector, DeferredBatchNorm
from gpipe.stage.boundary import Boundary, Gradients
from gpipe.stage.buffers import Buffer, all_buffers
from gpipe.stage.capture import Capture
from gpipe.stage.habits import Habits
from gpipe.stage.held_bytes import held_bytes
from gpipe.stage.passage import Head, How, Passage, Through
from gpipe.stage.randomness import Randomness, holding_generator
from gpipe.stage.recompute import Recording
from gpipe.stage.roots import Root, differentiate, roots_of
from gpipe.stage.stage import Stage

__all__ = ["MiniBatchContext", "StageRun"]


_NOTHING = nullcontext()


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

    inputs: Boundary
    roots: list[Root | None] | None
    """One for each output; None between a forward that drops the graph and its recompute."""
    recording: Recording | None
    capture: Capture | None


class StageRun:
    """Carries out the actions of one stage for one mini-batch, and holds what lies between them.

    Args:
        stage: The layers.
        context: What holds for all stages.
        recomputed: The micro-batches whose graph is dropped and built again by a recompute.
        head: Called with the stage's output in the action that builds the graph of the backward.
        wrap: Changes how values go through the layers.
        sends_away: Whether another process gets the output, which is kept here until it answers.
    """

    def __init__(
        self,
        stage: Stage,
        context: MiniBatchContext,
        recomputed: Collection[int] = frozenset(),
        head: Head | None = None,
        wrap: Callable[[Through], Through] | None = None,
        *,
        sends_away: bool = False,
    ) -> None:
        self.stage = stage
        self._looks_closely = context.looks_closely
        self._keeps_graph = context.keeps_graph
        self._habits = stage.habits()
        self._recomputed = recomputed
        self._buffers = _watched_buffers(stage) if recomputed else []
        self._has_head = head is not None
        # A head gives single numbers.
        self._keeps_outputs = sends_away or self._has_head
        self._held: dict[int, _Held] = {}
        # Wrappers stand around the way through the layers only where there is something to do.
        through: Through = Passage(stage, self._habits, context.randomness, head).through
        if wrap is not None:
            through = wrap(through)
        if context.keeps_graph:
            guard = _on_inputs if self._habits.modifies_input is False else _on_copies
            through = guard(through, self._habits)
        collector = context.collector
        self._through = through if collector is None else _observed(through, collector)
        self._repeated = through
        self._replaying = _nothing if collector is None else collector.replaying
        self._how = How("forward", self._has_head)
        self._catches = context.keeps_graph and (
            context.looks_closely or not self._habits.keeps_layout
        )

    @property
    def num_held(self) -> int:
        """How many micro-batches are between their forward and their backward."""
        return len(self._held)

    def held_bytes(self) -> int:
        """What they hold: inputs, and what their graphs have saved."""
        held = list(self._held.values())
        tensors = [tensor for each in held for tensor in each.inputs.tensors]
        edges = [root.edge for each in held for root in each.roots or () if root is not None]
        return held_bytes(tensors, edges)

    def forward(self, microbatch: int, inputs: Boundary) -> Boundary | None:
        """Run the layers; what the next stage gets, None where the head takes it."""
        capture = Capture.of(inputs) if self._catches else None
        if microbatch in self._recomputed:
            outputs = self._forward_dropping(microbatch, inputs, capture)
        else:
            outputs = self._through(microbatch, inputs, self._how)
            if self._keeps_graph:
                roots = roots_of(outputs, keeps_memory=self._keeps_outputs)
                self._held[microbatch] = _Held(inputs, roots, None, capture)
        return None if self._has_head else outputs.detached()

    def recompute(self, microbatch: int, _: None = None) -> None:
        """Run the layers again on the same inputs, this time keeping the graph.

        Raises:
            RuntimeError: They gave something else than in the forward.
        """
        held = self._held[microbatch]
        inputs, recording, capture = held.inputs, held.recording, held.capture
        assert recording is not None, "a recompute without a forward that dropped its graph"
        recording.require_same_start(inputs)
        how = How("recompute", self._has_head, recording.witness)
        with recording.replaying(), self._replaying():
            outputs = self._repeated(microbatch, inputs, how)
        if not self._has_head:
            recording.require_same_shapes(outputs.tensors)
        roots = roots_of(outputs, keeps_memory=self._has_head)
        self._held[microbatch] = _Held(inputs, roots, None, capture)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        """Differentiate; the gradients of the inputs, for the stage before.

        The parameters' gradients are added to those of the layers' aliases.
        """
        inputs, roots, _, capture = self._held.pop(microbatch)
        assert roots is not None, "a backward came before its recompute"
        try:
            if self._habits.replays or self._replaying is not _nothing:
                self._differentiate_alone(roots, gradients)
            else:
                differentiate(roots, gradients)
        except BaseException as error:
            error.add_note(self.stage.place(self.stage.layer_range, microbatch, "backward"))
            raise
        if capture is not None:
            return capture.gradients(inputs, self._habits)
        return [tensor.grad for tensor in inputs.tensors]

    def _differentiate_alone(self, roots: list[Root | None], gradients: Gradients) -> None:
        # A layer may hold a checkpoint of its own, which runs parts of it again here: it sets the
        # default generator for that, and normalises once more if it is a norm.
        with holding_generator() if self._habits.replays else _NOTHING, self._replaying():
            differentiate(roots, gradients)

    def _forward_dropping(
        self, microbatch: int, inputs: Boundary, capture: Capture | None
    ) -> Boundary:
        """A forward of which only the inputs are held, and what its recompute must know."""
        recording = Recording(self.stage, self._habits, self._buffers, self._looks_closely)
        outputs = self._through(microbatch, inputs, How("forward", False, recording.witness))
        recording.finish(inputs, outputs.tensors)
        self._held[microbatch] = _Held(inputs, None, recording, capture)
        return outputs


def _watched_buffers(stage: Stage) -> list[Buffer]:
    """Those that a forward may change; deferred norms leave theirs to the end of a mini-batch."""
    buffers = all_buffers(stage.layers)
    return [buffer for buffer in buffers if not isinstance(buffer.module, DeferredBatchNorm)]


def _nothing() -> AbstractContextManager[None]:
    return _NOTHING


def _on_copies(through: Through, habits: Habits) -> Through:
    """Give the layers copies: what they write into must be no leaf, and no recompute's start."""

    def wrapped(microbatch: int, inputs: Boundary, how: How) -> Boundary:
        copies = inputs.copied()
        versions = copies.versions()
        outputs = through(microbatch, copies, how)
        habits.modifies_input = versions != copies.versions() or bool(habits.modifies_input)
        return outputs

    return wrapped


def _on_inputs(through: Through, habits: Habits) -> Through:
    """Give the layers the inputs themselves, which they have always left alone so far."""

    def wrapped(microbatch: int, inputs: Boundary, how: How) -> Boundary:
        versions = inputs.versions()
        try:
            outputs = through(microbatch, inputs, how)
        except BaseException:
            # It may be torch's own error about writing into a leaf: next time there are copies.
            habits.modifies_input = None
            raise
        if versions != inputs.versions():
            habits.modifies_input = True
            raise RuntimeError(
                "A layer wrote into the input of its stage in place, which it had not done before. "
                "What was there is lost, so this mini-batch is refused. Run it again: the layer "
                "gets copies from now on."
            )
        return outputs

    return wrapped


def _observed(through: Through, collector: Collector) -> Through:
    def wrapped(microbatch: int, inputs: Boundary, how: How) -> Boundary:
        with collector.observing(microbatch):
            return through(microbatch, inputs, how)

    return wrapped
