"""The way of a value through the layers of one stage."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from gpipe.stage.boundary import Boundary, pack, unpack
from gpipe.stage.habits import Habits
from gpipe.stage.randomness import Randomness
from gpipe.stage.recompute import Recording
from gpipe.stage.stage import Stage

__all__ = ["Head", "How", "Passage", "Through"]

Head = Callable[[int, Any], Boundary]
"""What follows the last stage, such as a loss: (micro-batch, output) -> what has a backward."""


class How(NamedTuple):
    """In what way values go through the layers.

    Attributes:
        action: The name of the action, for the note on an exception.
        with_head: Whether the head takes the last output.
        witness: What sees each layer's output, where a close look is taken.
    """

    action: str
    with_head: bool
    witness: Recording | None = None


Through = Callable[[int, Boundary, How], Boundary]
"""The way of a micro-batch's inputs to the outputs of the last layer, or of the head."""


class Passage:
    """Takes values through the layers of one stage during one mini-batch.

    Args:
        stage: The layers.
        habits: What is known of them.
        randomness: That of the mini-batch.
        head: What follows the last layer of the last stage.
    """

    def __init__(
        self, stage: Stage, habits: Habits, randomness: Randomness, head: Head | None
    ) -> None:
        self._stage = stage
        self._layers = stage.layers
        self._device = stage.runs_on
        self._habits = habits
        self._randomness = randomness
        self._head = head
        self._head_draws: bool | None = None
        self._is_quiet = habits.knows_drawing and not habits.drawing

    def through(self, microbatch: int, inputs: Boundary, how: How) -> Boundary:
        """Call layer after layer, and the head if it is its turn.

        Raises:
            BaseException: What a layer raised, with a note of where and when.
        """
        value = unpack(inputs)
        witness = how.witness
        position = 0
        try:
            if self._is_quiet and witness is None:
                for layer in self._layers:
                    value = layer(value)
                    position += 1
            else:
                for layer in self._layers:
                    value = self._call(layer, position, microbatch, value)
                    if witness is not None:
                        witness.see(position, value)
                    position += 1
            return self._finish(microbatch, value) if how.with_head else pack(value)
        except BaseException as error:
            at_layer = position < len(self._layers)
            name = self._stage.layer_name(position) if at_layer else "the loss"
            error.add_note(self._stage.place(name, microbatch, how.action))
            raise

    def _call(self, layer: Callable[[Any], Any], position: int, microbatch: int, value: Any) -> Any:
        if not self._habits.may_draw(position):
            return layer(value)
        index = self._stage.first_layer + position
        called = self._randomness.run(layer, value, microbatch, index, self._device)
        if called.drew or called.looked:
            self._habits.drawing.add(position)
        self._habits.replays |= called.looked
        return called.result

    def _finish(self, microbatch: int, value: Any) -> Boundary:
        """The head; whether it draws is learnt in each mini-batch anew, since it may be another."""
        assert self._head is not None, "only the last stage has a head"
        if self._head_draws is False:
            return self._head(microbatch, value)
        index = self._stage.first_layer + len(self._layers)
        called = self._randomness.run(
            partial(self._head, microbatch), value, microbatch, index, self._device
        )
        self._head_draws = called.drew or called.looked
        self._habits.replays |= called.looked
        outputs: Boundary = called.result
        return outputs
