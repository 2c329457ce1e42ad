"""What one layer does with memory, in numbers."""

from collections.abc import Sequence
from typing import NamedTuple

from gpipe.profiling.observation import Observation, StorageMark

__all__ = ["Trace", "traces"]


class Trace(NamedTuple):
    """What a layer saves, writes and returns, wherever in the model it stands.

    A storage is told by a number: that of an input is the input's position, the first if several
    inputs lie in it; behind them come those that the layer makes.

    Attributes:
        saved: The storages that autograd saves.
        written: The storages of inputs that the layer writes into.
        made_bytes: The size of each storage that the layer makes.
        outputs: The storage of each output; None where it is no activation.
        output_bytes: The bytes of each output.
    """

    saved: tuple[int, ...]
    written: tuple[int, ...]
    made_bytes: tuple[float, ...]
    outputs: tuple[int | None, ...]
    output_bytes: tuple[float, ...]

    def resembles(self, other: "Trace") -> bool:
        """Whether the storages are the same, though of other sizes."""
        mine = self.saved, self.written, self.outputs, len(self.made_bytes)
        return mine == (other.saved, other.written, other.outputs, len(other.made_bytes))

    def scaled(self, factor: float) -> "Trace":
        """The same with all sizes multiplied."""
        return self._replace(
            made_bytes=tuple(number * factor for number in self.made_bytes),
            output_bytes=tuple(number * factor for number in self.output_bytes),
        )


def traces(observations: Sequence[Observation], same: Sequence[int | None]) -> tuple[Trace, ...]:
    """The traces of forwards of one layer on different inputs.

    A storage that several of them saved or returned outlives a forward: it is that of a parameter,
    a buffer or a constant, and no activation.

    Args:
        observations: At least two.
        same: For each input the first one that lies in its storage; None: it is no activation.
    """
    keys = [_keys(observation) for observation in observations]
    constants = set.intersection(*keys)
    return tuple(_Numbers(each, same, constants).trace() for each in observations)


def _keys(observation: Observation) -> set[int]:
    return {mark.key for mark in (*observation.saved, *observation.outputs)}


class _Numbers:
    """Gives the storages of one observation their numbers."""

    def __init__(
        self, observation: Observation, same: Sequence[int | None], constants: set[int]
    ) -> None:
        self._observation = observation
        self._same = same
        self._numbers: dict[int, int | None] = dict.fromkeys(constants)
        self._made_bytes: list[int] = []
        for mark, number in zip(observation.inputs, same, strict=True):
            self._numbers[mark.key] = number

    def trace(self) -> Trace:
        """All in numbers."""
        saved = [self._number(mark) for mark in self._observation.saved]
        written = [self._same[position] for position in self._observation.written]
        outputs = [self._number(mark) for mark in self._observation.outputs]
        return Trace(
            tuple(number for number in saved if number is not None),
            tuple({number: None for number in written if number is not None}),
            tuple(self._made_bytes),
            tuple(outputs),
            tuple(self._observation.output_bytes),
        )

    def _number(self, mark: StorageMark) -> int | None:
        if mark.key not in self._numbers:
            self._numbers[mark.key] = len(self._same) + len(self._made_bytes)
            self._made_bytes.append(mark.num_bytes)
        return self._numbers[mark.key]
