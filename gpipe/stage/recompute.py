"""Repeats a forward, and sees that it is one."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Self

from torch import Tensor

from gpipe.stage.boundary import Boundary
from gpipe.stage.buffers import Buffer, Copies, changed_since, copies_of, marks_of, replaced
from gpipe.stage.fingerprint import Fingerprint, fingerprint
from gpipe.stage.habits import Habits
from gpipe.stage.stage import Stage

__all__ = ["Recording", "is_recomputing"]

_recomputing: ContextVar[bool] = ContextVar("gpipe_recomputing", default=False)


def is_recomputing() -> bool:
    """Whether the forward that runs now repeats an earlier one, for the sake of its backward.

    Layers that count their calls, and hooks that log, ask this so as to do it once a micro-batch.
    """
    return _recomputing.get()


class Recording:
    """What a recompute needs of its forward besides the inputs; made just before that forward.

    Args:
        stage: Whose forward it is.
        habits: What is known of the stage.
        buffers: All buffers of its layers.
        looks_closely: Whether each layer's output is compared, and not only the last one's shapes.
    """

    def __init__(
        self, stage: Stage, habits: Habits, buffers: Sequence[Buffer], looks_closely: bool
    ) -> None:
        self._stage = stage
        self._habits = habits
        self._learns = looks_closely or habits.changing_buffers is None
        changing = habits.changing_buffers or set()
        still = [] if self._learns else [buffer for buffer in buffers if buffer not in changing]
        self._buffers: Copies = copies_of(buffers if self._learns else changing)
        self._still = marks_of(still)
        self._fingerprints: list[Fingerprint] | None = [] if looks_closely else None
        self._shapes: list[Any] = []
        self._versions: list[int] = []

    @property
    def witness(self) -> Self | None:
        """This, where it is to see each layer's output."""
        return None if self._fingerprints is None else self

    def see(self, position: int, output: Any) -> None:
        """Note what the layer at this position gave, or compare it with what was noted.

        Raises:
            RuntimeError: It gave something else before.
        """
        assert self._fingerprints is not None
        found = fingerprint(output)
        if position == len(self._fingerprints):
            self._fingerprints.append(found)
        elif found != self._fingerprints[position]:
            raise RuntimeError(
                f"{self._stage.layer_name(position)} gave another output in its recompute than in "
                "its forward. It may draw from NumPy, from Python's `random` or from a generator "
                "of its own, or keep a cache. Draw from torch's default generator, ask "
                "gpipe.is_recomputing(), or choose checkpoint='never'."
            )

    def finish(self, inputs: Boundary, outputs: Sequence[Tensor]) -> None:
        """Take in what the forward has left.

        Raises:
            RuntimeError: A buffer has changed that had not in any forward before.
        """
        self._shapes = [_shape(tensor) for tensor in outputs]
        self._versions = inputs.versions()
        self._require_still()
        if self._learns:
            known = self._habits.changing_buffers or set()
            changing = self._habits.changing_buffers = known | changed_since(self._buffers)
            self._buffers = [(buffer, copy) for buffer, copy in self._buffers if buffer in changing]

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Let the layers start from what the forward started from, and know that they repeat it."""
        token = _recomputing.set(True)
        try:
            with replaced(self._buffers):
                yield
        finally:
            _recomputing.reset(token)

    def require_same_start(self, inputs: Boundary) -> None:
        """Refuse to start from something else than the forward did.

        Raises:
            RuntimeError: Somebody has written into the inputs, or into a buffer, since.
        """
        if inputs.versions() != self._versions or any(b.mark != mark for b, mark in self._still):
            raise RuntimeError(
                f"The input or a buffer of {self._stage.layer_range} was written to in place "
                "between the forward and its recompute. Call backward() first, or write to a copy."
            )

    def require_same_shapes(self, outputs: Sequence[Tensor]) -> None:
        """Refuse outputs of other shapes than those of the forward.

        Raises:
            RuntimeError: With both.
        """
        shapes = [_shape(tensor) for tensor in outputs]
        if shapes != self._shapes:
            raise RuntimeError(
                f"{self._stage.layer_range} gave tensors of shapes {shapes} in a recompute and "
                f"{self._shapes} in its forward. "
                "Let them do the same twice, or choose checkpoint='never'."
            )

    def _require_still(self) -> None:
        moved = [buffer for buffer, mark in self._still if buffer.mark != mark]
        if moved:
            self._habits.changing_buffers = (self._habits.changing_buffers or set()) | set(moved)
            names = ", ".join(f"{type(buffer.module).__name__}.{buffer.name}" for buffer in moved)
            raise RuntimeError(
                f"A forward of {self._stage.layer_range} changed the buffer {names}, which no "
                "forward had done before. A recompute would count it twice, so this mini-batch is "
                "refused. Run it again: the buffer is put back for recomputes from now on."
            )


def _shape(tensor: Tensor) -> Any:
    # The ragged size of a nested tensor is a new symbol each time.
    return "nested" if tensor.is_nested else tuple(tensor.shape)
