"""The way of a value through the layers of one stage."""

from collections.abc import Callable
from functools import partial
from typing import Any

from gpipe.stage.boundary import Boundary, pack
from gpipe.stage.habits import Habits
from gpipe.stage.randomness import Randomness
from gpipe.stage.recompute import Recording
from gpipe.stage.stage import Stage

__all__ = ["Head", "Passage"]

Head = Callable[[int, Any], Boundary]
"""What follows the last stage, such as a loss: (micro-batch, output) -> what has a backward."""


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
        self._habits = habits
        self._randomness = randomness
        self._head = head
        self._head_draws: bool | None = None
        self._is_quiet = habits.knows_drawing and not habits.drawing

    def through(
        self, microbatch: int, value: Any, action: str, witness: Recording | None, with_head: bool
    ) -> Boundary:
        """Call layer after layer, and the head if it is its turn.

        Args:
            microbatch: The index of the micro-batch.
            value: What the first layer gets.
            action: The name of the action, for the note on an exception.
            witness: What sees each layer's output, where a close look is taken.
            with_head: Whether the head takes the last output.

        Raises:
            BaseException: What a layer raised, with a note of where and when.
        """
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
            return self._finish(microbatch, value) if with_head else pack(value)
        except BaseException as error:
            at_layer = position < len(self._layers)
            name = self._stage.layer_name(position) if at_layer else "the loss"
            error.add_note(self._stage.place(name, microbatch, action))
            raise

    def _call(self, layer: Callable[[Any], Any], position: int, microbatch: int, value: Any) -> Any:
        if not self._habits.may_draw(position):
            return layer(value)
        index = self._stage.first_layer + position
        value, draws = self._randomness.run(layer, value, microbatch, index)
        if draws:
            self._habits.drawing.add(position)
        return value

    def _finish(self, microbatch: int, value: Any) -> Boundary:
        """The head; whether it draws is learnt in each mini-batch anew, since it may be another."""
        assert self._head is not None, "only the last stage has a head"
        if self._head_draws is False:
            return self._head(microbatch, value)
        index = self._stage.first_layer + len(self._layers)
        outputs: Boundary
        outputs, self._head_draws = self._randomness.run(
            partial(self._head, microbatch), value, microbatch, index
        )
        return outputs
